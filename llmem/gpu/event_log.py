"""A recorded allocator history: its events and the segments at its end.

Two sources: a CSV of events (`action, addr, size, stream` and whatever else), the final segments
in a second CSV beside it, or a snapshot pickle of torch.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.snapshot import parse_snapshot, read_bytes

EVENT_COLUMNS = ("action", "addr", "size", "stream")
SEGMENT_COLUMNS = (
    "seg_address", "seg_total", "seg_type", "stream",
    "block_offset", "block_size", "requested_size", "state",
)  # fmt: skip


@dataclass(frozen=True)
class RecordedBlock:
    """A block of a final segment; bytes. `state`: active_allocated, active_awaiting_free, …"""

    address: int
    size: int
    requested: int
    state: str


@dataclass(frozen=True)
class RecordedSegment:
    """A segment at the end of the record; `size` in bytes."""

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: list[RecordedBlock] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """One trace entry: `size` in bytes (requested ones for alloc and free)."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True)
class EventLog:
    """`segments` is None where the record does not tell its final state."""

    events: list[Event]
    segments: list[RecordedSegment] | None
    conf: AllocConf
    notes: list[str]


def read_log(path: str | Path, conf: AllocConf | None = None) -> EventLog:
    """Reads an event CSV or a snapshot pickle, either also gzipped; content decides which.

    `conf`: the settings of the recorded process; by default what the record says of them.
    Raises LlmemError if the file is neither.
    """
    data = read_bytes(path)
    if data.startswith(b"\x80"):  # every pickle since protocol 2
        log = _from_snapshot(parse_snapshot(data, str(path)), str(path))
    else:
        log = _from_csv(data, Path(path))
    if conf is not None:
        return replace(log, conf=conf)
    mapped = any(event.action in ("segment_map", "segment_unmap") for event in log.events)
    if mapped or any(segment.expandable for segment in log.segments or ()):
        return replace(log, conf=replace(log.conf, expandable_segments=True))
    return log


# -- CSV ----------------------------------------------------------------------------------


def _from_csv(data: bytes, path: Path) -> EventLog:
    events = [
        Event(action, _integer(address, path), _integer(size, path), _integer(stream, path))
        for action, address, size, stream in _rows(data, EVENT_COLUMNS, path)
    ]
    beside = _segments_path(path)
    if beside is None:
        note = (
            f"no segments file beside {path.name}: assumed to start with nothing but what it frees"
        )
        return EventLog(events, None, AllocConf(), [note])
    return EventLog(events, _segments_from_csv(beside), AllocConf(), [])


def _segments_path(path: Path) -> Path | None:
    """`x.events.csv[.gz]` or `x.csv[.gz]` → `x.segments.csv[.gz]`, whichever exists."""
    stem = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".events")
    for suffix in (".segments.csv.gz", ".segments.csv"):
        beside = path.with_name(stem + suffix)
        if beside.exists():
            return beside
    return None


def _segments_from_csv(path: Path) -> list[RecordedSegment]:
    segments: dict[int, RecordedSegment] = {}
    for row in _rows(read_bytes(path), SEGMENT_COLUMNS, path):
        address, total = _integer(row[0], path), _integer(row[1], path)
        segment = segments.setdefault(
            address,
            RecordedSegment(address, total, _integer(row[3], path), row[2] == "small", False),
        )
        offset, size, requested = (_integer(text, path) for text in row[4:7])
        segment.blocks.append(RecordedBlock(address + offset, size, requested, row[7]))
    return list(segments.values())


def _rows(data: bytes, columns: tuple[str, ...], path: Path) -> list[list[str]]:
    """The named columns of a CSV, in that order."""
    try:
        table = list(csv.reader(io.StringIO(data.decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LlmemError(f"{path} is neither a CSV nor a snapshot pickle: {error}.") from error
    header = table[0] if table else []
    missing = [name for name in columns if name not in header]
    if missing:
        raise LlmemError(
            f"{path} lacks the column(s) {', '.join(missing)}; an allocator history has "
            f"{', '.join(columns)}."
        )
    where = [header.index(name) for name in columns]
    short = next((i for i, row in enumerate(table) if row and len(row) <= max(where)), None)
    if short is not None:
        raise LlmemError(f"{path}: row {short + 1} is cut off; give the whole file.")
    return [[row[i] for i in where] for row in table[1:] if row]


def _integer(text: str, path: Path) -> int:
    try:
        return int(text, 0) if text else 0
    except ValueError as error:
        raise LlmemError(f"{path}: {text!r} is not a whole number.") from error


# -- snapshot pickle ----------------------------------------------------------------------


def _from_snapshot(snapshot: dict[str, Any], source: str) -> EventLog:
    """The history of the device with the longest trace.

    Memory pools (CUDA graphs, MemPool) share nothing with the default pool or one another, just
    as streams do, so each (stream, pool) pair becomes a stream of its own.
    """
    streams: dict[tuple[int, tuple[int, ...]], int] = {}

    def stream_of(entry: dict[str, Any], pool_key: str) -> int:
        stream = int(entry.get("stream") or 0)
        pool = tuple(int(part) for part in entry.get(pool_key) or (0, 0))
        if not any(pool):
            return stream
        return streams.setdefault((stream, pool), -1 - len(streams))

    try:
        traces = snapshot["device_traces"]
        device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
        events = [
            Event(
                str(entry["action"]),
                int(entry.get("addr") or 0),
                int(entry.get("size") or 0),
                stream_of(entry, "pool_id"),
            )
            for entry in (traces[device] if traces else [])
        ]
        segments = [
            _segment(entry, stream_of(entry, "segment_pool_id"))
            for entry in snapshot["segments"]
            if entry.get("device", device) == device
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LlmemError(
            f"{source} does not follow the schema of torch.cuda.memory._snapshot: {error!r}."
        ) from error
    if not events:
        raise LlmemError(
            f"{source} holds no events; call torch.cuda.memory._record_memory_history() first."
        )
    return EventLog(events, segments, _recorded_conf(snapshot.get("allocator_settings")), [])


def _segment(entry: dict[str, Any], stream: int) -> RecordedSegment:
    blocks, offset = [], int(entry["address"])
    for block in entry["blocks"]:
        size = int(block["size"])
        # Snapshots before torch 2.1 give no block addresses; blocks follow one another.
        address = int(block.get("address") or offset)
        requested = int(block.get("requested_size") or size)
        blocks.append(RecordedBlock(address, size, requested, str(block["state"])))
        offset = address + size
    return RecordedSegment(
        int(entry["address"]),
        int(entry["total_size"]),
        stream,
        entry.get("segment_type") == "small",
        bool(entry.get("is_expandable", False)),
        blocks,
    )


def _recorded_conf(settings: Any) -> AllocConf:
    """The conf string of the recorded process, else the single settings torch writes out."""
    if not isinstance(settings, dict):
        return AllocConf()
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "last_allocator_settings"):
        text = settings.get(key)
        if isinstance(text, str) and text:
            return AllocConf.parse(text)
    conf = AllocConf()
    limit = settings.get("max_split_size")
    if isinstance(limit, int) and 0 < limit < 1 << 60:
        conf = replace(conf, max_split_size=limit)
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 < threshold < 1:
        conf = replace(conf, garbage_collection_threshold=threshold)
    if settings.get("expandable_segments") is True:
        conf = replace(conf, expandable_segments=True)
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and len(divisions) == len(conf.roundup_power2_divisions):
        table = tuple(int(divisions[key]) for key in sorted(divisions, key=int))
        conf = replace(conf, roundup_power2_divisions=table)
    return conf
