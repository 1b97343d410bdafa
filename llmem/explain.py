"""Which storages make the peak: who made them, what they wait for, what frees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmem.estimate import Rank
from llmem.lifetimes import BREAKDOWN, Phase, Touch, Trace


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
    touches = _touches(trace, rows, rank)
    return [_held(rank, trace, int(row), touches.get(int(row), [])) for row in rows]


def _touches(trace: Trace, rows: Any, rank: Rank) -> dict[int, list[tuple[int, Touch]]]:
    """Rows of a rank's table are those of the trace only where nothing was sharded."""
    if rank.table.lifetimes is not trace.lifetimes:
        return {}
    return trace.touches(int(row) for row in rows)


def _held(rank: Rank, trace: Trace, row: int, touches: list[tuple[int, Touch]]) -> Held:
    table = rank.timeline.lifetimes
    peak_op = trace.op_at(rank.peak_at.tick)
    later = [op for op, kind in touches if kind == Touch.READ and op >= peak_op]
    kind = next(
        name
        for name, members in BREAKDOWN.items()
        if int(table.category[row]) in [int(m) for m in members]
    )
    key = int(table.key[row])
    module = trace.modules[int(table.module[row])]
    if key >= 0 and key < len(trace.parameters):
        module = trace.parameters[key].name
    return Held(
        nbytes=int(rank.timeline.block_bytes[row]),
        kind=kind,
        made_by=trace.op_name(int(table.birth_op[row])) or "before the step",
        module=module,
        waits_for=_op(trace, later[0]) if later else "nothing traced",
        freed_by=_op(trace, int(table.death_op[row])) if table.death_op[row] >= 0 else "never",
    )


def _op(trace: Trace, op: int) -> str:
    phase = Phase(int(trace.ops.phase[op])).label
    module = trace.modules[int(trace.ops.module[op])]
    return f"{trace.op_name(op)} in {phase}" + (f" of {module}" if module else "")
