"""From lifetimes to bytes over time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmem.lifetimes import BREAKDOWN, NEVER, Category, Lifetimes
from llmem.timeline import locate, replay

from .test_lifetimes import lifetimes, table, trace, unhurried

MIB = 2**20


def test_exact_curve_by_hand() -> None:
    timeline = replay(table(), exact=True)
    assert timeline.requested.tolist() == [8, 24, 28, 20, 16]
    assert timeline.allocated.tolist() == timeline.reserved.tolist() == timeline.requested.tolist()
    assert timeline.peak_index() == 2
    assert np.flatnonzero(timeline.alive(2)).tolist() == [0, 1, 2]
    assert np.flatnonzero(timeline.alive(4)).tolist() == [1]
    parts = timeline.breakdown(2)
    assert list(parts) == list(BREAKDOWN)
    assert {name: n for name, n in parts.items() if n} == {
        "activations": 8, "gradients": 16, "other": 4,
    }  # fmt: skip


def test_an_emptied_cache_gives_its_segments_back() -> None:
    """12 MiB and then 30 MiB take segments of their own; the first is free by then."""
    rows = [{"nbytes": n * MIB, "birth": b, "death": b + 1} for n, b in ((12, 1), (30, 4))]
    made = Lifetimes.build(rows)
    kept, emptied = (replay(made, cache_emptied=ticks).reserved.tolist() for ticks in ([], [3]))
    assert kept == [12 * MIB, 12 * MIB, 42 * MIB, 42 * MIB]
    assert emptied == [12 * MIB, 12 * MIB, 30 * MIB, 30 * MIB]


def test_peak_within_a_span() -> None:
    timeline = replay(table(), exact=True)
    assert timeline.span(4, 6) == (3, 5)
    assert timeline.peak_index(None, *timeline.span(4, 6)) == 3
    assert timeline.peak_index(timeline.requested, 0, 2) == 1


def test_blocks_of_the_caching_allocator() -> None:
    """1000 bytes take a 1024-byte block of a 2 MiB segment, 3 MiB one of a 20 MiB segment."""
    made = Lifetimes.build(
        [
            {"nbytes": 1000, "birth": 1, "category": Category.WORKSPACE},
            {"nbytes": 3 * MIB, "birth": 2, "death": 3, "category": Category.LOGITS_AND_LOSS},
        ]
    )
    timeline = replay(made)
    assert timeline.requested.tolist() == [1000, 1000 + 3 * MIB, 1000]
    assert timeline.allocated.tolist() == [1024, 1024 + 3 * MIB, 1024]
    assert timeline.reserved.tolist() == [2 * MIB, 22 * MIB, 22 * MIB]
    assert timeline.block_bytes.tolist() == [1024, 3 * MIB]
    parts = timeline.breakdown(1)
    assert parts["workspace"] == 1024
    assert parts["logits_and_loss"] == 3 * MIB
    assert timeline.segments == 2
    curves = timeline.by_part()
    assert curves["workspace"].tolist() == [1024, 1024, 1024]
    assert curves["logits_and_loss"].tolist() == [0, 3 * MIB, 0]
    assert list(curves) == list(BREAKDOWN)


def test_remainder_of_a_large_block_belongs_to_it() -> None:
    """15.5 MiB get a segment of 16; half a MiB is too little to be split off."""
    made = Lifetimes.build([{"nbytes": 15 * MIB + MIB // 2, "birth": 1}])
    timeline = replay(made)
    assert timeline.allocated.tolist() == [16 * MIB]
    assert timeline.breakdown(0)["other"] == 16 * MIB


def test_out_of_memory_ends_the_timeline() -> None:
    made = Lifetimes.build([{"nbytes": 3 * MIB, "birth": 1}, {"nbytes": 40 * MIB, "birth": 2}])
    timeline = replay(made, capacity=30 * MIB)
    assert timeline.oom is not None
    assert (timeline.oom.row, timeline.oom.requested) == (1, 40 * MIB)
    assert replay(made, capacity=60 * MIB).oom is None


categorised = lifetimes.flatmap(
    lambda made: st.lists(
        st.sampled_from(sorted(Category)), min_size=len(made), max_size=len(made)
    ).map(lambda found: made.with_columns(category=np.array(found, np.int8)))
)


@unhurried
@given(categorised, st.booleans())
def test_breakdown_sums_to_allocated_exactly(made: Lifetimes, exact: bool) -> None:
    timeline = replay(made, exact=exact)
    for index in range(len(timeline.events)):
        assert sum(timeline.breakdown(index).values()) == timeline.allocated[index]
        alive = timeline.alive(index)
        assert timeline.requested[index] == made.nbytes[alive].sum()
        assert timeline.requested[index] <= timeline.allocated[index] <= timeline.reserved[index]


@unhurried
@given(lifetimes)
def test_last_event_leaves_what_never_dies(made: Lifetimes) -> None:
    timeline = replay(made, exact=True)
    if len(made):
        assert timeline.requested[-1] == made.nbytes[made.death == NEVER].sum()


@pytest.mark.parametrize(
    ("index", "place"),
    [
        (1, ("forward", "layer", "mul")),  # the birth of what mul makes
        (2, ("backward", "", "add_")),  # its death, while add_ runs
    ],
)
def test_locate(index: int, place: tuple[str, str, str]) -> None:
    made = trace()
    at = locate(replay(made.lifetimes, exact=True), made, index)
    assert (at.phase, at.module, at.op) == place
    assert (at.step, at.index) == (0, index)
