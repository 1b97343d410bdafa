"""When FSDP1's hooks run: the calls of each unit, seen in the trace of the unsharded model.

A pre-forward hook runs before a module's forward (also before the ones that checkpointing runs again
inside backward, if they go through the module's call), a pre-backward hook when the gradient of the
module's output arrives, a post-backward hook when all gradients of the unit are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from llmem.lifetimes import TICK, Phase, Trace
from llmem.parallel.units import Unit


class Hook(IntEnum):
    """In the order in which they run where nothing is allocated between them."""

    POST_BACKWARD = 0
    POST_FORWARD = 1
    ROOT_PRE_BACKWARD = 2
    PRE_BACKWARD = 3
    RESHARD_ONLY = 4
    """A frozen unit's post-backward: a hook on its input, after those of the unit that made it."""
    PRE_FORWARD = 5
    FINAL = 6


@dataclass(frozen=True)
class Call:
    """A hook of ``unit`` (an index) at ``tick``; FINAL has no unit.

    ``micro`` counts the step's backwards. ``recompute`` marks forward hooks inside backward.
    """

    tick: int
    hook: Hook
    unit: int
    step: int
    micro: int
    recompute: bool = False
    nesting: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Inner modules leave first and enter last."""
        leaves = self.hook in (Hook.POST_FORWARD, Hook.POST_BACKWARD)
        return self.tick // TICK, int(self.hook), -self.nesting if leaves else self.nesting


def calls_of(trace: Trace, units: list[Unit]) -> list[Call]:
    """Every call of every unit's hooks, in program order."""
    calls = [*_forward_calls(trace, units), *_backward_calls(trace, units)]
    return sorted(calls, key=lambda call: call.order)


def _forward_calls(trace: Trace, units: list[Unit]) -> Iterator[Call]:
    index = {unit.name: i for i, unit in enumerate(units)}
    depth = [_depth(unit.name) for unit in units]
    for span in trace.spans:
        unit = index.get(trace.modules[span.module])
        if unit is None or span.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        again = span.phase is Phase.BACKWARD
        common = (unit, span.step, 0, again, depth[unit])
        yield Call(span.enter, Hook.PRE_FORWARD, *common)
        yield Call(span.exit, Hook.POST_FORWARD, *common)


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


@dataclass(frozen=True)
class _Backward:
    """A backward phase: its ticks, the ops in it and the unit of each."""

    step: int
    micro: int
    start: int
    end: int
    ticks: np.ndarray
    after: np.ndarray
    owner: np.ndarray
    recompute: np.ndarray


def _backward_calls(trace: Trace, units: list[Unit]) -> Iterator[Call]:
    inside = [[j for j, u in enumerate(units) if _contains(v.name, u.name)] for v in units]
    again = _called_again(trace, units)
    for phase in _backwards(trace, units):
        for i, unit in enumerate(units):
            common = (i, phase.step, phase.micro)
            done = Hook.POST_BACKWARD if unit.trainable else Hook.RESHARD_ONLY
            if unit.is_root:
                yield Call(phase.start, Hook.ROOT_PRE_BACKWARD, *common)
                yield Call(phase.end, done, *common)
                continue
            mine = phase.owner == i
            # A unit that checkpointing calls again has run that call before its backward starts.
            first = np.flatnonzero(mine & ~phase.recompute if i in again else mine)
            # A frozen unit is done when the gradient of its input is: after the units inside it.
            last = np.flatnonzero(mine if unit.trainable else np.isin(phase.owner, inside[i]))
            if len(first):
                nested = (False, _depth(unit.name))
                yield Call(int(phase.ticks[first[0]]), Hook.PRE_BACKWARD, *common, *nested)
                end = min(int(phase.after[last[-1]]), phase.end)
                yield Call(end, done, *common, *nested)
        yield Call(phase.end, Hook.FINAL, -1, phase.step, phase.micro)


def _called_again(trace: Trace, units: list[Unit]) -> set[int]:
    """The units whose calls, not only their ops, checkpointing runs again inside backward."""
    names = {unit.name: i for i, unit in enumerate(units)}
    found = {
        names.get(trace.modules[span.module])
        for span in trace.spans
        if span.phase is Phase.BACKWARD
    }
    return {index for index in found if index is not None}


def _contains(outer: str, inner: str) -> bool:
    return outer == inner or not outer or inner.startswith(outer + ".")


def _backwards(trace: Trace, units: list[Unit]) -> Iterator[_Backward]:
    ops = trace.ops
    owner = _owner_of_modules(trace.modules, units)
    after = np.append(ops.tick[1:], trace.step_ticks[-1])
    ends = [tick for tick, _, _ in trace.phase_ticks[1:]] + [trace.step_ticks[-1]]
    count: dict[int, int] = {}
    for (start, phase, step), end in zip(trace.phase_ticks, ends, strict=True):
        if phase is not Phase.BACKWARD:
            continue
        first, last = np.searchsorted(ops.tick, [start, end])
        micro = count.setdefault(step, 0)
        count[step] += 1
        yield _Backward(
            step, micro, start, end, ops.tick[first:last], after[first:last],
            owner[ops.module[first:last]], ops.recompute[first:last],
        )  # fmt: skip


def _owner_of_modules(modules: list[str], units: list[Unit]) -> np.ndarray:
    """Index of the innermost unit that each module is in."""
    by_name = {unit.name: i for i, unit in enumerate(units)}
    found = []
    for module in modules:
        name = module
        while name and name not in by_name:
            name = name.rpartition(".")[0]
        found.append(by_name[name])
    return np.array(found, np.int64)
