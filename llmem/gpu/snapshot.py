"""Snapshots of `torch.cuda.memory._snapshot()`: read them safely, and write our own.

The schema is the one that https://pytorch.org/memory_viz and `torch.cuda._memory_viz` read
(docstring of `torch.cuda.memory._snapshot`, torch 2.13).
"""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError
from llmem.gpu.blocks import ALLOCATED, AWAITING, FREE, SegmentView

GZIP_MAGIC = b"\x1f\x8b"

# (filename, line, function name), innermost first.
Frame = tuple[str, int, str]
# (action, address, bytes, stream, frames, microseconds); actions as in torch's trace.
TraceRow = tuple[str, int, int, int, Sequence[Frame], int]

_STATES = {FREE: "inactive", ALLOCATED: "active_allocated", AWAITING: "active_awaiting_free"}


class _PlainUnpickler(pickle.Unpickler):
    """Admits numbers, strings and containers; a pickle that names any class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise LlmemError(
            f"the snapshot wants to load {module}.{name}; only plain containers are read, so "
            "save it again with torch.cuda.memory._dump_snapshot."
        )


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, unpacked if it is gzip. Raises LlmemError if it cannot be read."""
    try:
        data = Path(path).read_bytes()
        return gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
    except (OSError, EOFError) as error:
        raise LlmemError(f"cannot read {path}: {error}; give an existing, whole file.") from error


def read_snapshot(path: str | Path) -> dict[str, Any]:
    """Reads a snapshot pickle (also .gz) without running anything that it contains.

    Raises LlmemError if it is no such pickle or holds anything but plain containers.
    """
    return parse_snapshot(read_bytes(path), str(path))


def parse_snapshot(data: bytes, source: str) -> dict[str, Any]:
    """As `read_snapshot`, from bytes; `source` names them in errors."""
    try:
        loaded = _PlainUnpickler(io.BytesIO(data)).load()
    except LlmemError:
        raise
    # A damaged pickle raises nearly anything (pickle documentation, "UnpicklingError").
    except Exception as error:
        raise LlmemError(f"{source} is not a readable pickle: {error}; save it again.") from error
    if not (isinstance(loaded, dict) and "segments" in loaded and "device_traces" in loaded):
        raise LlmemError(
            f"{source} is a pickle but no memory snapshot (no 'segments' and 'device_traces'); "
            "make it with torch.cuda.memory._dump_snapshot."
        )
    return loaded


def write_snapshot(
    path: str | Path,
    trace: Iterable[TraceRow],
    segments: Iterable[SegmentView] = (),
    *,
    frames: Mapping[int, Sequence[Frame]] | None = None,
    allocator_settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes a pickle that memory_viz draws.

    `trace`: the events in order. A free needs `free_requested` and `free_completed`.
    `segments`: the final state, e.g. `CachingAllocator.snapshot_segments()`.
    `frames`: who allocated the blocks of `segments`, by block address; by default the frames of
    the last `alloc` at that address.
    """
    rows = [_trace_entry(row) for row in trace]
    origin: dict[int, list[dict[str, Any]]] = {
        row["addr"]: row["frames"] for row in rows if row["action"] == "alloc"
    }
    if frames is not None:
        origin = {address: _frames(stack) for address, stack in frames.items()}
    snapshot = {
        "segments": [_segment_entry(view, origin) for view in segments],
        "device_traces": [rows],
        "allocator_settings": dict(allocator_settings or {}),
        "external_annotations": [],
    }
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file)


def _frames(stack: Sequence[Frame]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


def _trace_entry(row: TraceRow) -> dict[str, Any]:
    action, address, nbytes, stream, stack, time_us = row
    return {
        "action": action,
        "addr": int(address),
        "size": int(nbytes),
        "stream": int(stream),
        "frames": _frames(stack),
        "time_us": int(time_us),
        "pool_id": (0, 0),
    }


def _segment_entry(view: SegmentView, origin: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    def total(*states: int) -> int:
        return sum(block.size for block in view.blocks if block.state in states)

    return {
        "device": 0,
        "address": view.address,
        "total_size": view.size,
        "stream": view.stream,
        "segment_type": "small" if view.small else "large",
        "segment_pool_id": (0, 0),
        "allocated_size": total(ALLOCATED),
        "active_size": total(ALLOCATED, AWAITING),
        "requested_size": sum(block.requested for block in view.blocks),
        "is_expandable": view.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _STATES[block.state],
                "frames": origin.get(block.address, []) if block.state != FREE else [],
            }
            for block in view.blocks
        ],
    }
