"""Where Megatron-LM's distributed optimizer lays parameters in its buffers.

``DistributedOptimizer._compute_per_buffer_param_layout`` (megatron/core/optimizer/distrib_optimizer.py) and
megatron/core/optimizer/param_layout.py of NVIDIA/Megatron-LM at d98e8a64dd: parameters lie in reverse order,
each at a multiple of 64 elements; a bucket ends at a multiple of 128 and of the number of ranks, each of
which owns one equal part of every bucket, whatever parameters cross its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm

START, END = 64, 128
"""``pad_param_start`` and ``bucket_end_divisor``, in elements."""


def default_bucket_size(ranks: int) -> int:
    """Elements after which a bucket closes with ``--overlap-grad-reduce`` (DistributedDataParallel)."""
    return max(40_000_000, 1_000_000 * ranks)


@dataclass(frozen=True)
class Layout:
    """A buffer: parameters' [start, end), in the order given, and the buckets' [start, end)."""

    places: list[tuple[int, int]]
    buckets: list[tuple[int, int]]
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1][1]

    def owned(self, rank: int) -> list[int]:
        """Elements of each parameter that ``rank`` updates; 0 where it has none."""
        counts = []
        for start, end in self.places:
            count = 0
            for first, last in self.buckets:
                size = (last - first) // self.ranks
                mine = first + rank * size
                count += max(0, min(end, mine + size) - max(start, mine))
            counts.append(count)
        return counts


def lay_out(numels: Sequence[int], ranks: int, bucket_size: int | None) -> Layout:
    """The layout of parameters of ``numels`` elements in one buffer.

    ``bucket_size``: elements that close a bucket, None for one bucket.

    >>> lay_out([100, 10], 2, None)
    Layout(places=[(64, 164), (0, 10)], buckets=[(0, 256)], ranks=2)
    >>> lay_out([100, 10], 2, None).owned(1)
    [36, 0]
    """
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    opened = at = 0
    for numel in reversed(numels):
        start = _up(at, START)
        at = start + numel
        places.append((start, at))
        if bucket_size is not None and at - opened >= bucket_size:
            opened = at = _close(buckets, opened, at, ranks)
    if at > opened:
        _close(buckets, opened, at, ranks)
    return Layout(places[::-1], buckets, ranks)


def _close(buckets: list[tuple[int, int]], opened: int, at: int, ranks: int) -> int:
    end = _up(at, lcm(ranks, END))
    buckets.append((opened, end))
    return end


def _up(value: int, divisor: int) -> int:
    return ceil(value / divisor) * divisor
