"""Allocator events through the allocator model.

`replay_events` serves a simulated step: which bytes are requested, allocated and reserved after
each event. `replay_log` checks the model against a recorded history of a real process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmem.errors import LlmemError
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.allocator import Block, CachingAllocator, OutOfMemory
from llmem.gpu.blocks import SegmentView
from llmem.gpu.event_log import Event, EventLog, read_log
from llmem.gpu.recorded import RecordedLayout
from llmem.gpu.rewind import StartSegment, rewind

if TYPE_CHECKING:
    from numpy.typing import NDArray

MALLOC, FREE = 0, 1


@dataclass(frozen=True)
class OomInfo:
    """The event that found no memory: its index, its lifetime's id, bytes asked for, message."""

    event: int
    id: int
    requested: int
    message: str


@dataclass(frozen=True)
class ReplayResult:
    """Bytes over a replay. The curves have one int64 per event, its value after that event.

    After an `oom` nothing happens any more: the curves keep their last value. `retries` counts
    how often cached blocks had to be freed to go on.
    """

    peak_requested: int
    peak_allocated: int
    peak_reserved: int
    segment_count: int
    retries: int
    oom: OomInfo | None
    requested: NDArray[np.int64] | None = None
    allocated: NDArray[np.int64] | None = None
    reserved: NDArray[np.int64] | None = None
    addresses: dict[int, int] = field(default_factory=dict)
    segments: list[SegmentView] = field(default_factory=list)


def replay_events(
    kind: NDArray[np.int8],
    ids: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    streams: NDArray[np.int64] | None = None,
    *,
    conf: AllocConf = AllocConf(),
    capacity: int | None = None,
    device_total: int | None = None,
    memory_fraction: float | None = None,
    want_curve: bool = True,
    want_addresses: bool = False,
    emptied: Collection[int] = (),
    held: Mapping[int, int] | None = None,
) -> ReplayResult:
    """Replays mallocs (kind 0, `nbytes` bytes on `streams`) and frees (kind 1) of lifetimes `ids`.

    Arrays of shape [events]; `nbytes` and `streams` of a free are not read. `want_addresses`
    adds the address of every id and the final segments, for a snapshot. The cache is emptied before
    the events whose indices are in `emptied`. `held`: id -> the event before which its block, freed
    earlier, becomes free to reuse (`Tensor.record_stream`); until then it is active, not allocated.
    """
    allocator = CachingAllocator(
        conf, capacity, device_total=device_total, memory_fraction=memory_fraction
    )
    malloc, free = allocator.malloc, allocator.free
    live: dict[int, Block] = {}
    addresses: dict[int, int] = {}
    curve: list[tuple[int, int, int]] = []
    held = held or {}
    deferred: dict[int, list[Block]] = {}
    oom = None
    columns = [np.asarray(column).tolist() for column in (kind, ids, nbytes)]
    columns.append(np.asarray(streams).tolist() if streams is not None else [0] * len(columns[0]))
    for index, (action, key, size, stream) in enumerate(zip(*columns, strict=True)):
        if emptied and index in emptied:
            allocator.empty_cache()
        if deferred:
            for block in deferred.pop(index, ()):
                allocator.complete(block)
        if action == FREE:
            block, until = live.pop(key), held.get(key, index)
            free(block, defer=until > index)
            if until > index:
                deferred.setdefault(until, []).append(block)
        else:
            try:
                live[key] = block = malloc(size, stream)
            except OutOfMemory as error:
                oom = OomInfo(index, key, size, str(error))
                break
            if want_addresses:
                addresses[key] = block.address
        if want_curve:
            curve.append((allocator.requested, allocator.allocated, allocator.reserved))
    requested, allocated, reserved = _curves(curve, len(columns[0])) if want_curve else [None] * 3
    segments = allocator.snapshot_segments()
    return ReplayResult(
        peak_requested=allocator.peak_requested,
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        segment_count=len(segments),
        retries=allocator.num_alloc_retries,
        oom=oom,
        requested=requested,
        allocated=allocated,
        reserved=reserved,
        addresses=addresses,
        segments=segments if want_addresses else [],
    )


