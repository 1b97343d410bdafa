"""Where in a traced step each pipeline stage works, and which parameters it holds.

The layers are split as transformers does (``PipelineStage.layer_range_for_rank``: the first stages
get one more where the number does not divide). What comes before the first layer belongs to the
first stage, but for the masks and position embeddings, which every stage makes for itself; what
comes after the last layer belongs to the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, TICK, Ints, Phase, Touch, Trace
from llmem.parallel.pipeline.action import Action, Kind


@dataclass(frozen=True)
class Window:
    """The events after ``start`` up to ``end`` (ticks)."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def holds(self, ticks: np.ndarray) -> np.ndarray:
        return (ticks > self.start) & (ticks <= self.end)


@dataclass(frozen=True)
class Stages:
    """Windows of the traced step: one prelude, then one forward and one backward per stage."""

    trace: Trace
    prelude: Window
    forward: list[Window]
    backward: list[Window]
    names: list[list[str]]
    """The layers of each stage."""
    outputs: list[Ints]
    """Rows that each stage but the last makes and the next one reads."""
    step: int = 0
    """The step of ``trace`` that was cut."""
    cut: bool = False
    """Whether stages had graphs of their own while they were traced."""
    weights: list[int] = field(default_factory=list)
    """If backward was parted: the tick in each stage's where that of the parameters begins."""

    @property
    def number(self) -> int:
        return len(self.forward)

    @property
    def hidden(self) -> int:
        """Bytes of what goes from stage to stage (and of its gradient)."""
        rows = self.outputs[0] if self.outputs else np.empty(0, np.int64)
        return int(self.trace.lifetimes.nbytes[rows].sum())

    def windows(self, action: Action) -> list[Window]:
        """What ``action`` runs."""
        if action.forward:
            return [self.prelude, self.forward[action.stage]]
        whole = self.backward[action.stage]
        if action.kind is Kind.BACKWARD:
            return [whole]
        turn = self.weights[action.stage]
        is_input = action.kind is Kind.INPUT
        return [Window(whole.start, turn) if is_input else Window(turn, whole.end)]

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        """Parameter key -> its stages. Tied embeddings are on the first and the last."""
        owner = {name: stage for stage, names in enumerate(self.names) for name in names}
        found: dict[int, list[int]] = {}
        for parameter in self.trace.parameters:
            layer = next((n for n in owner if parameter.name.startswith(n + ".")), None)
            if layer is not None:
                found[parameter.key] = [owner[layer]]
                continue
            read = self._read_in(parameter.row)
            found[parameter.key] = read or [self.number - 1]
        return found

    def _read_in(self, row: int) -> list[int]:
        """First and last stage, as far as they read ``row`` outside the layers."""
        trace = self.trace
        ops = trace.touch_op[trace.touch_row == row]
        ticks = trace.ops.tick[ops[trace.ops.phase[ops] == int(Phase.FORWARD)]]
        ticks = ticks[(ticks >= self.prelude.start) & (ticks < self.forward[-1].end)]
        first = bool((ticks < self.forward[0].start).any())
        last = bool((ticks >= self.forward[-1].start).any())
        return ([0] if first else []) + ([self.number - 1] if last else [])


def stages_of(trace: Trace, number: int) -> Stages:
    """Cut the only step of ``trace`` into ``number`` stages.

    Raises LlmemError if the model has fewer layers, or layers that are not run one after the other.
    """
    names = split_layers(trace.wrapped, number)
    backward, end = _backward(trace, 0)
    # Backward runs from the last stage to the first: stage s from its own turn to that of s - 1.
    turns = [*(_turn(trace, names[: s + 1], backward) for s in range(number - 1)), backward]
    windows = [Window(a, b) for a, b in zip(turns, [end, *turns[:-1]], strict=True)]
    return _stages(trace, names, windows, 0)


