"""The state in which a recorded allocator history began.

Walks the events backwards from the final segments: an alloc takes its block away, a free puts it
back, a segment_alloc takes the segment away. What no live block covers was free, and free
neighbours are always merged, so the live blocks and their sizes are the whole state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from llmem.gpu.alloc_conf import SMALL_SEGMENT, SMALL_SIZE, AllocConf
from llmem.gpu.allocator import UNKNOWN_DEVICE, LiveBlock
from llmem.gpu.event_log import Event, EventLog

# Until the walk has passed the start of the log, blocks that it frees have no known size.
_UNKNOWN = -1


@dataclass
class StartSegment:
    """A segment at the start of the log: `size` bytes, and its live blocks.

    Expandable: `address` and `size` are the range of addresses, `mapped` its (address, bytes).
    """

    address: int
    size: int
    stream: int
    small: bool
    mapped: list[tuple[int, int]] | None = None
    live: list[LiveBlock] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        return self.size if self.mapped is None else sum(nbytes for _, nbytes in self.mapped)


@dataclass
class _Live:
    size: int
    requested: int
    awaiting: bool
    freed_at: int


class Ranges:
    """Disjoint address ranges, for the mapped part of an expandable segment."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def add(self, address: int, size: int) -> None:
        insort(self.ranges, (address, address + size))
        merged: list[tuple[int, int]] = []
        for begin, end in self.ranges:
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        self.ranges = merged

    def remove(self, address: int, size: int) -> None:
        end = address + size
        parts = []
        for low, high in self.ranges:
            parts += [(low, min(high, address)), (max(low, end), high)]
        self.ranges = [(low, high) for low, high in parts if low < high]


class MappedGroups:
    """The mapped ranges of every (stream, small) pool that has expandable segments.

    Trace entries do not name the pool of a page. Pools lie in address spaces of their own, each
    bigger than a device, so the nearest block or final segment of the stream tells.
    """

    def __init__(self, log: EventLog) -> None:
        self.conf = log.conf
        self.groups: dict[tuple[int, bool], Ranges] = {}
        self.lowest: dict[tuple[int, bool], int] = {}
        known: dict[int, set[tuple[int, bool]]] = {}
        if log.conf.expandable_segments:
            for event in log.events:
                if event.action in ("alloc", "free", "free_requested", "free_completed"):
                    small = log.conf.round_size(event.size) <= SMALL_SIZE
                    known.setdefault(event.stream, set()).add((event.address, small))
            for segment in log.segments or ():
                known.setdefault(segment.stream, set()).add((segment.address, segment.small))
        self._known = {stream: sorted(found) for stream, found in known.items()}

    def add(self, key: tuple[int, bool], address: int, size: int) -> None:
        self.groups.setdefault(key, Ranges()).add(address, size)
        self.lowest[key] = min(self.lowest.get(key, address), address)

    def key_of(self, event: Event) -> tuple[int, bool]:
        """The pool of a segment_map or segment_unmap."""
        known = self._known.get(event.stream, [])
        i = bisect_left(known, (event.address,))
        around = [
            (abs(address - event.address), small) for address, small in known[max(i - 1, 0) : i + 1]
        ]
        inside = [
            small for address, small in known[i : i + 1] if address < event.address + event.size
        ]
        near = inside or [small for distance, small in sorted(around) if distance < UNKNOWN_DEVICE]
        fits_large = event.size % self.conf.page_size(False) == 0
        return event.stream, near[0] if near and fits_large else not fits_large


def rewind(log: EventLog) -> list[StartSegment]:
    """The segments at the start of the log. Without final segments: only those that it frees.

    Small segments are told by their 2 MiB where a segment is gone at the end of the log.
    """
    live = _rewind_blocks(log)
    segments = _rewind_segments(log)
    starts = [segment.address for segment in segments]
    begun: dict[int, list[tuple[int, int]]] = {}  # segment → (address, index) of its allocs
    for index, event in enumerate(log.events):
        if event.action == "alloc" and (i := bisect_right(starts, event.address)):
            begun.setdefault(starts[i - 1], []).append((event.address, index))
    for address, block in sorted(live.items()):
        i = bisect_right(starts, address)
        if i and address < segments[i - 1].address + segments[i - 1].size:
            segment = segments[i - 1]
            segment.live.append((address, block.size, block.requested, block.awaiting))
    for segment in segments:
        _resolve_sizes(segment, live, begun.get(segment.address, []), log.conf)
    return segments


