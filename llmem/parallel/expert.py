"""Ranks of expert parallelism, and of its product with data parallelism.

An expert-parallel rank is traced with its own experts and its all-to-alls
(``llmem.trace.split.expert_parallel``); the data-parallel engine plays its hooks over that trace. Where
ranks share a batch it does so among the ``gpus / ep`` that hold the same experts. Where each has its own,
all ranks share what is no expert, and the engine tells the experts apart (``Trace.experts``). Global ranks
count the expert-parallel ones fastest. All of them are taken to be as busy as the busiest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmem.lifetimes import Trace
from llmem.parallel import RankTable
from llmem.spec import RunSpec


def ranks(
    trace: Trace, spec: RunSpec, make: Callable[[Trace, RunSpec], list[RankTable]]
) -> list[RankTable]:
    """One table for each kind of rank; ``make`` is the data-parallel engine's ``ranks``."""
    if spec.ep_plan == "alltoall" and spec.strategy != "none":
        return make(trace, spec)
    inner = spec.model_copy(update={"gpus": spec.gpus // spec.ep, "ep": 1})
    tables = []
    for table in make(trace, inner):
        everyone = sorted(copy * spec.ep + rank for copy in table.ranks for rank in range(spec.ep))
        tables.append(replace(table, rank=everyone[0], ranks=tuple(everyone), base=trace))
    return tables
