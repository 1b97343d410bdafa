"""The caching allocator on cases that can be worked out by hand."""

from __future__ import annotations

import sys

import pytest

from llmem.errors import LlmemError
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.allocator import CachingAllocator, OutOfMemory
from llmem.gpu.oom import format_size

MIB = 1 << 20
EXPANDABLE = AllocConf(expandable_segments=True)


def mib(count: float) -> int:
    return int(count * MIB)


# -- requests that meet an empty allocator -------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "request_bytes", "reserved", "allocated"),
    [
        (AllocConf(), mib(15.5), mib(16), mib(16)),  # 0.5 MiB is not worth a split
        (EXPANDABLE, mib(15.5), mib(20), mib(15.5)),
        (AllocConf(), mib(3), mib(20), mib(3)),
        (AllocConf(), mib(1), mib(2), mib(1)),
        (AllocConf(), mib(1) + 1, mib(20), 1_049_088),
        (AllocConf(), 1, mib(2), 512),
        (AllocConf(), 513, mib(2), 1024),
        (AllocConf(), mib(10) - 512, mib(20), mib(10) - 512),
        (AllocConf(), mib(10) - 1, mib(10), mib(10)),  # what counts is the rounded size
        (AllocConf(), mib(10), mib(10), mib(10)),
        (AllocConf(), mib(10) + 1, mib(12), mib(10) + 512),  # remainder 2 MiB - 512: split
        (AllocConf(), mib(11), mib(12), mib(12)),  # remainder exactly 1 MiB: not split
        (AllocConf(), mib(11) - 512, mib(12), mib(11) - 512),  # one block more: split
        (EXPANDABLE, 1, mib(2), 512),
        (EXPANDABLE, mib(20) + 1, mib(40), mib(20) + 512),
        (AllocConf(large_segment_size=mib(12)), mib(3), mib(12), mib(3)),
        (AllocConf(True, large_segment_size=mib(12)), mib(13), mib(24), mib(13)),
    ],
)  # fmt: skip
def test_first_request(conf: AllocConf, request_bytes: int, reserved: int, allocated: int) -> None:
    allocator = CachingAllocator(conf)
    allocator.malloc(request_bytes)
    assert (allocator.reserved, allocator.allocated) == (reserved, allocated)
    assert allocator.requested == request_bytes


def test_no_bytes_count_nothing() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(0)
    allocator.free(block)
    assert (allocator.reserved, allocator.allocated, block.size) == (0, 0, 0)
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.malloc(-1)


# -- reuse --------------------------------------------------------------------------------


def test_six_blocks_of_3_mib_share_a_segment() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(mib(3)) for _ in range(10)]
    assert (allocator.reserved, allocator.segment_count) == (mib(40), 2)
    first, second = allocator.snapshot_segments()
    assert [b.size for b in first.blocks] == [mib(3)] * 6 + [mib(2)]
    assert [b.size for b in second.blocks] == [mib(3)] * 4 + [mib(8)]
    for block in blocks:
        allocator.free(block)
    assert [len(s.blocks) for s in allocator.snapshot_segments()] == [1, 1]
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, mib(40))


def test_a_freed_block_is_split_for_a_smaller_request() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(mib(17)))
    allocator.malloc(mib(16))
    (segment,) = allocator.snapshot_segments()
    assert [b.size for b in segment.blocks] == [mib(16), mib(2)]


def test_the_smallest_block_that_fits_wins_and_then_the_lowest() -> None:
    allocator = CachingAllocator()
    sizes = [mib(40), mib(30), mib(30), mib(50)]
    blocks = [allocator.malloc(size) for size in sizes]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(mib(29.5)).address == addresses[1]
    assert allocator.malloc(mib(29.5)).address == addresses[2]
    assert allocator.malloc(mib(29.5)).address == addresses[0]


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(mib(16), stream=1))
    allocator.malloc(mib(16), stream=2)
    assert (allocator.reserved, allocator.segment_count) == (mib(32), 2)
    allocator.malloc(mib(16), stream=1)
    assert allocator.reserved == mib(32)


def test_small_and_large_pools_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(mib(3)))
    allocator.malloc(mib(1))
    assert allocator.reserved == mib(22)


def test_one_small_block_keeps_its_segment() -> None:
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(512), allocator.malloc(mib(16))
    allocator.free(gone)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segment_count) == (mib(2), 1)
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segment_count) == (0, 0)
    assert allocator.peak_reserved == mib(18)


def test_a_deferred_free_stays_active() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(mib(16))
    allocator.free(block, defer=True)
    assert (allocator.allocated, allocator.active, allocator.requested) == (0, mib(16), mib(16))
    other = allocator.malloc(mib(16))
    assert other.address != block.address
    allocator.process_deferred()
    assert (allocator.active, allocator.requested) == (mib(16), mib(16))
    assert allocator.malloc(mib(16)).address == block.address


