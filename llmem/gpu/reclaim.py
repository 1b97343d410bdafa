"""How cached memory goes back to the driver: on request, when the device is full, by age."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import TYPE_CHECKING

from llmem.gpu import expandable
from llmem.gpu.blocks import UNMAPPED, Block, Pool

if TYPE_CHECKING:
    from llmem.gpu.allocator import CachingAllocator


def release_cached(allocator: CachingAllocator, pool: Pool, only: Collection[int] | None) -> None:
    """Frees the pool's unsplit segments and unmaps its whole free pages (`release_blocks`).

    A segment in which one block lives stays: this is what fragmentation costs.
    """
    for _, address, block in list(pool.free):
        if only is not None and address not in only:
            continue
        if _expands(block):
            _unmap(allocator, pool, block)
        elif block.prev is None and block.next is None:
            _release(allocator, pool, block)


def release_oversize(allocator: CachingAllocator, pool: Pool, size: int) -> bool:
    """With `max_split_size`: frees just enough oversize blocks (`release_available_cached_blocks`).

    True if so much was freed that a request of `size` bytes is worth another try.
    """
    limit = allocator.conf.max_split_size
    if limit is None:
        return False
    wanted = max(size, limit)
    index = bisect_left(pool.free, (wanted,))
    if index < len(pool.free) and not _expands(pool.free[index][2]):
        _release(allocator, pool, pool.free[index][2])
        return True
    released = 0
    for nbytes, _, block in pool.free[:index][::-1]:
        if released >= wanted or nbytes < limit:
            break
        if not _expands(block):
            _release(allocator, pool, block)
            released += nbytes
    return released >= wanted


def collect_garbage(allocator: CachingAllocator) -> None:
    """Frees unsplit large blocks of at least average age while reserved is over the threshold.

    Age is the number of look-ups in the large pool since the block became free; the average is
    taken anew after each sweep (`garbage_collect_cached_blocks`).
    """
    assert allocator.allowed is not None
    threshold = int(allocator.conf.garbage_collection_threshold * allocator.allowed)
    excess = allocator.reserved - threshold
    ages = {
        block: allocator.large_lookups - block.born
        for pool in allocator.pools()
        if not pool.small
        for _, _, block in pool.free
        if block.prev is None and block.next is None and not _expands(block)
    }
    reclaimed = 0
    while ages and reclaimed < excess:
        average = sum(ages.values()) / len(ages)
        for block in [block for block, age in ages.items() if age >= average]:
            del ages[block]
            reclaimed += block.size
            assert block.pool is not None
            _release(allocator, block.pool, block)


def _release(allocator: CachingAllocator, pool: Pool, block: Block) -> None:
    pool.remove(block)
    del allocator.segments[block.address]
    allocator.segment_count -= 1
    allocator.unreserve("segment_free", block.address, block.size, pool.stream)


def _unmap(allocator: CachingAllocator, pool: Pool, block: Block) -> None:
    segment = block.segment
    assert segment is not None
    page = allocator.conf.page_size(pool.small)
    address, size = expandable.unmap_pages(pool, block, page)
    if size:
        allocator.unreserve("segment_unmap", address, size, pool.stream)
    if segment.first.state == UNMAPPED and segment.first.size == segment.size:
        pool.remove_unmapped(segment.first)
        del allocator.segments[segment.address]


def _expands(block: Block) -> bool:
    return block.segment is not None and block.segment.expandable
