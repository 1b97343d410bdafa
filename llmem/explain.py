"""Which storages make the peak: who made them, what they wait for, what frees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmem.estimate import Rank
from llmem.lifetimes import BREAKDOWN, NEVER, Phase, Trace

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Held:
    """A storage alive at the peak."""

    nbytes: int
    kind: str
    made_by: str
    module: str
    waits_for: str
    """The next op that reads it after the peak: what it is kept for."""
    freed_by: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def largest_at_peak(rank: Rank, top: int = 12) -> list[Held]:
    """The ``top`` largest storages alive at the rank's allocated peak, largest first."""
    timeline, trace = rank.timeline, rank.table.trace
    alive = np.flatnonzero(timeline.alive(rank.peak_at.index))
    sizes = timeline.block_bytes[alive]
    order = np.lexsort((alive, -sizes))[:top]
    rows = alive[order]
    graph = trace.graph(rows.tolist())
    return [_held(rank, trace, graph, row) for row in rows.tolist()]


def _held(rank: Rank, trace: Trace, graph: nx.DiGraph, row: int) -> Held:
    table = rank.timeline.lifetimes
    peak_op = trace.op_at(rank.peak_at.tick)
    readers = sorted(op for _, op in graph.successors(("storage", row)) if op >= peak_op)
    kind = next(
        name
        for name, members in BREAKDOWN.items()
        if int(table.category[row]) in [int(m) for m in members]
    )
    key, module = int(table.key[row]), trace.modules[int(table.module[row])]
    if 0 <= key < len(trace.parameters):
        module = trace.parameters[key].name
    return Held(
        nbytes=int(rank.timeline.block_bytes[row]),
        kind=kind,
        made_by=trace.op_name(int(table.birth_op[row])) or "before the step",
        module=module,
        waits_for=_op(trace, readers[0]) if readers else _unread(trace),
        freed_by=_freed_by(trace, int(table.death_op[row]), int(table.death[row])),
    )


def _unread(trace: Trace) -> str:
    """Why no reader is named: a pipeline's repeated micro-batches do not say who reads what."""
    return "nothing traced" if len(trace.touch_op) else "not known"


def _freed_by(trace: Trace, op: int, tick: int) -> str:
    """The op that let go of it, or the last one before Python, autograd or an engine did."""
    if op >= 0:
        return _op(trace, op)
    if tick == NEVER:
        return "not in these steps"
    phase, _ = trace.phase_at(tick)
    before = trace.op_at(tick)
    if before < 0 or int(trace.ops.phase[before]) != phase:
        return phase.label
    return f"what follows {_op(trace, before)}"


def _op(trace: Trace, op: int) -> str:
    phase = Phase(int(trace.ops.phase[op])).label
    module = trace.modules[int(trace.ops.module[op])]
    return f"{trace.op_name(op)} in {phase}" + (f" of {module}" if module else "")
