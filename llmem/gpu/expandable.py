"""Expandable segments: one long range of addresses whose physical pages come and go.

Behaviour of `expandable_segments:True` in torch's CUDACachingAllocator.cpp
(`find_expandable_block`, `map_block`, `unmap_block`): pages are 2 MiB in the small pool and
`large_segment_size` in the large one, mapped at the lowest address that has room.
"""

from __future__ import annotations

from llmem.gpu.blocks import FREE, UNMAPPED, Block, Pool, absorb_next, split


def find_room(pool: Pool, size: int) -> Block | None:
    """The lowest unmapped hole where `size` bytes of free and unmapped space follow one another.

    Starts at the free block directly before the hole, if there is one. None: no address space.
    """
    for _, hole in pool.unmapped:
        before = hole.prev
        start = before if before is not None and before.state == FREE else hole
        room, block = 0, start
        while block is not None and room < size and block.state in (FREE, UNMAPPED):
            room += block.size
            block = block.next  # type: ignore[assignment]
        if room >= size:
            return start
    return None


def best_fit(pool: Pool, index: int) -> int:
    """Index of the free block to take, given that of the smallest one that fits.

    A block at the growing edge counts as big as it may become, so holes further in, though
    larger than it is now, are filled first.
    """
    free = pool.free
    while index + 1 < len(free) and _may_become(free[index + 1][2]) < _may_become(free[index][2]):
        index += 1
    return index


def _may_become(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def map_pages(pool: Pool, hole: Block, size: int, page: int) -> tuple[Block, int]:
    """Maps at least `size` bytes at the start of `hole` and merges them with free neighbours.

    Returns the free block that now holds them and the bytes mapped (whole pages).
    """
    pool.remove_unmapped(hole)
    mapped = pages_for(size, page)
    if mapped < hole.size:
        pool.insert_unmapped(split(hole, mapped, UNMAPPED))
    hole.state = FREE
    block = merge_free(pool, hole)
    pool.insert(block)
    return block, mapped


def pages_for(size: int, page: int) -> int:
    """Bytes of the whole pages that hold `size` bytes."""
    return -(-size // page) * page


def unmap_pages(pool: Pool, block: Block, page: int) -> tuple[int, int]:
    """Returns the whole pages inside a free block; what shares a page with others stays.

    Result: (address, bytes) that were unmapped; 0 bytes if the block holds no whole page.
    """
    assert block.segment is not None
    base = block.segment.address
    begin = base + pages_for(block.address - base, page)
    end = base + (block.address + block.size - base) // page * page
    if begin >= end:
        return begin, 0
    pool.remove(block)
    if end < block.address + block.size:
        pool.insert(split(block, end - block.address, FREE))
    if begin > block.address:
        rest = split(block, begin - block.address, UNMAPPED)
        pool.insert(block)
        block = rest
    block.state = UNMAPPED
    _merge_unmapped(pool, block)
    return begin, end - begin


def merge_free(pool: Pool, block: Block) -> Block:
    """Merges a free block (in no list yet) with its free neighbours; returns the whole."""
    before, after = block.prev, block.next
    if after is not None and after.state == FREE:
        pool.remove(after)
        absorb_next(block)
    if before is not None and before.state == FREE:
        pool.remove(before)
        absorb_next(before)
        return before
    return block


def _merge_unmapped(pool: Pool, block: Block) -> None:
    before, after = block.prev, block.next
    if after is not None and after.state == UNMAPPED:
        pool.remove_unmapped(after)
        absorb_next(block)
    if before is not None and before.state == UNMAPPED:
        absorb_next(before)  # keeps its place in the list: the address does not change
    else:
        pool.insert_unmapped(block)
