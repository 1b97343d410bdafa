"""What a recorded process held, by its own record: reserved and allocated bytes over a log.

Placement comes from the log. Only the size of a block is derived, because trace entries give
requested bytes: the rounded request, plus a remainder too small to be split off.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from llmem.gpu.alloc_conf import SMALL_SIZE
from llmem.gpu.event_log import Event, EventLog
from llmem.gpu.rewind import MappedGroups, StartSegment, block_size


class RecordedLayout:
    """Follows a log from its starting state; all figures are bytes."""

    def __init__(self, log: EventLog, start: list[StartSegment]) -> None:
        self.log = log
        self.reserved = sum(segment.reserved for segment in start)
        self.segment_allocs = (0, 0)
        self._segments: dict[int, int] = {}  # plain segments: address → bytes
        self._addresses: list[int] = []
        self._mapped = MappedGroups(log)
        self._live: dict[int, int] = {}  # address → block bytes
        self._awaiting: set[int] = set()
        self._starts: list[int] = []
        for segment in start:
            for address, size, _, awaiting in segment.live:
                self._live[address] = size
                insort(self._starts, address)
                if awaiting:
                    self._awaiting.add(address)
            if segment.mapped is None:
                self._add_segment(segment.address, segment.size)
            for address, size in segment.mapped or ():
                self._mapped.add((segment.stream, segment.small), address, size)
        self.allocated = sum(
            size for address, size in self._live.items() if address not in self._awaiting
        )
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    @property
    def final_segments(self) -> int:
        """Segments (mapped runs, if expandable) at the end, as the record lists them."""
        if self.log.segments is not None:
            return len(self.log.segments)
        runs = sum(len(group.ranges) for group in self._mapped.groups.values())
        return len(self._segments) + runs

    @property
    def final_reserved(self) -> int:
        """Reserved bytes at the end, as the record lists them."""
        if self.log.segments is not None:
            return sum(segment.size for segment in self.log.segments)
        return self.reserved

    def apply(self, event: Event) -> None:
        """One event of the log, in order."""
        action, address, size = event.action, event.address, event.size
        if action == "alloc":
            self._place(address, size)
        elif action == "free_requested":
            if address in self._live and address not in self._awaiting:
                self._awaiting.add(address)
                self.allocated -= self._live[address]
        elif action in ("free", "free_completed"):
            self._free(address)
        elif action in ("segment_alloc", "segment_map"):
            if action == "segment_alloc":
                self._add_segment(address, size)
            else:
                self._mapped.add(self._mapped.key_of(event), address, size)
            self.reserved += size
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            count, total = self.segment_allocs
            self.segment_allocs = count + 1, total + size
        elif action == "segment_free":
            self.reserved -= size
            if self._segments.pop(address, None) is not None:
                self._addresses.remove(address)
        elif action == "segment_unmap":
            self.reserved -= size
            key = self._mapped.key_of(event)
            if key in self._mapped.groups:
                self._mapped.groups[key].remove(address, size)

    def notes(self) -> list[str]:
        """Where events and final segments of the record contradict each other."""
        if self.log.segments is None:
            return []
        recorded = {
            block.address: block.size
            for segment in self.log.segments
            for block in segment.blocks
            if block.state != "inactive"
        }
        differing = len(recorded.items() ^ self._live.items())
        notes = []
        if self.reserved != self.final_reserved:
            notes.append(
                f"the log's segment events lead to {self.reserved} reserved bytes, its final "
                f"segments hold {self.final_reserved}"
            )
        if differing:
            notes.append(f"{differing} live blocks differ between the log's events and its end")
        return notes

    def _add_segment(self, address: int, size: int) -> None:
        self._segments[address] = size
        insort(self._addresses, address)

    def _place(self, address: int, requested: int) -> None:
        conf = self.log.conf
        i = bisect_right(self._addresses, address)
        end = 0
        if i:
            end = self._addresses[i - 1] + self._segments[self._addresses[i - 1]]
        large = conf.round_size(requested) > SMALL_SIZE
        at = bisect_left(self._starts, address)
        if address < end and large:
            after = self._starts[at] if at < len(self._starts) else end
            size = block_size(requested, min(after, end) - address, conf, splits_all=False)
        else:
            size = block_size(requested, 0, conf, splits_all=True)
        self._starts.insert(at, address)
        self._live[address] = size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _free(self, address: int) -> None:
        size = self._live.pop(address, None)
        if size is None:
            return
        del self._starts[bisect_left(self._starts, address)]
        if address in self._awaiting:
            self._awaiting.discard(address)
        else:
            self.allocated -= size
