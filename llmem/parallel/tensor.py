"""Ranks of tensor parallelism, and of its product with data parallelism.

Passes compose from the inside out: a tensor-parallel rank is traced with its local shapes and its
collectives (``llmem.trace.split.tensor_parallel``), then the data-parallel engine plays its hooks over
that trace, among ``gpus / (tp * pp)`` ranks; a pipeline comes between the two. Global ranks count
the tensor-parallel ones fastest, as transformers' and torchtitan's meshes do: rank = outer * tp +
tp_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from llmem.lifetimes import Trace
from llmem.parallel import RankTable, compute_dtype
from llmem.spec import RunSpec


def ranks(
    trace: Trace, spec: RunSpec, make: Callable[[Trace, RunSpec], list[RankTable]]
) -> list[RankTable]:
    """One table for each kind of rank; ``trace`` is that of tensor-parallel rank 0.

    ``make`` is the data-parallel engine's ``ranks``. Tensor-parallel ranks with other local shapes
    (the last ones, where a dimension does not divide) are traced here.
    """
    inner = spec.model_copy(update={"gpus": spec.gpus // spec.tp, "tp": 1})
    tables: list[RankTable] = []
    for members in kinds(trace, spec.tp):
        mine = trace if members[0] == 0 else _trace_as(members[0], trace, spec)
        for table in make(mine, inner):
            everyone = sorted(replica * spec.tp + rank for replica in table.ranks for rank in members)
            tables.append(replace(table, rank=everyone[0], ranks=tuple(everyone), base=mine))
    return sorted(tables, key=lambda table: table.rank)


def kinds(trace: Trace, degree: int) -> list[tuple[int, ...]]:
    """Tensor-parallel ranks grouped by the local shapes of their parameters, rank 0's first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(degree):
        cut = tuple(chunk(size, degree, rank) for _, size in trace.sharded.values())
        found.setdefault(cut, []).append(rank)
    return [tuple(members) for members in found.values()]


def chunk(size: int, ranks: int, rank: int) -> int:
    """Elements of a dimension that ``rank`` holds: ``torch.chunk``, whose last ones are shorter.

    >>> [chunk(10, 4, rank) for rank in range(4)]
    [3, 3, 3, 1]
    """
    most = ceil(size / ranks)
    return max(0, min(most, size - rank * most))


def _trace_as(rank: int, trace: Trace, spec: RunSpec) -> Trace:
    """The trace of another tensor-parallel rank of the same run."""
    from llmem.trace.run import trace_spec

    dtype = compute_dtype(spec)
    return trace_spec(spec, steps=len(trace.step_ticks) - 1, compute_dtype=dtype, tp_rank=rank)
