"""The largest batch, where "fits" need not be monotone.

A caching allocator can have room for 29 sequences, none for 30 and 31, and room for 32 again: the sizes of
blocks change with the batch, and with them what is left unused. A training loop meets smaller batches
too (the last one of an epoch), so the batch to take is one below which all fit, not the last that does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LEAST, MOST = 4, 16
"""How many batches below the one reported are tried one by one: an eighth of it, within these bounds."""


@dataclass(frozen=True)
class Largest:
    """``batch``: the largest that fits with all those tried below it, 0 if none.

    ``beyond``: larger ones that were seen to fit, with one between that does not. ``limited``: the search
    ended at its limit, where the batch still fits.
    """

    batch: int
    beyond: tuple[int, ...] = ()
    limited: bool = False


def largest_batch(fits: Callable[[int], bool], *, limit: int, start: int = 1) -> Largest:
    """The largest batch up to ``limit`` that fits, as do those below it.

    From ``start``, a guess, doubled steps and halved gaps find a batch that fits before one that does
    not; from there every batch is tried downwards, until `tried_below` of them in a row fit. Exact unless
    more than these fit in a row above one that does not. A few larger ones are tried for ``beyond``.

    >>> largest_batch(lambda batch: batch <= 29 or batch in (32, 33), limit=4096)
    Largest(batch=29, beyond=(32, 33), limited=False)
    """
    seen: dict[int, bool] = {0: True}

    def ask(batch: int) -> bool:
        if batch not in seen:
            seen[batch] = fits(batch)
        return seen[batch]

    batch = below = _edge(ask, limit, min(max(start, 1), limit))
    for larger in range(batch + 2, min(batch + LEAST, limit) + 1):
        ask(larger)
    while below > max(0, batch - tried_below(batch)):
        below -= 1
        if not ask(below):
            batch = below
            while not ask(batch):
                batch -= 1
            below = batch
    beyond = tuple(sorted(size for size, fit in seen.items() if fit and size > batch))
    return Largest(batch, beyond, limited=batch == limit)


def tried_below(batch: int) -> int:
    """How many batches below ``batch`` are tried one by one."""
    return min(max(batch // 8, LEAST), MOST)


def _edge(fits: Callable[[int], bool], limit: int, start: int) -> int:
    """A batch that fits (0 always does), while the next one does not or is beyond ``limit``."""
    low = high = start
    step = 1
    if fits(start):
        while (high := min(low + step, limit + 1)) <= limit and fits(high):
            low, step = high, 2 * step
    else:
        while not fits(low := max(high - step, 0)):
            high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
