"""PyTorch's CUDA caching allocator, to the byte, without CUDA and without torch.

Follows `c10/cuda/CUDACachingAllocator.cpp` (torch 2.6 to 2.13): rounding, small and large pool,
best fit per stream, split and merge, expandable segments, `max_split_size`, garbage collection,
and what happens when the device is full: free cached blocks, try again, then out of memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable

from llmem.gpu import expandable, reclaim
from llmem.gpu.alloc_conf import MIB, MIN_BLOCK, SMALL_SIZE, AllocConf
from llmem.gpu.blocks import (
    ALLOCATED,
    AWAITING,
    FREE,
    UNMAPPED,
    Block,
    Pool,
    Segment,
    SegmentView,
    absorb_next,
    split,
)
from llmem.gpu.oom import OutOfMemory, out_of_memory

__all__ = ["AllocConf", "Block", "CachingAllocator", "OutOfMemory"]

# Simulated segments start here and follow one another upwards.
FIRST_ADDRESS = 1 << 41
# Address space of an expandable segment where the size of the device is unknown.
UNKNOWN_DEVICE = 1 << 40

# (address, size, requested, awaiting) of a block that is in use, all bytes.
LiveBlock = tuple[int, int, int, bool]


class CachingAllocator:
    """The allocator of one device.

    `capacity`: bytes that its segments may occupy together (None: no limit), that is the device
    minus what lies outside the allocator. `memory_fraction`: a call of
    `torch.cuda.set_per_process_memory_fraction`, of `device_total` bytes (default: capacity);
    garbage collection works only with it, as in torch. Counters are bytes, `peak_*` their maxima;
    `segment_count` counts cudaMallocs that are held, and like torch no expandable segment.
    """

    def __init__(
        self,
        conf: AllocConf = AllocConf(),
        capacity: int | None = None,
        *,
        device_total: int | None = None,
        memory_fraction: float | None = None,
    ) -> None:
        self.conf = conf
        self.capacity = capacity
        self.device_total = device_total if device_total is not None else capacity
        if memory_fraction is None and conf.per_process_memory_fraction < 1:
            memory_fraction = conf.per_process_memory_fraction
        self.allowed: int | None = None
        if memory_fraction is not None and self.device_total is not None:
            self.allowed = int(memory_fraction * self.device_total)

        self.allocated = self.requested = self.reserved = self.active = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = self.peak_active = 0
        self.segment_count = self.num_alloc_retries = self.num_ooms = 0

        # Called with (size, stream, small), tells where the driver puts a new segment.
        self.place_segment: Callable[[int, int, bool], int] = self._next_place
        # Set to a list to record ("segment_alloc" | "segment_free" | "segment_map" |
        # "segment_unmap", address, size, stream), in order.
        self.segment_events: list[tuple[str, int, int, int]] | None = None

        self._next_address = FIRST_ADDRESS
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self.segments: dict[int, tuple[Segment, Pool]] = {}
        self._awaiting: dict[int, Block] = {}
        self._plain_rounding = max(conf.roundup_power2_divisions) <= 1
        self._plain_fit = not conf.expandable_segments and conf.max_split_size is None
        self._collects = self.allowed is not None and conf.garbage_collection_threshold > 0
        self.large_lookups = 0  # ages of free large blocks are counted in these

    # -- malloc ---------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Serves `nbytes` bytes on `stream`. 0 bytes give a null block that counts nothing.

        Raises OutOfMemory.
        """
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"malloc of {nbytes} bytes")
            return Block(0, 0, ALLOCATED, None, None)
        if not self._plain_rounding:
            size = self.conf.round_size(nbytes)
        elif nbytes > MIN_BLOCK:
            size = (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK
        else:
            size = MIN_BLOCK
        pool = (self._small if size <= SMALL_SIZE else self._large).get(stream)
        if pool is None:
            pool = self._new_pool(stream, size <= SMALL_SIZE)
        if self._collects and not pool.small:
            self.large_lookups += 1

        free = pool.free
        index = bisect_left(free, (size,))
        if index < len(free) and not self._plain_fit:
            index = self._refine_fit(pool, index, size)
        block = free.pop(index)[2] if index < len(free) else self._grow(pool, size, nbytes)

        if block.size - size >= pool.least_remainder and (
            self._plain_fit or self._splittable(size, pool)
        ):
            rest = split(block, size, FREE)
            rest.born = self.large_lookups
            insort(free, (rest.size, rest.address, rest))
        block.state = ALLOCATED
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        self.active += block.size
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        return block

    def _splittable(self, size: int, pool: Pool) -> bool:
        limit = self.conf.max_split_size
        return limit is None or size < limit or pool.least_remainder == MIN_BLOCK

    def _refine_fit(self, pool: Pool, index: int, size: int) -> int:
        """The index to take instead of the best fit; len(pool.free) means: none."""
        if self.conf.expandable_segments:
            index = expandable.best_fit(pool, index)
        limit = self.conf.max_split_size
        if limit is not None:
            found = pool.free[index][0]
            oversize = size < limit <= found
            wasteful = size >= limit and found >= size + self.conf.max_non_split_rounding
            if oversize or wasteful:
                return len(pool.free)
        return index

    def _grow(self, pool: Pool, size: int, nbytes: int) -> Block:
        """Gets a block of at least `size` bytes from the driver, freeing cached ones if needed."""
        if self._collects:
            reclaim.collect_garbage(self)
        block = self._new_block(pool, size)
        if block is None and reclaim.release_oversize(self, pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._new_block(pool, size)
        if block is None:
            self.num_ooms += 1
            raise out_of_memory(self, size, nbytes)
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        alloc_size = self.conf.segment_size(size)
        if self.allowed is not None and self.reserved + alloc_size > self.allowed:
            return None
        if self.conf.expandable_segments:
            return self._expand(pool, size)
        if self.capacity is not None and self.reserved + alloc_size > self.capacity:
            return None
        address = self.place_segment(alloc_size, pool.stream, pool.small)
        segment = self._new_segment(address, alloc_size, pool, FREE)
        self.segment_count += 1
        self._reserve("segment_alloc", address, alloc_size, pool.stream)
        return segment.first

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Grows an expandable segment until a free block of `size` bytes ends there."""
        block = expandable.find_room(pool, size) or self._new_address_space(pool, size)
        page = self.conf.page_size(pool.small)
        while block.state == UNMAPPED or block.size < size:
            hole = block if block.state == UNMAPPED else block.next
            assert hole is not None
            have = 0 if hole is block else block.size
            wanted = min(size - have, hole.size)
            mapped = expandable.pages_for(wanted, page)
            if self.capacity is not None and self.reserved + mapped > self.capacity:
                return None
            address = hole.address
            block, mapped = expandable.map_pages(pool, hole, wanted, page)
            block.born = self.large_lookups
            self._reserve("segment_map", address, mapped, pool.stream)
        pool.remove(block)
        return block

    def _new_address_space(self, pool: Pool, size: int) -> Block:
        """1 1/8 times the device, as in torch; nothing of it is mapped yet."""
        device = self.device_total if self.device_total is not None else UNKNOWN_DEVICE
        page = self.conf.page_size(pool.small)
        space = expandable.pages_for(max(device + device // 8, size), page)
        address = self.place_segment(space, pool.stream, pool.small)
        segment = self._new_segment(address, space, pool, UNMAPPED)
        pool.insert_unmapped(segment.first)
        return segment.first

    # -- free -----------------------------------------------------------------------------

    def free(self, block: Block, *, defer: bool = False) -> None:
        """Takes `block` back. `defer`: other streams still use it (`Tensor.record_stream`),
        so it stays active until `complete` or `process_deferred`."""
        if block.pool is None:
            return
        if block.state != ALLOCATED:
            raise ValueError(f"{block} is not allocated")
        self.allocated -= block.size
        if defer:
            block.state = AWAITING
            self._awaiting[block.address] = block
        else:
            self._free_block(block)

    def complete(self, block: Block) -> None:
        """The other streams are done with a block whose free was deferred (if it still is)."""
        if self._awaiting.get(block.address) is block:
            del self._awaiting[block.address]
            self._free_block(block)

    def process_deferred(self) -> None:
        """Completes every deferred free."""
        for block in list(self._awaiting.values()):
            self.complete(block)

    def _free_block(self, block: Block) -> None:
        pool = block.pool
        assert pool is not None
        free = pool.free
        self.active -= block.size
        self.requested -= block.requested
        block.requested = 0
        after, before = block.next, block.prev
        if after is not None and after.state == FREE:
            del free[bisect_left(free, (after.size, after.address))]
            absorb_next(block)
        if before is not None and before.state == FREE:
            del free[bisect_left(free, (before.size, before.address))]
            absorb_next(before)
            block.state = UNMAPPED  # the handle is dead: freeing it again is an error
            block = before
        block.state = FREE
        block.born = self.large_lookups
        insort(free, (block.size, block.address, block))

    def empty_cache(self, only: Collection[int] | None = None) -> None:
        """Returns every cached segment that is entirely free, and whole free pages.

        `only`: addresses of free blocks to which that is restricted.
        """
        self.process_deferred()
        for pool in self.pools():
            reclaim.release_cached(self, pool, only)

    # -- state ----------------------------------------------------------------------------

    def snapshot_segments(self) -> list[SegmentView]:
        """All segments with their blocks, by address; an expandable one gives its mapped runs."""
        views = []
        for segment, pool in self.segments.values():
            run: list[Block] = []
            for block in [*segment.blocks(), None]:
                if block is not None and block.state != UNMAPPED:
                    run.append(block)
                elif run:
                    size = sum(part.size for part in run)
                    views.append(
                        SegmentView(
                            run[0].address, size, pool.stream, pool.small, segment.expandable, run
                        )
                    )
                    run = []
        return sorted(views, key=lambda view: view.address)

    def adopt_segment(
        self,
        address: int,
        size: int,
        stream: int,
        small: bool,
        live: Iterable[LiveBlock],
        mapped: Iterable[tuple[int, int]] | None = None,
    ) -> dict[int, Block]:
        """Takes over a segment as a snapshot shows it: the blocks in use, the rest is free.

        `mapped`: (address, bytes) of the mapped runs of an expandable segment of `size` bytes of
        address space; None: a plain segment. Returns the live blocks by address.
        """
        pool = (self._small if small else self._large).get(stream) or self._new_pool(stream, small)
        segment = self._new_segment(address, size, pool, FREE if mapped is None else UNMAPPED)
        if mapped is None:
            self.segment_count += 1
            self.reserved += size
        else:
            segment.expandable = True
            for start, nbytes in sorted(mapped):
                _carve(segment, start, nbytes).state = FREE
                self.reserved += nbytes
        adopted = {}
        for start, nbytes, requested, awaiting in sorted(live):
            block = adopted[start] = _carve(segment, start, nbytes)
            block.state = AWAITING if awaiting else ALLOCATED
            block.requested = requested
            self.active += nbytes
            self.requested += requested
            if awaiting:
                self._awaiting[start] = block
            else:
                self.allocated += nbytes
        for block in segment.blocks():
            if block.state == FREE:
                pool.insert(block)
            elif block.state == UNMAPPED:
                pool.insert_unmapped(block)
        self._raise_peaks()
        return adopted

    def pools(self) -> list[Pool]:
        """Every pool, large ones first: the order in which torch empties them."""
        return [*self._large.values(), *self._small.values()]

    def _new_pool(self, stream: int, small: bool) -> Pool:
        pool = Pool(stream, small, self.conf.expandable_segments)
        (self._small if small else self._large)[stream] = pool
        return pool

    def _new_segment(self, address: int, size: int, pool: Pool, state: int) -> Segment:
        segment = Segment(address, size, expandable=state == UNMAPPED)
        segment.first = Block(address, size, state, pool, segment)
        self.segments[address] = (segment, pool)
        return segment

    def _next_place(self, size: int, stream: int, small: bool) -> int:
        address = self._next_address
        self._next_address += -(-size // (2 * MIB)) * 2 * MIB
        return address

    def _reserve(self, action: str, address: int, size: int, stream: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self.segment_events is not None:
            self.segment_events.append((action, address, size, stream))

    def unreserve(self, action: str, address: int, size: int, stream: int) -> None:
        self.reserved -= size
        if self.segment_events is not None:
            self.segment_events.append((action, address, size, stream))

    def _raise_peaks(self) -> None:
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_active = max(self.peak_active, self.active)


def _carve(segment: Segment, address: int, size: int) -> Block:
    """Cuts [address, address + size) out of the one block of the segment that holds it."""
    block = segment.first
    while block.address + block.size <= address:
        if block.next is None:
            raise ValueError(f"address {address:#x} lies outside segment {segment.address:#x}")
        block = block.next
    if block.address + block.size < address + size:
        raise ValueError(f"blocks overlap at {address:#x}")
    if block.address < address:
        block = split(block, address - block.address, block.state)
    if block.size > size:
        split(block, size, block.state)
    return block
