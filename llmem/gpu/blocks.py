"""Blocks, the segments they divide, and the pool of free blocks of one stream.

A segment is one cudaMalloc (or one range of virtual addresses, if it can expand). Its blocks
form a list in address order without gaps; two free neighbours never exist, they are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from llmem.gpu.alloc_conf import MIN_BLOCK, SMALL_SIZE

# States of a block. AWAITING: freed by its owner, another stream may still use it.
FREE, ALLOCATED, AWAITING, UNMAPPED = range(4)


class Block:
    """A piece of a segment. `size` and `requested` are bytes; `requested` is 0 while free."""

    __slots__ = ("address", "born", "next", "pool", "prev", "requested", "segment", "size", "state")

    def __init__(
        self, address: int, size: int, state: int, pool: Pool | None, segment: Segment | None
    ) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.state = state
        self.pool = pool
        self.segment = segment
        self.prev: Block | None = None
        self.next: Block | None = None
        self.born = 0  # garbage collection: pool look-ups when the block became free

    @property
    def allocated(self) -> bool:
        return self.state == ALLOCATED

    @property
    def stream(self) -> int:
        return self.pool.stream if self.pool is not None else 0

    def __repr__(self) -> str:
        state = ("free", "allocated", "awaiting", "unmapped")[self.state]
        return f"Block({self.address:#x}, {self.size}, {state})"


class Segment:
    """Contiguous addresses from the driver; `size` is bytes (of virtual space if expandable)."""

    __slots__ = ("address", "expandable", "first", "size")

    def __init__(self, address: int, size: int, expandable: bool) -> None:
        self.address = address
        self.size = size
        self.expandable = expandable
        self.first: Block

    def blocks(self) -> list[Block]:
        """All blocks in address order."""
        found, block = [], self.first
        while block is not None:
            found.append(block)
            block = block.next  # type: ignore[assignment]
        return found


@dataclass(frozen=True)
class SegmentView:
    """A segment as `torch.cuda.memory_snapshot` shows it: a mapped run, if expandable."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: list[Block]


class Pool:
    """Free blocks of one stream: small (requests up to 1 MiB) or large.

    `free` is sorted by (size, address), which makes best fit a bisection; `unmapped` holds
    the holes of expandable segments, sorted by address.
    """

    __slots__ = ("free", "least_remainder", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool) -> None:
        self.stream = stream
        self.small = small
        # A remainder smaller than this is not split off but given to the caller.
        self.least_remainder = MIN_BLOCK if small or expandable else SMALL_SIZE + 1
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        free = self.free
        del free[bisect_left(free, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def split(block: Block, size: int, state: int) -> Block:
    """Cuts `block` to its low `size` bytes; returns the rest as its new neighbour."""
    rest = Block(block.address + size, block.size - size, state, block.pool, block.segment)
    rest.prev = block
    rest.next = after = block.next
    if after is not None:
        after.prev = rest
    block.next = rest
    block.size = size
    return rest


def absorb_next(block: Block) -> None:
    """Makes `block` swallow its right neighbour, which must be in no list any more."""
    gone = block.next
    assert gone is not None
    block.size += gone.size
    block.next = after = gone.next
    if after is not None:
        after.prev = block
