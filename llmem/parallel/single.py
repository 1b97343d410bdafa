"""One GPU: the trace as it is."""

from __future__ import annotations

from llmem.lifetimes import Trace
from llmem.parallel import RankTable
from llmem.spec import RunSpec


def compute_dtype(spec: RunSpec) -> str | None:
    return None


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    return [RankTable(0, trace.lifetimes, trace, trace.optimizer)]
