"""Names in the profiler's event tree that say where in the step an allocation happened.

A mark is a ``record_function`` range whose name starts with ``llmem:``; it allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from llmem.lifetimes import Phase

PREFIX = "llmem:"


@dataclass(frozen=True)
class Mark:
    """A named moment (``start == end`` but for nanoseconds) or range; times in nanoseconds.

    ``kind`` is ``phase`` (a range; ``edge`` empty) or ``unit`` (a moment: ``edge`` is ``enter``
    or ``exit``).
    """

    kind: str
    step: int
    phase: str
    unit: str
    edge: str
    start: int
    end: int

    @staticmethod
    def name(kind: str, step: int, phase: Phase, unit: str = "", edge: str = "") -> str:
        return f"{PREFIX}{kind}:{step}:{phase.label}:{unit}:{edge}"

    @staticmethod
    def parse(name: str, start: int, end: int) -> Mark:
        """The mark that ``Mark.name`` spelled."""
        kind, step, phase, unit, edge = name.removeprefix(PREFIX).split(":")
        return Mark(kind, int(step), phase, unit, edge, start, end)


class StepMarks:
    """Watches a ``TrainingStep`` and its blocks, and marks phases and unit boundaries."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = Phase.SETUP
        self._handles: list[Any] = []

    # -- Watcher -----------------------------------------------------------------------------------

    def start_step(self, step: int) -> None:
        self.step = step

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        with torch.profiler.record_function(Mark.name("phase", self.step, phase)):
            yield
        self.phase = before

    def after_backward(self) -> None:
        return None

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    # -- units -------------------------------------------------------------------------------------

    def watch_units(self, blocks: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Mark where each block computes, inside the engine's own hooks.

        ``forward enter`` comes after the engine's pre-forward hook (what it gathers is there),
        ``forward exit`` before its post-forward hook, ``backward enter`` after its pre-backward
        hook. To be called after the engine has put its hooks. What checkpointing runs again inside
        backward is not marked.
        """
        for name, block in blocks:
            self._handles += [
                block.register_forward_pre_hook(self._entering(name)),
                block.register_forward_hook(self._leaving(name), prepend=True),
                block.register_forward_hook(self._watch_gradient(name)),
            ]

    def _entering(self, unit: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            if self.phase is Phase.FORWARD:
                self._point(unit, "enter")

        return hook

    def _leaving(self, unit: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self.phase is Phase.FORWARD:
                self._point(unit, "exit")

        return hook

    def _watch_gradient(self, unit: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            if self.phase is Phase.FORWARD and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._point(unit, "enter"))

        return hook

    def _point(self, unit: str, edge: str) -> None:
        with torch.profiler.record_function(Mark.name("unit", self.step, self.phase, unit, edge)):
            pass
