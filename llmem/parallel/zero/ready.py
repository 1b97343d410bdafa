"""When each gradient is finished, micro-batch by micro-batch, and where backwards start and end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llmem.lifetimes import Parameter, Phase, Touch, Trace
from llmem.parallel.gradients import gradient_rows


@dataclass
class Backward:
    """One micro-batch's backward of a step: ticks, and the parameters by when they are ready."""

    step: int
    micro: int
    last: bool
    """Whether it is the step's last one (the boundary of gradient accumulation)."""
    start: int
    end: int
    ready: list[tuple[int, Parameter]] = field(default_factory=list)


def backwards_of(trace: Trace) -> list[Backward]:
    """All backwards, in order, with the trained parameters that got a gradient in each.

    The trace notes when the last micro-batch finished a gradient; for the ones before it, that is
    after the op that made the gradient or added to it.
    """
    ticks = [t for t, _, _ in trace.phase_ticks] + [trace.step_ticks[-1]]
    found: list[Backward] = []
    for (start, phase, step), end in zip(trace.phase_ticks, ticks[1:], strict=True):
        if phase is Phase.BACKWARD:
            micro = found[-1].micro + 1 if found and found[-1].step == step else 0
            found.append(Backward(step, micro, True, start, end))
            if micro:
                found[-2].last = False
    rows = gradient_rows(trace)
    early = {k: r for k, r in rows.items() if any(not b.last for b in found if b.step == k[0])}
    writes = _writes(trace, list(early.values())) if early else {}
    for backward in found:
        for parameter in trace.parameters:
            row = rows.get((backward.step, parameter.key))
            if row is None or not parameter.trainable:
                continue
            ready: int | None
            if backward.last:
                ready = trace.gradient_ready.get((backward.step, parameter.key))
            else:
                ready = _last_write(trace, writes[row], backward)
            if ready is not None:
                backward.ready.append((ready, parameter))
        backward.ready.sort(key=lambda item: item[0])
    return found


def _writes(trace: Trace, rows: list[int]) -> dict[int, list[int]]:
    """The ops that write to each of ``rows``, in order."""
    mask = np.isin(trace.touch_row, rows) & (trace.touch_kind == Touch.WRITE)
    found: dict[int, list[int]] = {row: [] for row in rows}
    for op, row in zip(trace.touch_op[mask].tolist(), trace.touch_row[mask].tolist(), strict=True):
        found[row].append(op)
    return found


def _last_write(trace: Trace, ops: list[int], backward: Backward) -> int | None:
    """Tick after the last of ``ops`` that ran in ``backward``."""
    ticks = trace.ops.tick
    inside = [op for op in ops if backward.start <= ticks[op] < backward.end]
    if not inside:
        return None
    after = int(np.searchsorted(ticks, ticks[inside[-1]], side="right"))
    return int(ticks[after]) + 1 if after < len(ticks) else backward.end
