"""`deepspeed`: DeepSpeed's own estimate of model states under ZeRO-2 and ZeRO-3.

Source: `estimate_zero2_model_states_mem_needs` (deepspeed/runtime/zero/stage_1_and_2.py) and
`estimate_zero3_model_states_mem_needs` (stage3.py), DeepSpeed 0.16.9. Older releases said 4P +
16P/n instead of 2P + 18P/n for ZeRO-2. P is the number of parameters, shared ones once; 18 bytes
are a 16-bit gradient, an fp32 gradient, an fp32 master, Adam's two fp32 moments — and under ZeRO-3
16-bit parameters in place of the 16-bit gradient.
"""

from __future__ import annotations

from llmem.baselines.base import Answer, BaselineInput, cannot

SHARDED_BYTES = 18
LEAVES_OUT = [
    "activations, logits, batch size and sequence length (model states only, by its name)",
    "communication buckets, prefetched and live parameters",
    "tensor parallelism, LoRA, optimizers other than Adam",
    "allocator, CUDA context, NCCL",
]


def estimate(inp: BaselineInput) -> Answer:
    """Model-state bytes per GPU; FSDP and Gemini are answered as the ZeRO-3 they amount to."""
    if inp.zero_stage not in (2, 3):
        return cannot("DeepSpeed estimates ZeRO-2 and ZeRO-3 only")
    total = sum(p.numel() for p in inp.model.parameters())
    parts = (
        zero2(total, inp.gpus, inp.offload)
        if inp.zero_stage == 2
        else zero3(total, largest_layer(inp), inp.gpus, inp.offload)
    )
    return Answer(bytes=sum(parts.values()), parts=parts, leaves_out=list(LEAVES_OUT))


def zero2(params: int, gpus: int, offload: str = "none") -> dict[str, int]:
    """Bytes per GPU under ZeRO-2: all 16-bit parameters, and 1/n of the rest unless it is
    offloaded."""
    sharded = 0 if offload != "none" else int(SHARDED_BYTES * params / gpus)
    return {"parameters": 2 * params, "sharded_states": sharded}


def zero3(params: int, largest: int, gpus: int, offload: str = "none") -> dict[str, int]:
    """Bytes per GPU under ZeRO-3: the largest layer in fp32 and 1/n of what is not offloaded."""
    per_param = {"none": SHARDED_BYTES, "optimizer": 2, "all": 0}[offload]
    return {"largest_layer": 4 * largest, "sharded_states": int(per_param * params / gpus)}


def largest_layer(inp: BaselineInput) -> int:
    """Parameters that the largest single module owns itself, as DeepSpeed counts a "layer"."""
    return max(
        sum(p.numel() for p in module.parameters(recurse=False)) for module in inp.model.modules()
    )
