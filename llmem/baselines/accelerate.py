"""`accelerate`: the "Training using Adam" column of `accelerate estimate-memory`.

Source: `estimate_training_usage` and `gather_data` in accelerate/commands/estimate.py (accelerate
1.15.0). The column prints the largest of the components model, gradients, optimizer and step, not
their sum. It loads the base model, without the language-model head, in fp32, buffers included.
"""

from __future__ import annotations

from typing import Any

from llmem.baselines.base import Answer, BaselineInput


def estimate(inp: BaselineInput) -> Answer:
    """Bytes of the column's row for the run's dtype: fp32 alone, or 16-bit if any of it is."""
    size = fp32_bytes(inp.model)
    half = inp.mixed or inp.dtype_bytes < 4
    parts = components(size, half=half)
    return Answer(
        bytes=max(parts.values()),
        parts=parts,
        leaves_out=[
            "it is the largest of its components, not their sum",
            "the language-model head, unless it is tied to the embedding",
            "activations, logits: batch size 1 and no sequence length",
            "parallelism, LoRA, optimizers other than Adam",
            "allocator, CUDA context, NCCL",
        ],
    )


def components(fp32: int, *, half: bool) -> dict[str, int]:
    """The four components, bytes, for a model of ``fp32`` bytes; ``half`` is float16 or
    bfloat16."""
    if not half:
        return {"model": fp32, "gradients": fp32, "optimizer": 2 * fp32, "step": 4 * fp32}
    return {"model": fp32, "gradients": fp32 + fp32 // 2, "optimizer": 2 * fp32, "step": 2 * fp32}


def fp32_bytes(model: Any) -> int:
    """Bytes of the base model's tensors: floating-point ones in fp32, others as they are."""
    base = getattr(model, "base_model", model)
    tensors = [*base.parameters(), *base.buffers()]
    return sum(t.numel() * (4 if t.is_floating_point() else t.element_size()) for t in tensors)
