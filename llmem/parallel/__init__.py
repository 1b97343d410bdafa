"""Parallel strategies: lifetimes of the unsharded model ─▶ lifetimes of each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmem.errors import LlmemError
from llmem.lifetimes import Lifetimes, Trace
from llmem.spec import RunSpec


@dataclass(frozen=True)
class RankTable:
    """What one rank allocates, and the trace whose ops, modules and phases name it."""

    rank: int
    lifetimes: Lifetimes
    trace: Trace
    optimizer: dict[str, Any] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)


def ranks_of(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """The tables of the ranks that differ (one, where all are alike)."""
    if spec.strategy == "none" and spec.tp == spec.pp == 1:
        return [RankTable(0, trace.lifetimes, trace, trace.optimizer)]
    raise LlmemError(f"--strategy {spec.strategy} is not supported yet; use --strategy none")