def _curves(curve: list[tuple[int, int, int]], events: int) -> list[NDArray[np.int64]]:
    table = np.zeros((events, 3), dtype=np.int64)
    if curve:
        table[: len(curve)] = curve
        table[len(curve) :] = curve[-1]
    return [np.ascontiguousarray(column) for column in table.T]


# -- a recorded history -------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayReport:
    """A recorded history and its replay. Bytes; reserved and segments as the log ends.

    Segments are cudaMallocs that are held, or mapped runs of expandable segments.
    `segment_allocs_*`: (count, bytes) of the segment_alloc or segment_map events alone.
    """

    reserved_real: int
    reserved_replayed: int
    allocated_peak_real: int
    allocated_peak_replayed: int
    segments_real: int
    segments_replayed: int
    first_difference: dict[str, Any] | None
    reserved_peak_real: int
    reserved_peak_replayed: int
    segment_allocs_real: tuple[int, int]
    segment_allocs_replayed: tuple[int, int]
    events: int
    start_reserved: int
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The fields by name; segment allocations as {"count", "bytes"}."""
        fields = dict(self.__dict__)
        for name in ("segment_allocs_real", "segment_allocs_replayed"):
            fields[name] = dict(zip(("count", "bytes"), fields[name], strict=True))
        return fields


def replay_log(path: str | Path, conf: AllocConf | None = None) -> ReplayReport:
    """Replays a recorded history (event CSV or snapshot pickle, maybe gzipped) and compares.

    `conf`: the allocator settings of the recorded process, where the record does not say.
    Raises LlmemError if the file is no such record.
    """
    log = read_log(path, conf)
    try:
        start = rewind(log)
        real = RecordedLayout(log, start)
        model = ModelReplay(log, start)
        for index, event in enumerate(log.events):
            real.apply(event)
            model.apply(index, event)
    except ValueError as error:
        raise LlmemError(
            f"{path} contradicts itself ({error}); give the events and segments of one record, "
            "and the allocator settings it was made with."
        ) from error
    model.finish(len(log.events))
    return ReplayReport(
        reserved_real=real.final_reserved,
        reserved_replayed=model.allocator.reserved,
        allocated_peak_real=real.peak_allocated,
        allocated_peak_replayed=model.allocator.peak_allocated,
        segments_real=real.final_segments,
        segments_replayed=len(model.allocator.snapshot_segments()),
        first_difference=model.first_difference,
        reserved_peak_real=real.peak_reserved,
        reserved_peak_replayed=model.allocator.peak_reserved,
        segment_allocs_real=real.segment_allocs,
        segment_allocs_replayed=model.segment_allocs,
        events=len(log.events),
        start_reserved=sum(segment.reserved for segment in start),
        notes=[*log.notes, *real.notes(), *model.notes()],
    )


class ModelReplay:
    """The allocator model, fed with the allocs and frees of a log.

    Which segments exist is the model's own doing; the log's segment events are what it is
    compared with. They give it only what the driver alone decides: the addresses of new segments,
    and the moment when cached segments go back.
    """

    def __init__(self, log: EventLog, start: list[StartSegment]) -> None:
        self.log = log
        self.allocator = CachingAllocator(log.conf)
        self.allocator.place_segment = self._place
        self.first_difference: dict[str, Any] | None = None
        self.segment_allocs = (0, 0)
        self._blocks: dict[int, Block] = {}
        self._new: list[Event] = []  # segment_alloc and segment_map since the last alloc
        self._gone: list[Event] = []  # segment_free and segment_unmap, a run of them
        self._unknown_frees = 0
        self._elsewhere = 1 << 60  # no CUDA address is this high
        # Collecting garbage or freeing oversize blocks returns a part of the cached segments,
        # depending on the free memory of the device, which the log does not tell.
        self._partly = (
            log.conf.garbage_collection_threshold > 0
            or log.conf.max_split_size is not None
            or any(event.stream < 0 for event in log.events)
        )
        for segment in start:
            adopted = self.allocator.adopt_segment(
                segment.address, segment.size, segment.stream, segment.small,
                segment.live, segment.mapped,
            )  # fmt: skip
            self._blocks.update(adopted)

    def apply(self, index: int, event: Event) -> None:
        """One event of the log, in order."""
        action = event.action
        if self._gone and action not in ("segment_free", "segment_unmap"):
            self._release(index - len(self._gone))
        if action == "alloc":
            self._alloc(index, event)
        elif action in ("free", "free_requested"):
            self._free(event, defer=action == "free_requested")
        elif action == "free_completed":
            self._complete(event)
        elif action in ("segment_alloc", "segment_map"):
            self._new.append(event)
        elif action in ("segment_free", "segment_unmap"):
            self._gone.append(event)

    def finish(self, events: int) -> None:
        """The end of the log."""
        if self._gone:
            self._release(events - len(self._gone))
        if self._new:
            self._differ(events - 1, f"the log ends with {_names(self._new)} that no alloc uses")

    def notes(self) -> list[str]:
        """What to know when reading the figures."""
        ooms = sum(event.action == "oom" for event in self.log.events)
        return [
            *([f"{ooms} out-of-memory event(s) in the log"] if ooms else []),
            *(
                [f"{self._unknown_frees} free(s) of blocks that the log never saw were skipped"]
                if self._unknown_frees
                else []
            ),
        ]

    def _alloc(self, index: int, event: Event) -> None:
        made = self.allocator.segment_events = []
        block = self.allocator.malloc(event.size, event.stream)
        self._blocks[event.address] = block
        count, total = self.segment_allocs
        self.segment_allocs = count + len(made), total + sum(size for _, _, size, _ in made)
        logged = [(new.action, new.address, new.size, new.stream) for new in self._new]
        what = f"alloc of {event.size} bytes"
        if made != logged:
            self._differ(index, f"{what}: {_names(self._new)} in the log, {_names(made)} replayed")
        elif block.address != event.address:
            place = f"at {event.address} in the log, at {block.address} replayed"
            self._differ(index, f"{what}: {place}")
        self._new = []

    def _free(self, event: Event, defer: bool) -> None:
        block = self._blocks.get(event.address)
        if block is None:
            self._unknown_frees += 1
            return
        if not defer:
            del self._blocks[event.address]
        self.allocator.free(block, defer=defer)

    def _complete(self, event: Event) -> None:
        block = self._blocks.pop(event.address, None)
        if block is not None:
            if block.allocated:  # the log lacks its free_requested
                self.allocator.free(block)
            else:
                self.allocator.complete(block)

    def _release(self, index: int) -> None:
        """A run of segment_free and segment_unmap: what the model would free must be the same."""
        gone = self.allocator.segment_events = []
        wanted = {event.address for event in self._gone}
        self.allocator.empty_cache(only=wanted if self._partly else None)
        logged = {(event.action, event.address, event.size) for event in self._gone}
        replayed = {(action, address, size) for action, address, size, _ in gone}
        if logged != replayed:
            kept, lost = len(logged - replayed), len(replayed - logged)
            self._differ(
                index,
                f"cached memory goes back: {kept} of {len(logged)} segments or pages of the log "
                f"are not free in the replay, {lost} others are",
            )
        self._gone = []

    def _place(self, size: int, stream: int, small: bool) -> int:
        """Where the driver put the segment that the model has just asked for."""
        expandable = self.log.conf.expandable_segments
        for event in self._new:
            if event.stream == stream and (expandable or event.size == size):
                return event.address
        self._elsewhere += size
        return self._elsewhere

    def _differ(self, index: int, what: str) -> None:
        if self.first_difference is None:
            self.first_difference = {"event": index, "what": what}


def _names(events: list[Event] | list[tuple[str, int, int, int]]) -> str:
    """`segment_alloc of 20971520 bytes at 30136074240` for each event, or `no new segment`."""
    rows = [
        (event.action, event.address, event.size) if isinstance(event, Event) else event[:3]
        for event in events
    ]
    named = [f"{action} of {size} bytes at {address}" for action, address, size in rows]
    return ", ".join(named) or "no new segment"
