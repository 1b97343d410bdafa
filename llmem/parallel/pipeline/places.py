"""Where the parts of a traced step go in a pipeline rank's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmem.parallel.pipeline.action import Action, Kind, closing
from llmem.parallel.pipeline.stages import Window


@dataclass(frozen=True)
class Copy:
    """A window copied to ``base``: tick t becomes base + t - window.start."""

    window: Window
    base: int

    @property
    def end(self) -> int:
        return self.base + len(self.window)

    def move(self, ticks: Any) -> Any:
        return ticks - self.window.start + self.base


class Plan:
    """The ticks of one step: where it starts, has its batch, runs its actions and ends."""

    def __init__(self, start: int, order: list[Action]) -> None:
        self.start = start
        self.batch = self.begin = self.end = self.tail = start
        self.copies: dict[Action, list[Copy]] = {}
        self._closing = closing(order)

    def after(self, action: Action) -> int:
        """The tick when ``action`` has returned."""
        return self.copies[action][-1].end + 1

    def backward(self, action: Action) -> list[Copy]:
        """The copies of the backward of ``action``'s micro-batch (B, or I and W) that follow it."""
        all_of_them = self._closing[action.stage, action.micro]
        first = all_of_them.index(action) + 1 if action in all_of_them else 0
        return [copy for later in all_of_them[first:] for copy in self.copies[later]]

    def first_backward(self, stage: int, micro: int) -> Action:
        """The action that makes the gradient of a stage's input: B or I."""
        return self._closing[stage, micro][0]

    def forward(self, stage: int, micro: int) -> Action:
        """The action that makes a stage's output."""
        return Action(Kind.FORWARD, stage, micro)
