"""What a data-parallel engine shards, gathers and frees as one: a unit, and when it runs.

A unit is a wrapped module (a transformer block) with the parameters that no unit inside it has;
the root unit holds the rest (embedding, final norm, head).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llmem.lifetimes import Parameter, Phase, Trace


@dataclass(frozen=True)
class Window:
    """When something runs: from the first tick to the last."""

    start: int
    end: int


@dataclass
class Unit:
    """One wrapped module, its parameters, and its calls by step.

    ``forward[step]`` holds one window per forward call of micro-batches; ``backward[step]`` from
    before its first op in backward (recomputation included) to after its last. ``again[step]`` are
    its calls inside backward, by recomputation.
    """

    name: str
    parameters: list[Parameter]
    is_root: bool
    forward: dict[int, list[Window]] = field(default_factory=dict)
    backward: dict[int, list[Window]] = field(default_factory=dict)
    again: dict[int, list[Window]] = field(default_factory=dict)

    @property
    def trainable(self) -> list[Parameter]:
        return [p for p in self.parameters if p.trainable]


def units_of(trace: Trace, wrapped: list[str]) -> list[Unit]:
    """The units for the wrapped module names, root first, then in the order of their first call.

    Modules without parameters of their own (all shared with an earlier unit) still make a unit.
    """
    root_name = ""
    names = [root_name, *wrapped]
    owner = _owners(trace.modules, wrapped)
    units = {name: Unit(name, [], name == root_name) for name in names}
    for parameter in trace.parameters:
        units[_owner_of(parameter.name, wrapped)].parameters.append(parameter)
    _forward_windows(trace, units)
    _backward_windows(trace, units, owner, names)
    called = [u for u in units.values() if u.forward and not u.is_root]
    called.sort(key=lambda unit: min(w[0].start for w in unit.forward.values()))
    return [units[root_name], *called]


def _owner_of(name: str, wrapped: list[str]) -> str:
    """The innermost wrapped module that contains ``name`` ('' for the root)."""
    inside = [w for w in wrapped if name == w or name.startswith(w + ".")]
    return max(inside, key=len, default="")


def _owners(modules: list[str], wrapped: list[str]) -> np.ndarray:
    """Index into ['', *wrapped] of each module's unit."""
    index = {name: i + 1 for i, name in enumerate(wrapped)}
    index[""] = 0
    return np.array([index[_owner_of(m, wrapped)] for m in modules], np.int64)


def _forward_windows(trace: Trace, units: dict[str, Unit]) -> None:
    for span in trace.spans:
        unit = units.get(trace.modules[span.module])
        if unit is None or span.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        again = span.phase is Phase.BACKWARD or span.recompute
        calls = unit.again if again else unit.forward
        calls.setdefault(span.step, []).append(Window(span.enter, span.exit))


def _backward_windows(
    trace: Trace, units: dict[str, Unit], owner: np.ndarray, names: list[str]
) -> None:
    ops = trace.ops
    starts = [t for t in trace.phase_ticks if t[1] is Phase.BACKWARD]
    ends = _phase_ends(trace)
    next_tick = np.append(ops.tick[1:], trace.step_ticks[-1])
    # A unit's backward is around those of the units inside it.
    inside = [[i for i, n in enumerate(names) if (n + ".").startswith(name + ".")] for name in names]
    for tick, _, step in starts:
        end = ends[tick]
        first, last = np.searchsorted(ops.tick, [tick, end])
        unit_of = owner[ops.module[first:last]]
        for index, name in enumerate(names):
            belongs = np.isin(unit_of, inside[index])
            for call in units[name].again.get(step, []):
                # One that other modules follow gets its gradient after all of that ran again.
                after = np.flatnonzero(~ops.recompute[first:last] & (ops.tick[first:last] > call.start))
                if call.start > tick and len(after) and not belongs[after[0]]:
                    belongs &= ~ops.recompute[first:last]
            mine = np.flatnonzero(belongs)
            if name == "":
                window = Window(tick, end)
            elif len(mine):
                window = Window(
                    int(ops.tick[first + mine[0]]), min(int(next_tick[first + mine[-1]]), end)
                )
            else:
                continue
            units[name].backward.setdefault(step, []).append(window)


def _phase_ends(trace: Trace) -> dict[int, int]:
    """Start tick of each phase -> the tick at which the next one starts."""
    ticks = [t for t, _, _ in trace.phase_ticks] + [trace.step_ticks[-1]]
    return dict(zip(ticks[:-1], ticks[1:], strict=True))
