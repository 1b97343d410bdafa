"""What a data-parallel engine shards, gathers and frees as one: a unit, and when it runs.

A unit is a wrapped module (a transformer block) with the parameters that no unit inside it has, or
several modules that are wrapped as one; the root unit holds the rest (embedding, final norm, head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmem.lifetimes import Parameter, Phase, Span, Together, Trace


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
    its calls inside backward, by recomputation. ``takes_ids``: its input needs no gradient.
    """

    name: str
    parameters: list[Parameter]
    is_root: bool
    forward: dict[int, list[Window]] = field(default_factory=dict)
    backward: dict[int, list[Window]] = field(default_factory=dict)
    again: dict[int, list[Window]] = field(default_factory=dict)
    takes_ids: bool = False

    @property
    def trainable(self) -> list[Parameter]:
        return [p for p in self.parameters if p.trainable]


def units_of(
    trace: Trace, wrapped: Sequence[str], together: Sequence[Together] = ()
) -> list[Unit]:
    """The units for the wrapped module names, root first, then in the order of their first call.

    ``together``: units of several modules, or of an embedding. Modules without parameters of their
    own (all shared with an earlier unit) still make a unit.
    """
    root_name = ""
    units = {name: Unit(name, [], name == root_name) for name in [root_name, *wrapped]}
    unit_of = {name: name for name in units}
    for several in together:
        units[several.name] = Unit(several.name, [], False, takes_ids=several.takes_ids)
        unit_of |= dict.fromkeys(several.modules, several.name)
    for parameter in trace.parameters:
        units[unit_of[_owner_of(parameter.name, unit_of)]].parameters.append(parameter)
    _forward_windows(trace, units)
    for several in together:
        if len(several.modules) > 1:
            _forward_of_several(trace, units[several.name], units[root_name], several.modules)
    _backward_windows(trace, units, unit_of)
    called = [u for u in units.values() if u.forward and not u.is_root]
    called.sort(key=lambda unit: min(w[0].start for w in unit.forward.values()))
    return [units[root_name], *called]


def _owner_of(name: str, wrapped: Sequence[str] | Mapping[str, str]) -> str:
    """The innermost wrapped module that contains ``name`` ('' for the root)."""
    inside = [w for w in wrapped if name == w or name.startswith(w + ".")]
    return max(inside, key=len, default="")


def _is_again(span: Span) -> bool:
    return span.phase is Phase.BACKWARD or span.recompute


def _forward_windows(trace: Trace, units: dict[str, Unit]) -> None:
    for span in trace.spans:
        unit = units.get(trace.modules[span.module])
        if unit is None or span.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        calls = unit.again if _is_again(span) else unit.forward
        calls.setdefault(span.step, []).append(Window(span.enter, span.exit))


def _forward_of_several(trace: Trace, unit: Unit, root: Unit, modules: Sequence[str]) -> None:
    """From the first call of the first of ``modules`` to the last one's, in each forward.

    Where one of them does not run (a head whose weight alone is used), torch ends the unit with the
    root (``_force_complete_incomplete_states``).
    """
    for step, forwards in root.forward.items():
        for whole in forwards:
            calls = {
                trace.modules[span.module]: span
                for span in trace.spans
                if trace.modules[span.module] in modules
                and not _is_again(span)
                and whole.start <= span.enter
                and span.exit <= whole.end
            }
            if calls:
                start = min(span.enter for span in calls.values())
                last = max(span.exit for span in calls.values())
                end = last if len(calls) == len(modules) else whole.end
                unit.forward.setdefault(step, []).append(Window(start, end))


def _backward_windows(trace: Trace, units: dict[str, Unit], unit_of: dict[str, str]) -> None:
    """``unit_of``: name of each wrapped module -> that of its unit."""
    ops, modules = trace.ops, list(unit_of)
    index = {name: i for i, name in enumerate(modules)}
    owner = np.array([index[_owner_of(m, unit_of)] for m in trace.modules], np.int64)
    starts = [t for t in trace.phase_ticks if t[1] is Phase.BACKWARD]
    ends = _phase_ends(trace)
    next_tick = np.append(ops.tick[1:], trace.step_ticks[-1])
    # A unit's backward is around those of the units inside it.
    inside: dict[str, list[int]] = {name: [] for name in units}
    for module, name in unit_of.items():
        inside[name] += [i for i, n in enumerate(modules) if (n + ".").startswith(module + ".")]
    for tick, _, step in starts:
        end = ends[tick]
        first, last = np.searchsorted(ops.tick, [tick, end])
        owners = owner[ops.module[first:last]]
        for name in units:
            belongs = np.isin(owners, inside[name])
            again = ops.recompute[first:last]
            for call in units[name].again.get(step, []):
                # One that other modules follow gets its gradient after all of that ran again.
                after = np.flatnonzero(~again & (ops.tick[first:last] > call.start))
                if call.start <= tick or not len(after):
                    continue
                if not belongs[after[0]]:
                    belongs &= ~again
                else:  # its gradient is there before anything runs again
                    before = np.flatnonzero(~again[: after[0]])
                    belongs[before[-1] + 1 if len(before) else 0] = True
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
