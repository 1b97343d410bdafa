"""Which storage was which parameter's gradient in which step."""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import Category, Phase, Touch, Trace


def gradient_rows(trace: Trace) -> dict[tuple[int, int], int]:
    """(step, parameter key) -> row of the gradient that backward of that step made."""
    table = trace.lifetimes
    rows = np.flatnonzero(table.category == Category.GRADIENT)
    steps = np.searchsorted(trace.step_ticks, table.birth[rows], side="right") - 1
    keys = table.key[rows]
    return {(int(s), int(k)): int(r) for s, k, r in zip(steps, keys, rows, strict=True)}


def added_gradients(trace: Trace) -> dict[tuple[int, int, int], list[int]]:
    """(step, micro-batch, parameter key) -> rows that backward added to an existing gradient.

    Autograd makes each later micro-batch's gradient afresh, adds it to ``.grad`` in place
    (``add_``) and drops it. The first micro-batch is 0 and adds nothing.
    """
    gradients = {row: key for (_, key), row in gradient_rows(trace).items()}
    if "add_" not in trace.names:
        return {}
    name = trace.names.index("add_")
    starts = [(t, s) for t, phase, s in trace.phase_ticks if phase is Phase.BACKWARD]
    micro = {tick: sum(1 for t, s in starts if s == step and t < tick) for tick, step in starts}
    ticks = [t for t, _ in starts]
    adds = np.flatnonzero(
        (trace.ops.name == name) & (trace.ops.phase == int(Phase.BACKWARD))
    )
    reads: dict[int, list[int]] = {}
    mask = np.isin(trace.touch_op, adds) & (trace.touch_kind == Touch.READ)
    for op, row in zip(trace.touch_op[mask].tolist(), trace.touch_row[mask].tolist(), strict=True):
        reads.setdefault(op, []).append(row)
    found: dict[tuple[int, int, int], list[int]] = {}
    for op, rows in reads.items():
        if len(rows) != 2 or rows[0] not in gradients:
            continue
        start = ticks[int(np.searchsorted(ticks, trace.ops.tick[op], side="right")) - 1]
        where = (int(trace.ops.step[op]), micro[start], gradients[rows[0]])
        found.setdefault(where, []).append(rows[1])
    return found