def test_freeing_twice_is_an_error() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(1024)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)


# -- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes", "size"),
    [
        ("", 1200, 1536),
        ("roundup_power2_divisions:4", 1200, 1536),  # only beyond 512 bytes x divisions
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:2", 1200, 1536),
        ("roundup_power2_divisions:4", mib(5) + 1, mib(6)),
        ("roundup_power2_divisions:4", mib(5), mib(5)),
        ("roundup_power2_divisions:4", mib(4), mib(4)),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", mib(100) + 1, mib(100) + 512),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", mib(300) + 1, mib(300) + 512),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", mib(513), mib(768)),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", mib(1025), mib(1280)),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", mib(2049), mib(2304)),
        ("roundup_power2_divisions:[256:2]", mib(100), mib(128)),  # the first holds below it
        ("roundup_power2_divisions:[256:2]", mib(513), mib(513)),
    ],
)
def test_rounding(text: str, nbytes: int, size: int) -> None:
    assert AllocConf.parse(text).round_size(nbytes) == size


def test_the_string_of_the_environment_variable() -> None:
    conf = AllocConf.parse(
        "expandable_segments:True, max_split_size_mb:128,"
        "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8,large_segment_size_mb:32,backend:native,"
        "max_non_split_rounding_mb:64,per_process_memory_fraction:0.5,pinned_free_catch_all:True"
    )
    assert conf == AllocConf(
        expandable_segments=True,
        max_split_size=mib(128),
        max_non_split_rounding=mib(64),
        roundup_power2_divisions=(1,) * 9 + (2,) + (4,) * 6,
        garbage_collection_threshold=0.8,
        large_segment_size=mib(32),
        per_process_memory_fraction=0.5,
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("expandable_segment:True", "unknown"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "key:value"),
        ("max_split_size_mb:19", ">= 20"),
        ("max_split_size_mb:many", ">= 20"),
        ("large_segment_size_mb:10", ">= 11"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:x", "between 0 and 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[300:2]", "power of two"),
        ("backend:cudaMallocAsync", "not modelled"),
    ],
)
def test_settings_that_torch_rejects(text: str, cause: str) -> None:
    with pytest.raises(LlmemError, match=cause):
        AllocConf.parse(text)


def test_max_split_size_keeps_big_blocks_whole() -> None:
    allocator = CachingAllocator(AllocConf(max_split_size=mib(100)))
    big = allocator.malloc(mib(200))
    allocator.free(big)
    allocator.malloc(mib(50))  # may not cut into 200 MiB
    assert allocator.reserved == mib(250)
    near = allocator.malloc(mib(181))  # 19 MiB too big: taken whole
    assert (near.address, near.size) == (big.address, mib(200))
    allocator.free(near)
    allocator.malloc(mib(180))  # 20 MiB too big: refused
    assert allocator.reserved == mib(430)


def test_garbage_collection_frees_the_oldest_first() -> None:
    conf = AllocConf(garbage_collection_threshold=0.8)
    allocator = CachingAllocator(conf, capacity=mib(100), memory_fraction=1.0)
    old, young, _ = (allocator.malloc(mib(size)) for size in (20, 40, 12))
    allocator.free(old)
    allocator.malloc(mib(2), stream=1)
    allocator.malloc(mib(2), stream=1)
    allocator.free(young)
    assert allocator.reserved == mib(92)  # 12 over the threshold
    allocator.segment_events = events = []
    allocator.malloc(mib(16), stream=2)  # ages 3 and 1, mean 2: only the old one goes
    freed = [(address, size) for action, address, size, _ in events if action == "segment_free"]
    assert freed == [(old.address, mib(20))]
    assert (allocator.reserved, allocator.num_alloc_retries) == (mib(88), 0)


def test_garbage_collection_needs_a_memory_fraction() -> None:
    allocator = CachingAllocator(AllocConf(garbage_collection_threshold=0.5), capacity=mib(100))
    allocator.free(allocator.malloc(mib(60)))
    allocator.malloc(mib(61))  # does not fit beside 60: cached memory goes only now
    assert (allocator.num_alloc_retries, allocator.reserved) == (1, mib(62))


# -- a full device ------------------------------------------------------------------------


def test_cached_blocks_are_freed_before_giving_up() -> None:
    allocator = CachingAllocator(capacity=mib(64))
    allocator.free(allocator.malloc(mib(40)))
    block = allocator.malloc(mib(50))
    assert (allocator.num_alloc_retries, allocator.num_ooms, block.size) == (1, 0, mib(50))
    assert (allocator.reserved, allocator.peak_reserved) == (mib(50), mib(50))


