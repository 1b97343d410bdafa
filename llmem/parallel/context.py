"""Ranks of context parallelism under a data-parallel engine.

Parameters are sharded, and gradients reduced, over all dp x cp ranks (accelerate's ``dp_shard_cp``
mesh, torchtitan's ``fsdp``), so the engine's pass plays over the trace of a context-parallel rank as
over any other. Global ranks count the context-parallel ones fastest: rank = replica * cp + cp_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmem.lifetimes import Trace
from llmem.parallel import RankTable, compute_dtype
from llmem.spec import RunSpec


def ranks(
    trace: Trace, spec: RunSpec, make: Callable[[Trace, RunSpec], list[RankTable]]
) -> list[RankTable]:
    """One table for each kind of rank; ``trace`` is that of context-parallel rank 0.

    ``make`` is the data-parallel engine's ``ranks``; other kinds of context-parallel rank are traced
    here.
    """
    inner = spec.model_copy(update={"cp": 1})
    tables: list[RankTable] = []
    for members in kinds(spec):
        mine = trace if members[0] == 0 else _trace_as(members[0], trace, spec)
        for table in make(mine, inner):
            alike = tuple(rank for rank in table.ranks if rank % spec.cp in members)
            if alike:
                notes = [*table.assumptions, *_said(members)]
                tables.append(
                    replace(table, rank=alike[0], ranks=alike, base=mine, assumptions=notes)
                )
    return sorted(tables, key=lambda table: table.rank)


def kinds(spec: RunSpec) -> list[tuple[int, ...]]:
    """Context-parallel ranks grouped by which blocks of keys they see, rank 0's first.

    Under torch's balanced loop rank r attends with all its queries to half of each of r blocks, and
    with half its queries to the others. The first rank has only the second sort, the last only the
    first; those between have both and are taken to be as rank 1 is. Under Ulysses all are alike.

    >>> from llmem.spec import make_spec
    >>> kinds(make_spec(model="m", gpus=8, strategy="fsdp2", cp=4))
    [(0,), (1, 2), (3,)]
    """
    everyone = tuple(range(spec.cp))
    if spec.cp_comm == "ulysses":
        return [everyone]
    return [part for part in (everyone[:1], everyone[1:-1], everyone[-1:]) if part]


def _said(members: tuple[int, ...]) -> list[str]:
    if len(members) < 2 or members[0] == 0:
        return []
    return [f"context parallelism: ranks {members[0]} to {members[-1]} taken to be as rank 1"]


def _trace_as(rank: int, trace: Trace, spec: RunSpec) -> Trace:
    """The trace of another context-parallel rank of the same run."""
    from llmem.trace.run import trace_spec

    dtype = compute_dtype(spec)
    return trace_spec(spec, steps=len(trace.step_ticks) - 1, compute_dtype=dtype, cp_rank=rank)
