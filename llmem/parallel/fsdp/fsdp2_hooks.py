"""When FSDP2's hooks run: ticks before and after each unit's forward and backward, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llmem.parallel.units import Unit, Window


@dataclass
class Group:
    """A unit's buffers while the step is played through."""

    unit: Unit
    gathered: list[int] = field(default_factory=list)
    all_gather_output: int | None = None
    unsharded: bool = False
    post_forward: list[int] = field(default_factory=list)
    accumulated: list[int] = field(default_factory=list)
    own_parts: dict[int, int] = field(default_factory=dict)
    """Row of a gradient of the whole vocabulary -> the rank's part of it."""


@dataclass(frozen=True)
class Hook:
    """A hook of FSDP2 at a tick; ``order`` sorts those at the same one, then ``place``."""

    tick: int
    order: int
    name: str
    group: Group
    place: int = 0
    micro_batch: int = 0
    last_micro_batch: bool = True


AT_THE_END = 10
"""Order of post-backward hooks that wait for the callback at the end of backward."""


def hooks_of(groups: Sequence[Group], step: int, *, inputs_require_grad: bool = False) -> list[Hook]:
    """Every hook of a step in program order; ``groups`` start with the root.

    ``inputs_require_grad``: the embedding's output does, whatever is trained.
    """
    found = [
        hook
        for index, group in enumerate(groups)
        for hook in (*_forward(group, step), *_backward(group, index, groups, step, inputs_require_grad))
    ]
    return sorted(found, key=lambda hook: (hook.tick, hook.order, hook.place))


def _forward(group: Group, step: int) -> Iterator[Hook]:
    unit = group.unit
    # Where nothing is allocated between two blocks, one still ends before the next starts.
    before, after = (0, 3) if unit.is_root else (2, 1)
    depth = _depth(unit)
    for window in unit.forward.get(step, []):
        yield Hook(window.start, before, "pre_forward", group, depth)
        yield Hook(window.end, after, "post_forward", group, -depth)
    for window in unit.again.get(step, []):  # by checkpointing: an iteration of its own
        yield Hook(window.start, before, "pre_forward", group, depth)
        yield Hook(window.end, after, "end_forward", group, -depth)


def _backward(
    group: Group, index: int, groups: Sequence[Group], step: int, inputs_require_grad: bool
) -> Iterator[Hook]:
    unit = group.unit
    wholes = groups[0].unit.backward.get(step, [])
    windows: Sequence[Window | None] = unit.backward.get(step, [])
    if unit.takes_ids and not windows:  # a frozen embedding has no op in backward
        windows = [_last_moment(groups, whole, step) if inputs_require_grad else None for whole in wholes]
    before, after = (5, 9) if unit.is_root else (6, 4)
    for micro, window in enumerate(windows):
        last, whole = micro == len(windows) - 1, wholes[micro]
        end, order, place = (window or whole).end, after, -_depth(unit)
        without = unit.takes_ids or (end == whole.end and not inputs_require_grad)
        if without and not unit.is_root:
            # Its inputs need no gradient, so it waits for the callback at the end of backward
            # (``_root_post_backward_final_callback``), which goes through the units as the model
            # has them, the root first.
            end, order, place = whole.end, AT_THE_END, index
        if window is not None:
            yield Hook(window.start, before, "pre_backward", group, _depth(unit))
        yield Hook(end, order, "post_backward", group, place, micro, last)
        if unit.is_root:
            yield Hook(end, AT_THE_END + 1, "end_backward", group)


def _last_moment(groups: Sequence[Group], whole: Window, step: int) -> Window:
    """From the end of the other units' backward to that of all: when a made-up gradient arrives."""
    ends = [
        window.end
        for group in groups[1:]
        for window in group.unit.backward.get(step, [])
        if not group.unit.takes_ids and whole.start <= window.start and window.end <= whole.end
    ]
    return Window(max(ends, default=whole.end), whole.end)


def _depth(unit: Unit) -> int:
    """Outer modules enter first and leave last."""
    return unit.name.count(".") + 1 if unit.name else 0
