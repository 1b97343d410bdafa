"""`xmem`: an estimator after xMem: allocator replay of a real CPU step.

Source: Stone-ResearchLife/xMem (MIT). It trains for real on the CPU under `torch.profiler`, takes
the profiler's allocations and frees in order, puts one block per parameter and buffer in front, and
replays them through a model of the CUDA caching allocator. This does the same, in two fp32
iterations with `zero_grad` at their top. What a CPU kernel allocates stands for what a CUDA kernel
would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmem.baselines.base import Answer, BaselineInput, cannot

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_PARAMETERS = 300_000_000
MAX_FLOPS = 4e12
"""About a minute on two cores; a step costs 6 floating-point operations per parameter and token."""
ITERATIONS = 2

LEAVES_OUT = [
    "CUDA context and NCCL, unless a base is given",
    "kernels and temporaries that differ between CPU and CUDA (attention, foreach, workspaces)",
    "mixed precision, quantisation, more than one GPU",
]

Event = tuple[int, int]
"""(address, bytes): an allocation of so many bytes, or a free where the bytes are negative."""


def estimate(inp: BaselineInput) -> Answer:
    """Peak reserved bytes of the replay, plus a base only where one was measured."""
    why = _refusal(inp)
    if why:
        return cannot(why)
    # The class, not the instance: a model on meta has no data, and its buffers would hold garbage.
    model = type(inp.model)(inp.config).train()
    blocks = [t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())]
    requested, allocated, reserved = replay(blocks, profile(model, inp))
    base = inp.base_bytes or 0
    return Answer(
        bytes=reserved + base,
        parts={
            "requested": requested,
            "allocated": allocated,
            "reserved": reserved,
            "m_base": base,
        },
        leaves_out=list(LEAVES_OUT),
    )


def replay(blocks: list[int], events: Iterable[Event]) -> tuple[int, int, int]:
    """Peak requested, allocated and reserved bytes of ``events`` after one malloc per block.

    A free of an address that was never allocated is older than the record and is passed over.
    """
    import numpy as np

    from llmem.gpu.replay import FREE, MALLOC, replay_events

    rows = [(MALLOC, i, size) for i, size in enumerate(blocks) if size]
    live: dict[int, int] = {}
    for number, (address, size) in enumerate(events, start=len(blocks)):
        if size > 0:
            live[address] = number
            rows.append((MALLOC, number, size))
        elif address in live:
            rows.append((FREE, live.pop(address), 0))
    kind, ids, nbytes = (np.asarray(column, dtype=np.int64) for column in zip(*rows, strict=True))
    result = replay_events(kind.astype(np.int8), ids, nbytes, want_curve=False)
    return result.peak_requested, result.peak_allocated, result.peak_reserved


def profile(model: nn.Module, inp: BaselineInput) -> list[Event]:
    """Train ``model`` for two iterations on the CPU and list its allocations and frees in order."""
    import torch
    from torch.profiler import ProfilerActivity

    if inp.gradient_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    tokens = torch.zeros(inp.batch, inp.seq, dtype=torch.int64)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        optimizer = _optimizer(inp.optim, model)
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            outputs = model(input_ids=tokens.clone(), labels=tokens.clone())
            outputs.loss.backward()
            optimizer.step()
    return _allocations(profiler)


def _allocations(profiler: torch.profiler.profile) -> list[Event]:
    from torch._C._profiler import _EventType

    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    stack: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    found = []
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append(event)
    found.sort(key=lambda event: event.start_time_ns)
    return [(event.extra_fields.ptr, event.extra_fields.alloc_size) for event in found]


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    import torch

    if name.startswith("sgd"):
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _refusal(inp: BaselineInput) -> str | None:
    parameters = sum(p.numel() for p in inp.model.parameters())
    flops = 6.0 * parameters * inp.batch * inp.seq * ITERATIONS
    if inp.gpus > 1:
        return "xMem knows one GPU only"
    if inp.mixed or inp.dtype_bytes != 4:
        return "xMem's CPU step is fp32 only"
    if not hasattr(inp.model, "get_output_embeddings") or hasattr(inp.model, "peft_config"):
        return "xMem builds the model's class from its config, and this model is a wrapper"
    if not inp.optim.startswith(("adamw_torch", "adam", "sgd", "adafactor")):
        return f"xMem's CPU step has no optimizer '{inp.optim}'"
    if parameters > MAX_PARAMETERS:
        return f"it needs a real CPU step, and {parameters / 1e6:,.0f} M parameters are too many"
    if flops > MAX_FLOPS:
        return f"it needs a real CPU step, and {flops / 1e12:,.1f} TFLOP would take minutes"
    return None
