"""How long freed blocks stay unusable where ``Tensor.record_stream`` was called on them.

A block that a second stream uses is freed in two steps: it counts as allocated until its tensor dies,
but the allocator gives it out again only at a request that finds the second stream's work done
(``insert_events`` and ``process_events`` of c10/cuda/CUDACachingAllocator.cpp). When that is depends on
how far the CPU, which makes the requests, runs ahead of the GPU, which does the work. The bound drawn
here is the worst case: no work is known to be done before the CPU has to wait for it. So such blocks
are held until the first of these waits:

* Trainer reads the loss after each backward (``logging_nan_inf_filter``); Megatron-LM and pipelines
  read the gradients' norm or infinities before the optimizer's step;
* FSDP1 waits, before an all-gather, for the free of the gathered parameter two before
  (``limit_all_gathers``); ZeRO-3 waits, before a reduction, for the third before (``param_reduce_events``);
* a stream takes about a thousand kernels, then the CPU waits at each launch (``LAUNCH_QUEUE``).

Who calls it: FSDP1 and ZeRO-3 do in their own code, at all versions. ProcessGroupNCCL did for every
tensor of a collective, unless TORCH_NCCL_AVOID_RECORD_STREAMS=1 was set, which exists since torch 2.1
(pytorch#97053); since 2.2 no more for all-gathers and reduce-scatters of whole tensors that nobody waits for
later (pytorch#111431); since 2.8 never (pytorch#150398), and the variable is ignored. FSDP2 does not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.lifetimes import NEVER, TICK, HostWait, Ints, Phase, Recorded, Trace
from llmem.parallel import RankTable
from llmem.spec import RunSpec

COLLECTIVES = frozenset({
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_",
})  # fmt: skip
"""Ops of ``_c10d_functional`` that hand their tensors to the process group."""

WHOLE_TENSORS = frozenset({
    "all_gather_into_tensor", "all_gather_into_tensor_out", "reduce_scatter_tensor",
})  # fmt: skip
"""What is not recorded since torch 2.2 where the caller waits at once, as Megatron-LM's layers do."""

RECORDED_UNTIL, EXEMPT_SINCE = (2, 8), (2, 2)

LAUNCH_QUEUE = 1024
"""Kernels that a stream takes before a launch waits for the oldest. NVIDIA documents no number; measured
were about 1000 per stream (forums.developer.nvidia.com/t/68937, stackoverflow.com/questions/53970187)."""

NO_KERNEL = ("empty", "new_empty", "resize", "wait_tensor", "global_memory_buffer")
"""How the names of ops begin that are recorded for their memory and launch nothing."""


def nccl_records(spec: RunSpec) -> bool:
    """Whether ProcessGroupNCCL of the torch assumed can record streams at all."""
    return _torch(spec) < RECORDED_UNTIL


def records_streams(spec: RunSpec) -> bool:
    """Whether a run calls ``record_stream`` on tensors that it lets go of within a step."""
    split = max(spec.tp, spec.cp, spec.ep) > 1 or spec.strategy in ("zero1", "zero2")
    return spec.strategy in ("fsdp", "zero3") or (split and nccl_records(spec))


def with_held(tables: list[RankTable], spec: RunSpec) -> list[RankTable]:
    """The tables with the ticks until which blocks are held, if ``--record-streams`` asks for it."""
    if not spec.record_streams:
        return tables
    if spec.pp > 1:
        raise LlmemError("--record-streams with --pp is not modelled; leave one of them out")
    return [
        replace(table, held=held_until(table.trace, spec), assumptions=[*table.assumptions, NOTE])
        for table in tables
    ]


NOTE = (
    "record_stream: blocks that another stream uses are held until the CPU has to wait for the GPU (a "
    "number is read, an engine's own limit, a full launch queue), which is an upper bound: the CPU runs "
    "ahead as far as it can"
)


def held_until(trace: Trace, spec: RunSpec) -> Ints:
    """The tick from which each lifetime's block can be given out again, [rows]; its death at least."""
    table = trace.lifetimes
    held = table.death.copy()
    waited_for = set(_of_collectives(trace, spec).tolist())
    recorded = {row: Recorded(by_nccl=True) for row in waited_for} | trace.recorded
    waits = _all_waits(trace, spec, table.death[list(recorded)])
    for how in set(recorded.values()):
        if how.by_nccl and not nccl_records(spec):
            continue
        rows = np.array([row for row, other in recorded.items() if other == how], np.int64)
        rows = rows[table.death[rows] != NEVER]
        until = _next_wait(table.death[rows], waits, how.on_compute)
        in_order = np.isin(rows, list(waited_for)) | how.on_compute
        until[in_order] = np.minimum(until, _queue_full(table.death[rows], trace))[in_order]
        held[rows] = np.maximum(held[rows], until)
    return held


def _queue_full(death: Ints, trace: Trace) -> Ints:
    """When the compute stream must have come to each death, because no more kernels could wait.

    It waits for the collectives of the trace before it goes on, so these are done as well. Each op counts
    as one kernel, of the several that some have: fewer is the longer time.
    """
    silent = [number for number, name in enumerate(trace.names) if name.startswith(NO_KERNEL)]
    launches = trace.ops.tick[~np.isin(trace.ops.name, silent)]
    last = np.searchsorted(launches, death) + LAUNCH_QUEUE
    return np.append(launches, NEVER)[np.minimum(last, len(launches))]


def _next_wait(death: Ints, waits: list[HostWait], on_compute: bool) -> Ints:
    """The first wait after each death that covers what had been launched by then."""
    known = np.array([w.compute if on_compute else w.communication for w in waits], np.int64)
    ticks = np.array([w.tick for w in waits], np.int64)
    known = np.maximum.accumulate(known)  # a stream works in order: what is done stays done
    first = np.maximum(np.searchsorted(known, death), np.searchsorted(ticks, death))
    return np.append(ticks, NEVER)[first]


def _all_waits(trace: Trace, spec: RunSpec, deaths: Ints) -> list[HostWait]:
    """The engine's waits, and those at which the training loop reads a number, in order.

    ``deaths``: of what is recorded. What the engine frees as backward ends is freed before the loss is read.
    """
    reads_loss = spec.pp == 1 and spec.strategy != "megatron"
    ends = [tick for tick, _, _ in trace.phase_ticks[1:]] + [trace.step_ticks[-1]]
    ticks = list(trace.step_ticks)
    for (start, phase, _), end in zip(trace.phase_ticks, ends, strict=True):
        if reads_loss and phase is Phase.BACKWARD:
            last = deaths[(deaths >= end) & (deaths // TICK == end // TICK)]
            ticks.append(int(last.max()) if len(last) else end)
        elif phase in (Phase.CLIP, Phase.OPTIMIZER) and not reads_loss:
            ticks.append(start)
    return sorted([*trace.host_waits, *(HostWait(tick, tick, tick) for tick in ticks)])


def _of_collectives(trace: Trace, spec: RunSpec) -> NDArray[np.int64]:
    """Rows that the trace's own collectives read or write."""
    waited_at_once = spec.tp_plan == "megatron" and _torch(spec) >= EXEMPT_SINCE
    names = COLLECTIVES - WHOLE_TENSORS if waited_at_once else COLLECTIVES
    kinds = [number for number, name in enumerate(trace.names) if name in names]
    ops = np.flatnonzero(np.isin(trace.ops.name, kinds))
    return np.unique(trace.touch_row[np.isin(trace.touch_op, ops)])


def _torch(spec: RunSpec) -> tuple[int, int]:
    major, minor = (spec.as_torch or installed("torch")).split(".")[:2]
    return int(major), int(minor)
