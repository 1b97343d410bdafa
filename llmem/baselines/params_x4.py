"""`params-x4`: four times the parameters' bytes — weights, gradients and Adam's two moments.

Source: the usual rule of thumb (for example Hugging Face's "Model training anatomy": parameters,
gradients and 8 bytes of Adam per fp32 parameter).
"""

from __future__ import annotations

from llmem.baselines.base import Answer, BaselineInput


def estimate(inp: BaselineInput) -> Answer:
    """4 x the bytes of all parameters at the width they are loaded with, on however many GPUs."""
    size = sum(p.numel() for p in inp.model.parameters()) * inp.dtype_bytes
    return Answer(
        bytes=4 * size,
        parts={"parameters": size, "gradients": size, "optimizer_states": 2 * size},
        leaves_out=[
            "activations, logits, batch size and sequence length",
            "sharding over GPUs, LoRA, optimizers other than Adam, fp32 masters",
            "allocator, CUDA context, NCCL",
        ],
    )
