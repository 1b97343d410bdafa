"""An estimate as a memory snapshot that pytorch.org/memory_viz opens."""

from __future__ import annotations

from pathlib import Path

from llmem.errors import LlmemError
from llmem.estimate import Estimate
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.snapshot import write_snapshot
from llmem.lifetimes import Category, Phase, Trace
from llmem.timeline import Timeline, replay


def write_memory_viz(result: Estimate, path: Path) -> None:
    """Write the worst rank's allocator history as torch's snapshot pickle.

    Each allocation carries a stack of three frames: the op, its module, its phase and category,
    so that memory_viz's tooltips name them. Raises LlmemError if the file cannot be written or
    the estimate is for a CPU, which has no caching allocator.
    """
    if not result.device.is_cuda:
        raise LlmemError("a snapshot shows a CUDA allocator; leave out --gpu cpu or --snapshot")
    table = result.worst.table
    conf = AllocConf.parse(result.spec.alloc_conf)
    emptied = table.trace.cache_emptied
    timeline = replay(
        table.lifetimes, conf=conf, addresses=True, cache_emptied=emptied, held=table.held
    )
    try:
        write_snapshot(path, _rows(timeline, table.trace), timeline.layout)
    except OSError as error:
        raise LlmemError(f"cannot write {path}: {error.strerror}; choose another file") from None


def _rows(
    timeline: Timeline, trace: Trace
) -> list[tuple[str, int, int, int, list[tuple[str, int, str]], int]]:
    rows = []
    lifetimes = timeline.lifetimes
    for index, (row, sign) in enumerate(
        zip(timeline.events.row.tolist(), timeline.events.sign.tolist(), strict=True)
    ):
        address = timeline.addresses[row]
        nbytes, stream = int(timeline.block_bytes[row]), int(lifetimes.stream[row])
        if sign > 0:
            rows.append(("alloc", address, nbytes, stream, _stack(trace, timeline, row), index))
        else:
            rows.append(("free_requested", address, nbytes, stream, [], index))
            rows.append(("free_completed", address, nbytes, stream, [], index))
    return rows


def _stack(trace: Trace, timeline: Timeline, row: int) -> list[tuple[str, int, str]]:
    lifetimes = timeline.lifetimes
    op = int(lifetimes.birth_op[row])
    phase = Phase(int(trace.ops.phase[op])).label if op >= 0 else Phase.SETUP.label
    module = trace.modules[int(lifetimes.module[row])] or "(root)"
    category = Category(int(lifetimes.category[row])).name.lower()
    name = trace.op_name(op) or "before the step"
    return [(name, 0, name), (module, 0, module), (category, 0, f"{phase}: {category}")]
