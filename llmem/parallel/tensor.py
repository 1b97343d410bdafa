"""Which tensor-parallel ranks have the same shapes.

A tensor-parallel rank is traced with its local shapes and its collectives
(``llmem.trace.split.tensor_parallel``); ranks where a dimension does not divide differ from the others.
"""

from __future__ import annotations

from math import ceil

from llmem.lifetimes import Trace


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