def _rewind_blocks(log: EventLog) -> dict[int, _Live]:
    end = len(log.events)
    live = {
        block.address: _Live(block.size, block.requested, block.state != "active_allocated", end)
        for segment in log.segments or ()
        for block in segment.blocks
        if block.state != "inactive"
    }
    for index in range(end - 1, -1, -1):
        event = log.events[index]
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_completed":
            live[event.address] = _Live(_UNKNOWN, event.size, True, index)
        elif event.action == "free_requested" and event.address in live:
            live[event.address].awaiting = False
        elif event.action == "free":
            live[event.address] = _Live(_UNKNOWN, event.size, False, index)
    return live


def _rewind_segments(log: EventLog) -> list[StartSegment]:
    plain: dict[int, StartSegment] = {}
    mapped = MappedGroups(log)
    for segment in log.segments or ():
        if segment.expandable or log.conf.expandable_segments:
            mapped.add((segment.stream, segment.small), segment.address, segment.size)
        else:
            plain[segment.address] = StartSegment(
                segment.address, segment.size, segment.stream, segment.small
            )
    for event in reversed(log.events):
        if event.action == "segment_alloc":
            plain.pop(event.address, None)
        elif event.action == "segment_free":
            small = event.size == SMALL_SEGMENT
            plain[event.address] = StartSegment(event.address, event.size, event.stream, small)
        elif event.action == "segment_map":
            key = mapped.key_of(event)
            mapped.add(key, event.address, event.size)  # the lowest address ever mapped
            mapped.groups[key].remove(event.address, event.size)
        elif event.action == "segment_unmap":
            mapped.add(mapped.key_of(event), event.address, event.size)
    return sorted([*plain.values(), *_address_spaces(mapped)], key=lambda segment: segment.address)


def _address_spaces(mapped: MappedGroups) -> list[StartSegment]:
    """One range of addresses per pool, from the lowest page seen to beyond any device."""
    spaces = []
    for (stream, small), group in mapped.groups.items():
        if not group.ranges:
            continue
        base = mapped.lowest[stream, small]
        later = [other for other in mapped.lowest.values() if other > base]
        page = mapped.conf.page_size(small)
        size = min([UNKNOWN_DEVICE, *(other - base for other in later)]) // page * page
        runs = [(low, high - low) for low, high in group.ranges]
        spaces.append(StartSegment(base, size, stream, small, runs))
    return spaces


def _resolve_sizes(
    segment: StartSegment,
    live: dict[int, _Live],
    begun: list[tuple[int, int]],
    conf: AllocConf,
) -> None:
    """Sizes of the blocks that the log frees but did not see allocated.

    Such a block has its rounded request plus what was not worth splitting off. That slack shows
    when, during the block's life, something else starts where no free block could lie between.
    """
    bounds = [address for address, *_ in segment.live] + [segment.address + segment.size]
    resolved: list[LiveBlock] = []
    for i, (address, size, requested, awaiting) in enumerate(segment.live):
        if size == _UNKNOWN:
            freed_at = live[address].freed_at
            seen = (a for a, index in begun if index < freed_at and a > address)
            limit = min([bounds[i + 1], *seen])
            plain = segment.mapped is None and not segment.small
            size = block_size(requested, limit - address, conf, splits_all=not plain)
        resolved.append((address, size, requested, awaiting))
    segment.live = resolved


def block_size(requested: int, room: int, conf: AllocConf, *, splits_all: bool) -> int:
    """Bytes of a block for `requested` bytes where the free block it is cut from has `room`.

    `splits_all`: small pool or expandable segment, where any remainder is split off.
    """
    size = conf.round_size(requested)
    if splits_all or room < size:
        return size
    whole = conf.max_split_size is not None and size >= conf.max_split_size
    return room if whole or room - size <= SMALL_SIZE else size