def staged(trace: Trace, number: int, step: int = 0, *, parted: bool = True) -> Stages:
    """The stages of a ``step`` whose backward ran stage by stage (``trace/staged_backward.py``)."""
    _, end = _backward(trace, step)
    # One phase around all, and one for each part: its start and its end.
    marks = [t // TICK * TICK for t, p, s in trace.phase_ticks if (p, s) == (Phase.BACKWARD, step)]
    starts, each = [*marks[1::2], end], 2 if parted else 1
    firsts = [starts[each * (number - 1 - stage)] for stage in range(number)]
    windows = [Window(a, b) for a, b in zip(firsts, [end, *firsts[:-1]], strict=True)]
    weights = [windows[0].start, *(starts[each * (number - 1 - s) + 1] for s in range(1, number))]
    found = _stages(trace, split_layers(trace.wrapped, number), windows, step)
    return replace(found, cut=True, weights=weights if parted else [])


def _backward(trace: Trace, step: int) -> tuple[int, int]:
    """Where backward of ``step`` starts and ends."""
    start = next(t for t, p, s in trace.phase_ticks if (p, s) == (Phase.BACKWARD, step))
    after = (t for t, p, _ in trace.phase_ticks if t > start + 1 and p is not Phase.BACKWARD)
    return start // TICK * TICK, min(after) // TICK * TICK


def _stages(trace: Trace, names: list[list[str]], backwards: list[Window], step: int) -> Stages:
    forward = next(t for t, p, s in trace.phase_ticks if (p, s) == (Phase.FORWARD, step))
    enter = [_enter(trace, stage[0], step) for stage in names]
    if enter != sorted(enter):
        raise LlmemError("the model's layers do not run in their order, so it has no stages")
    edges = [*enter, backwards[-1].start]
    forwards = [Window(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    outputs = [_handed_over(trace, a, b) for a, b in pairwise(forwards)]
    prelude = Window(forward // TICK * TICK, enter[0])
    return Stages(trace, prelude, forwards, backwards, names, outputs, step)


def split_layers(layers: list[str], number: int) -> list[list[str]]:
    """The layers of each of ``number`` stages, in order; earlier ones get what does not divide.

    Raises LlmemError if there are fewer layers.

    >>> split_layers(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    if len(layers) < number:
        raise LlmemError(
            f"{number} pipeline stages need as many layers, and the model has {len(layers)}; lower "
            "--pp (or --virtual-stages)"
        )
    each, more = divmod(len(layers), number)
    bounds = [stage * each + min(stage, more) for stage in range(number + 1)]
    return [layers[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def _enter(trace: Trace, layer: str, step: int) -> int:
    module = trace.modules.index(layer)
    return next(
        span.enter // TICK * TICK
        for span in trace.spans
        if span.module == module and span.phase is Phase.FORWARD and not span.recompute
        and span.step == step
    )


def _turn(trace: Trace, names: list[list[str]], backward: int) -> int:
    """When backward reaches the layers ``names``: the tick of its first op there."""
    inside = tuple(name + "." for stage in names for name in stage)
    plain = {name for stage in names for name in stage}
    mine = np.array([m in plain or m.startswith(inside) for m in trace.modules], np.bool_)
    ops = trace.ops
    at = np.flatnonzero(mine[ops.module] & (ops.phase == int(Phase.BACKWARD)))
    return int(ops.tick[at[0]]) if len(at) else backward


def _handed_over(trace: Trace, stage: Window, following: Window) -> Ints:
    """Rows that are made in one window and read in the next, and do not stay."""
    made = stage.holds(trace.lifetimes.birth) & (trace.lifetimes.death != NEVER)
    ticks = trace.ops.tick[trace.touch_op]
    reads = (trace.touch_kind == Touch.READ) & (ticks >= following.start) & (ticks < following.end)
    rows = np.unique(trace.touch_row[reads])
    return rows[made[rows]]  # type: ignore[no-any-return]
