"""The search for the largest batch, on questions made by hand."""

from __future__ import annotations

import pytest

from llmem.largest import Largest, largest_batch


@pytest.mark.parametrize("start", [1, 7, 29, 30, 33, 64])
def test_a_batch_is_reported_below_which_all_fit(start: int) -> None:
    # What opt-1.3b did on four GPUs: 29, 32 and 33 fit, 30 and 31 do not.
    found = largest_batch(lambda b: b <= 29 or b in (32, 33), limit=4096, start=start)
    assert found.batch == 29
    assert set(found.beyond) <= {32, 33}


def test_larger_ones_that_fit_are_named() -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= 5 or batch == 8

    assert largest_batch(fits, limit=4096, start=6) == Largest(5, beyond=(8,))
    assert len(asked) == len(set(asked))  # no question twice
    assert sorted(asked) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_second_hole_below_the_first() -> None:
    assert largest_batch(lambda b: b not in (17, 20) and b < 22, limit=64).batch == 16


@pytest.mark.parametrize("most", [0, 1, 2, 3, 31, 32, 33, 500])
@pytest.mark.parametrize("start", [1, 2, 40, 900])
@pytest.mark.parametrize("limit", [1, 32, 1000])
def test_where_fits_is_monotone(most: int, start: int, limit: int) -> None:
    expected = Largest(min(most, limit), limited=most >= limit)
    assert largest_batch(lambda b: b <= most, limit=limit, start=start) == expected


def test_few_questions_from_a_good_guess() -> None:
    asked = []
    largest_batch(lambda b: asked.append(b) or b <= 33, limit=4096, start=36)  # type: ignore[func-returns-value]
    assert len(asked) <= 12
