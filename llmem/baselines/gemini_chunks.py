"""Colossal-AI's Gemini chunks: how big a chunk is, and which parameter lies in which chunk.

Source: `search_chunk_configuration` and `ChunkManager.register_tensor` of Colossal-AI 0.3.0 (commit
d4fb7bf), as LLMem (github.com/taehokim20/LLMem) uses them. The names there say "mb" and "byte", but
the search compares with `numel()`: every size here is a number of ELEMENTS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MI_ELEMENTS = 1024**2


@dataclass(frozen=True)
class Chunk:
    """One chunk: ``elements`` of capacity, and the indices of the parameters inside, in order."""

    elements: int
    members: tuple[int, ...]
    used: int


def search_chunk_size(
    numels: Sequence[int],
    *,
    min_chunk: int = 32 * MI_ELEMENTS,
    search_range: int = 32 * MI_ELEMENTS,
    interval: int = 1024,
    dp_degree: int = 1,
) -> int:
    """The chunk size, in elements, that wastes least when ``numels`` are packed in order.

    ``numels`` are the elements of every parameter of one data-parallel group, in the order of
    ``model.parameters()``. Parameters above mean + 3 standard deviations (the embedding) do not
    count. Candidates go from the larger of ``min_chunk`` and the largest counted parameter, rounded
    up to ``interval``, over ``search_range``, both ends included; the first of the least wasteful
    wins and is padded to a multiple of ``dp_degree``. A group below ``min_chunk`` is one chunk of
    its own size.
    """
    total = sum(numels)
    if total < min_chunk:
        return total
    counted = _without_outliers(np.asarray(numels, dtype=np.int64))
    start = -(-max(min_chunk, int(counted.max())) // interval) * interval
    candidates = np.arange(start, start + search_range + 1, interval, dtype=np.int64)
    best = int(candidates[np.argmin(_waste(counted, candidates))])
    return _pad(best, dp_degree)


def assign_chunks(numels: Sequence[int], chunk_size: int, dp_degree: int = 1) -> list[Chunk]:
    """Pack parameters of ``numels`` elements into chunks, in order, as ``register_tensor`` does.

    A parameter that does not fit into what is left of the last chunk opens a new one; one that is
    larger than ``chunk_size`` gets a chunk of exactly its size, padded to ``dp_degree``. A later
    parameter may still fill that padding.
    """
    chunks: list[Chunk] = []
    for index, numel in enumerate(numels):
        last = chunks[-1] if chunks else None
        if last is not None and last.used + numel <= last.elements:
            chunks[-1] = Chunk(last.elements, (*last.members, index), last.used + numel)
        else:
            elements = chunk_size if numel <= chunk_size else _pad(numel, dp_degree)
            chunks.append(Chunk(elements, (index,), numel))
    return chunks


def _without_outliers(numels: NDArray[np.int64]) -> NDArray[np.int64]:
    kept: NDArray[np.int64] = numels[numels <= numels.mean() + 3 * numels.std()]
    return kept


def _waste(numels: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """Elements left unfilled for each candidate size: all sizes are packed side by side."""
    waste = np.zeros_like(candidates)
    left = np.zeros_like(candidates)
    for numel in numels:
        opens = numel > left
        waste += np.where(opens, left, 0)
        left = np.where(opens, candidates, left) - numel
    return waste + left


def _pad(elements: int, multiple: int) -> int:
    return elements + (-elements % multiple)
