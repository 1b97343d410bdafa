"""Whose figures a report shows, in words."""

from __future__ import annotations

from collections.abc import Sequence

from llmem.estimate import Estimate


def whose(result: Estimate) -> str:
    """The ranks that a report's one set of figures is of; empty for a single GPU."""
    gpus, worst = result.spec.gpus, result.worst
    if gpus == 1:
        return ""
    if len(result.ranks) == 1:
        return f"rank {worst.rank} of {gpus} (all alike)"
    same = worst.table.ranks
    alike = f" ({spans(same)} are alike)" if len(same) > 1 else ""
    return f"worst rank {worst.rank} of {gpus}{alike}"


def spans(ranks: Sequence[int]) -> str:
    """``ranks`` in order, neighbours joined.

    >>> spans([0, 1, 2, 5, 8, 9])
    '0-2, 5, 8-9'
    """
    ranks = sorted(ranks)
    starts = [rank for at, rank in enumerate(ranks) if at == 0 or ranks[at - 1] != rank - 1]
    ends = [rank for at, rank in enumerate(ranks) if at == len(ranks) - 1 or ranks[at + 1] != rank + 1]
    return ", ".join(
        str(first) if first == last else f"{first}-{last}"
        for first, last in zip(starts, ends, strict=True)
    )