def test_deferred_blocks_are_freed_before_giving_up() -> None:
    allocator = CachingAllocator(capacity=mib(64))
    allocator.free(allocator.malloc(mib(40)), defer=True)
    allocator.malloc(mib(50))
    assert allocator.reserved == mib(50)


def test_out_of_memory_says_what_torch_says() -> None:
    allocator = CachingAllocator(capacity=mib(64), device_total=mib(100))
    allocator.malloc(mib(3))
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(45) + 1)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.requested, error.alloc_size) == (mib(45) + 1, mib(46))
    assert (error.allocated, error.reserved, error.capacity) == (mib(3), mib(20), mib(64))
    assert (error.retries, allocator.num_ooms) == (1, 1)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 46.00 MiB. GPU 0 has a total capacity of "
        "100.00 MiB of which 44.00 MiB is free. Including non-PyTorch memory, this process has "
        "56.00 MiB memory in use. Of the allocated memory 3.00 MiB is allocated by PyTorch, and "
        "17.00 MiB is reserved by PyTorch but unallocated."
    )
    allocator.malloc(mib(3))  # the allocator goes on
    assert allocator.reserved == mib(20)


def test_a_memory_fraction_is_a_limit_of_its_own() -> None:
    allocator = CachingAllocator(AllocConf.parse("per_process_memory_fraction:0.5"), mib(64))
    allocator.malloc(mib(30))
    with pytest.raises(OutOfMemory, match=r"32\.00 MiB allowed; "):
        allocator.malloc(mib(4))


def test_max_split_size_frees_one_oversize_block_first() -> None:
    allocator = CachingAllocator(AllocConf(max_split_size=mib(30)), capacity=mib(200))
    sizes = [mib(40), mib(60), mib(90)]
    blocks = [allocator.malloc(size) for size in sizes]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(mib(25))  # any block of 30 MiB and more would do: the smallest goes
    assert (allocator.reserved, allocator.num_alloc_retries) == (mib(26 + 60 + 90), 0)
    allocator.malloc(mib(95))  # none is that big: the largest go until 95 MiB are free
    assert (allocator.reserved, allocator.num_alloc_retries) == (mib(26 + 96), 0)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1024, "1024 bytes"), (1536, "1.50 KiB"), (mib(20), "20.00 MiB"),
     (3 << 29, "1.50 GiB")],
)  # fmt: skip
def test_sizes_are_written_as_torch_writes_them(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


# -- expandable segments ------------------------------------------------------------------


def test_an_expandable_segment_grows_by_what_is_missing() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(mib(15))
    second = allocator.malloc(mib(15))  # 5 MiB are free at the edge, 10 are missing
    assert second.address == first.address + mib(15)
    assert (allocator.reserved, allocator.allocated) == (mib(40), mib(30))
    (run,) = allocator.snapshot_segments()
    assert (run.size, run.expandable, allocator.segment_count) == (mib(40), True, 0)


def test_holes_are_filled_before_the_growing_edge() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    hole, _ = allocator.malloc(mib(10)), allocator.malloc(mib(5))
    allocator.free(hole)  # 10 MiB inside, 5 at the edge
    assert allocator.malloc(mib(4)).address == hole.address


def test_whole_free_pages_are_unmapped_inside_a_segment() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    _, gone, _ = allocator.malloc(mib(10)), allocator.malloc(mib(60)), allocator.malloc(mib(10))
    assert allocator.reserved == mib(80)
    allocator.free(gone)  # [10, 70): of its pages only [20, 60) are wholly free
    allocator.empty_cache()
    assert allocator.reserved == mib(40)
    assert [run.size for run in allocator.snapshot_segments()] == [mib(20), mib(20)]
    again = allocator.malloc(mib(50))  # the free rest before the hole, 10 MiB, and 40 mapped anew
    assert (again.address, allocator.reserved) == (gone.address, mib(80))


def test_an_empty_expandable_segment_goes_altogether() -> None:
    allocator = CachingAllocator(EXPANDABLE, capacity=mib(100))
    allocator.free(allocator.malloc(mib(50)))
    allocator.empty_cache()
    assert (allocator.reserved, allocator.snapshot_segments()) == (0, [])


def test_expandable_memory_is_retried_and_runs_out() -> None:
    allocator = CachingAllocator(EXPANDABLE, capacity=mib(100))
    allocator.free(allocator.malloc(mib(40), stream=1))
    allocator.malloc(mib(75))
    assert (allocator.num_alloc_retries, allocator.reserved) == (1, mib(80))
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(30))
    assert caught.value.alloc_size == mib(30)


def test_no_heavy_import() -> None:
    import subprocess

    code = "import sys, llmem.gpu.allocator; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
