"""What holds for the allocator on any workload."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.allocator import Block, CachingAllocator, OutOfMemory
from llmem.gpu.blocks import FREE, UNMAPPED

MIB = 1 << 20

CONFS = {
    "default": AllocConf(),
    "expandable": AllocConf(expandable_segments=True),
    "max_split": AllocConf(max_split_size=32 * MIB),
    "roundup": AllocConf.parse("roundup_power2_divisions:8"),
    "expandable_max_split": AllocConf(expandable_segments=True, max_split_size=64 * MIB),
    "collecting": AllocConf(garbage_collection_threshold=0.3, per_process_memory_fraction=0.9),
}

SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(1, 90 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 15 * MIB + 1, 20 * MIB, 64 * MIB]),
)  # fmt: skip
# A malloc of some bytes on a stream, a free of the n-th live block (maybe deferred), or -1.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 50), st.integers(0, 3)),
        st.tuples(st.sampled_from(["empty", "complete"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def run(
    allocator: CachingAllocator,
    steps: list[tuple[str, int, int]],
    check: Callable[[CachingAllocator, list[Block]], None] = lambda allocator, live: None,
) -> list[Block]:
    """Plays the steps; `check` sees the allocator and the live blocks after each."""
    live: list[Block] = []
    for action, number, flag in steps:
        if action == "malloc":
            try:
                live.append(allocator.malloc(number, flag))
            except OutOfMemory:
                assert allocator.num_ooms
        elif action == "free" and live:
            allocator.free(live.pop(number % len(live)), defer=flag == 0)
        elif action == "empty":
            allocator.empty_cache()
        elif action == "complete":
            allocator.process_deferred()
        check(allocator, live)
    return live


def check_state(allocator: CachingAllocator, live: list[Block]) -> None:
    """Segments without gaps or overlap, merged free blocks, counters that add up."""
    end = reserved = allocated = requested = active = 0
    found = set()
    for segment, _ in sorted(allocator.segments.values(), key=lambda entry: entry[0].address):
        assert segment.address >= end
        end = segment.address
        previous = None
        for block in segment.blocks():
            assert block.address == end and block.size > 0 and block.prev is previous
            assert block.size % 512 == 0
            if previous is not None and block.state in (FREE, UNMAPPED):
                assert previous.state != block.state, "free neighbours were not merged"
            end += block.size
            previous = block
            reserved += block.size * (block.state != UNMAPPED)
            if block.state not in (FREE, UNMAPPED):
                active += block.size
                requested += block.requested
                assert block.requested <= block.size
            if block.allocated:
                allocated += block.size
                found.add(id(block))
        assert end == segment.address + segment.size
    assert found == {id(block) for block in live}
    assert (reserved, active) == (allocator.reserved, allocator.active)
    assert (allocated, requested) == (allocator.allocated, allocator.requested)
    assert allocator.requested <= allocator.active
    assert allocator.allocated <= allocator.active <= allocator.reserved
    free = [entry[2] for pool in allocator.pools() for entry in pool.free]
    assert all(block.state == FREE for block in free)
    assert sum(block.size for block in free) == reserved - active
    assert allocator.capacity is None or reserved <= allocator.capacity


@pytest.mark.parametrize("name", CONFS)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_state_is_consistent_after_every_step(name: str, steps: list[tuple[str, int, int]]) -> None:
    run(CachingAllocator(CONFS[name], capacity=256 * MIB), steps, check_state)


@pytest.mark.parametrize("name", CONFS)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_freeing_everything_restores_every_segment(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    allocator = CachingAllocator(CONFS[name])
    for block in run(allocator, steps):
        allocator.free(block)
    allocator.process_deferred()
    assert all(len(view.blocks) == 1 for view in allocator.snapshot_segments())
    assert (allocator.allocated, allocator.requested, allocator.active) == (0, 0, 0)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segment_count, allocator.segments) == (0, 0, {})


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_default_and_expandable_agree_on_allocated(steps: list[tuple[str, int, int]]) -> None:
    """Up to the slack of the default mode: at most 1 MiB per live large block."""
    default, growing = CachingAllocator(), CachingAllocator(CONFS["expandable"])
    live = run(default, steps)
    run(growing, steps)
    large = sum(block.size > MIB for block in live)
    assert default.requested == growing.requested
    assert 0 <= default.allocated - growing.allocated <= large * MIB


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_a_limit_that_is_never_met_changes_nothing(steps: list[tuple[str, int, int]]) -> None:
    free, limited = CachingAllocator(), CachingAllocator(capacity=1 << 40)
    addresses = [block.address for block in run(free, steps)]
    assert addresses == [block.address for block in run(limited, steps)]
    assert limited.num_alloc_retries == 0
