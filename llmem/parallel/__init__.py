"""Parallel strategies: lifetimes of the unsharded model ─▶ lifetimes of each rank.

Each engine is a pass: it takes the trace of the unsharded model and plays the engine's hooks over
it. No strategy needs a trace of its own for another number of GPUs; only the optimizer is traced
again, on the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from llmem.errors import LlmemError
from llmem.lifetimes import Ints, Lifetimes, Trace
from llmem.spec import RunSpec


@dataclass(frozen=True)
class RankTable:
    """What a rank allocates, and the trace whose ops, modules and phases name it.

    ``ranks`` lists all ranks that are exactly alike; ``rank`` is the first of them.
    """

    rank: int
    lifetimes: Lifetimes
    trace: Trace
    optimizer: dict[str, Any] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    ranks: tuple[int, ...] = (0,)
    base: Trace | None = None
    """The trace of a tensor-parallel rank before any pass, where it is not the estimate's own."""
    held: Ints | None = None
    """Tick from which each block can be given out again, where streams are recorded, [rows]."""


ENGINES = {
    "none": "llmem.parallel.single",
    "ddp": "llmem.parallel.ddp",
    "fsdp": "llmem.parallel.fsdp.fsdp1",
    "fsdp2": "llmem.parallel.fsdp.fsdp2_ranks",
    "gemini": "llmem.parallel.gemini",
    "megatron": "llmem.parallel.megatron",
    "zero1": "llmem.parallel.zero.ranks",
    "zero2": "llmem.parallel.zero.ranks",
    "zero3": "llmem.parallel.zero.ranks",
}
"""Module of each strategy. It has ``compute_dtype(spec)``, the dtype in which the engine keeps
parameters while it computes (None: their own, or autocast), and ``ranks(trace, spec)``."""


WITH_TP = ("none", "ddp", "fsdp2", "gemini", "megatron")
"""Strategies whose passes work on the local shapes of a tensor-parallel rank."""


WITH_EP = ("none", "ddp", "fsdp2")
"""Strategies whose passes work on the local shapes of an expert-parallel rank."""


WITH_CP = ("ddp", "fsdp2")
"""Strategies among whose ranks torch's ``context_parallel`` splits sequences; for Ulysses ZeRO's too."""


WITH_PP = ("none", "ddp", "fsdp2", "megatron")
"""Strategies whose passes work on a pipeline rank's repeated micro-batches."""


def engine(spec: RunSpec) -> Any:
    """The module that models ``spec.strategy``. Raises LlmemError if there is none."""
    split = WITH_CP + (("zero1", "zero2", "zero3") if spec.cp_comm == "ulysses" else ())
    for degree, known in (("pp", WITH_PP), ("tp", WITH_TP), ("ep", WITH_EP), ("cp", split)):
        if getattr(spec, degree) > 1 and spec.strategy not in known:
            raise LlmemError(
                f"--{degree} with --strategy {spec.strategy} is not supported; use one of "
                f"{', '.join(known)}"
            )
    name = ENGINES.get(spec.strategy)
    if name is None:
        raise LlmemError(
            f"--strategy {spec.strategy} is not supported yet; use one of {', '.join(ENGINES)}"
        )
    return import_module(name)


def is_modelled(spec: RunSpec) -> bool:
    """Whether ``spec.strategy`` is modelled, in its product with the other kinds of parallelism."""
    try:
        engine(spec)
    except LlmemError:
        return False
    return True


def compute_dtype(spec: RunSpec) -> str | None:
    """The dtype that parameters have while an engine computes with them, None for their own."""
    return engine(spec).compute_dtype(spec)


def ranks_of(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """The tables of the ranks that differ from each other, worst or not.

    Passes go from the inside out: a tensor- and context-parallel rank is traced, the pipeline repeats
    its stages' parts, the data-parallel engine works among ranks that hold the same part. Ranks are
    numbered in the same order, tensor-parallel ones fastest: (pp, replica, cp, tp).
    """
    make: Callable[[Trace, RunSpec], list[RankTable]] = engine(spec).ranks
    if spec.ep > spec.tp:
        make = partial(import_module("llmem.parallel.expert").ranks, make=make)
    if spec.pp > 1:
        make = partial(import_module("llmem.parallel.pipeline.ranks").ranks, make=make)
    if spec.tp > 1 or spec.cp > 1:
        make = partial(import_module("llmem.parallel.split").ranks, make=make)
    tables: list[RankTable] = import_module("llmem.parallel.record_streams").with_held(
        make(trace, spec), spec
    )
    return tables
