"""What a pipeline rank does at a time: one stage's part of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Computations by the letters of torch.distributed.pipelining (``_ComputationType``)."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward."""
    INPUT = "I"
    """The gradient of the stage's input alone."""
    WEIGHT = "W"
    """Then those of its parameters."""


@dataclass(frozen=True)
class Action:
    """A forward or backward of one micro-batch through one stage.

    >>> Action(Kind.FORWARD, 3, 1)
    3F1
    """

    kind: Kind
    stage: int
    micro: int

    @property
    def forward(self) -> bool:
        return self.kind is Kind.FORWARD

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro}"


def closing(order: list[Action]) -> dict[tuple[int, int], list[Action]]:
    """The actions that are each forward's backward, by (stage, micro-batch): B, or I and W."""
    found: dict[tuple[int, int], list[Action]] = {}
    for action in order:
        if not action.forward:
            found.setdefault((action.stage, action.micro), []).append(action)
    return found
