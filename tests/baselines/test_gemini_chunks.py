"""The chunk search against a plain reading of its definition."""

from hypothesis import given
from hypothesis import strategies as st

from llmem.baselines.gemini_chunks import Chunk, assign_chunks, search_chunk_size


def slowly(numels: list[int], start: int, stop: int, step: int) -> int:
    """The first size of ``range(start, stop + 1, step)`` that leaves least unfilled."""

    def waste(size: int) -> int:
        return sum(c.elements - c.used for c in assign_chunks(numels, size))

    return min(range(start, stop + 1, step), key=waste)


def test_fills_by_hand() -> None:
    # 6 + 4 and 5 + 5 fill two chunks of 10 without waste; 8 is the smallest candidate.
    numels, sizes = [6, 4, 5, 5], {"min_chunk": 8, "search_range": 8}
    assert search_chunk_size(numels, interval=1, **sizes) == 10
    # Interval 4: 8, 12, 16. Waste 2 + 4 + 3 + 3, 2 + 2 and 1 + 11 elements (6 + 4 + 5 fit in 16).
    assert search_chunk_size(numels, interval=4, **sizes) == 12
    assert search_chunk_size(numels, interval=1, dp_degree=4, **sizes) == 12


def test_a_small_group_is_one_chunk() -> None:
    assert search_chunk_size([3, 4], min_chunk=8) == 7


def test_an_outlier_does_not_set_the_size() -> None:
    numels = [1000] + [10] * 30
    assert search_chunk_size(numels, min_chunk=20, search_range=0, interval=1) == 20


@given(st.lists(st.integers(1, 40), min_size=3, max_size=12), st.integers(1, 4))
def test_equals_the_plain_search(numels: list[int], interval: int) -> None:
    minimum = max(numels)
    mean = sum(numels) / len(numels)
    deviation = (sum((n - mean) ** 2 for n in numels) / len(numels)) ** 0.5
    counted = [n for n in numels if n <= mean + 3 * deviation]
    start = -(-minimum // interval) * interval
    found = search_chunk_size(numels, min_chunk=minimum, search_range=24, interval=interval)
    assert found == slowly(counted, start, start + 24, interval)


def test_assignment() -> None:
    chunks = assign_chunks([6, 4, 11, 1, 5], 10, dp_degree=4)
    assert chunks == [Chunk(10, (0, 1), 10), Chunk(12, (2, 3), 12), Chunk(10, (4,), 5)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4))
def test_assignment_keeps_order_and_fits(numels: list[int], dp: int) -> None:
    chunks = assign_chunks(numels, 20, dp)
    assert [i for c in chunks for i in c.members] == list(range(len(numels)))
    for chunk in chunks:
        assert chunk.used == sum(numels[i] for i in chunk.members) <= chunk.elements
