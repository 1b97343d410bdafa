"""What one rank's run on CPU comes to: peaks by step and phase, live bytes at unit boundaries."""

from __future__ import annotations

import csv
import gc
import gzip
import os
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from llmem.lifetimes import Phase
from llmem.measure.cpu_memory import Curve, MemoryEvent, alive_after, curve_of, profiler, read
from llmem.measure.engines import Wrapped
from llmem.measure.marks import Mark

SHOWN_AT_PEAK = 16
"""How many scopes a record's breakdown of the peak names."""


class CpuRecorder:
    """Records the CPU allocator from ``start`` to ``finish``."""

    def __init__(self, history: Path | None = None) -> None:
        self._profiler = profiler()
        self._history = history
        self._host = 0
        self._notes: list[str] = []

    def start(self) -> None:
        self._profiler.start()

    def before_steps(self, wrapped: Wrapped) -> None:
        self._host = wrapped.host_bytes
        self._notes = wrapped.notes

    def after_step(self) -> None:
        return None

    def finish(self) -> dict[str, Any]:
        """The rank's part of a record. All numbers are bytes."""
        reachable = reachable_bytes()
        self._profiler.stop()
        events, marks = read(self._profiler)
        if self._history is not None:
            _write_history(events, marks, self._history)
        found = summarise(events, marks, self._host)
        return found | {"reachable_at_end": reachable - self._host, "notes": self._notes}


def summarise(events: list[MemoryEvent], marks: list[Mark], host: int = 0) -> dict[str, Any]:
    """Peaks and boundaries from raw events and marks.

    ``host`` bytes are alive throughout that would be in host memory on a GPU machine (the data
    loader's batch); they are left out of every number.

    >>> allocate = MemoryEvent(10, 64, 1, 0, ())
    >>> free = MemoryEvent(12, -64, 1, 0, ())
    >>> mark = Mark("phase", 0, "forward", "", "", 9, 20)
    >>> summarise([allocate, free], [mark])["steps"][0]["phases"]
    {'forward': 64}
    """
    curve = curve_of(events)
    curve.live = [live - host for live in curve.live]
    setup = [m for m in marks if m.phase == Phase.SETUP.label]
    marks = [m for m in marks if m.phase != Phase.SETUP.label]
    steps = [_step(curve, marks, step) for step in sorted({m.step for m in marks})]
    peak = max(step["peak"] for step in steps)
    last = steps[-1]["step"]
    first = min(m.start for m in marks)
    at = _first_reach(curve, peak, first)
    return {
        "peak": peak,
        "setup_peak": max(
            (_peak_between(curve.time, curve.live, m.start, m.end) for m in setup), default=0
        ),
        "before_steps": _live_at(curve.time, curve.live, first),
        "end": curve.live[-1] if curve.live else 0,
        "left_out": {"batch": host, **curve.left_out},
        "steps": steps,
        "boundaries": [
            [m.step, m.phase, m.unit, m.edge, _live_at(curve.time, curve.live, m.start)]
            for m in marks
            if m.kind == "unit" and m.step in (0, last)
        ],
        "at_peak": _by_scope(alive_after(events, at)),
        "events": len(events),
        "foreign_frees": curve.foreign_frees,
        "unseen_frees": curve.unseen_frees,
        "unknown_frees": curve.unknown_frees,
    }


def _step(curve: Curve, marks: list[Mark], step: int) -> dict[str, Any]:
    """Peak of a step and of each of its phases, and what is alive when it ends."""
    ranges = [m for m in marks if m.kind == "phase" and m.step == step]
    phases: dict[str, int] = {}
    for mark in ranges:
        peak = _peak_between(curve.time, curve.live, mark.start, mark.end)
        phases[mark.phase] = max(phases.get(mark.phase, 0), peak)
    end = max(m.end for m in ranges)
    start = min(m.start for m in ranges)
    return {
        "step": step,
        "peak": _peak_between(curve.time, curve.live, start, end),
        "end": _live_at(curve.time, curve.live, end),
        "phases": phases,
    }


def _live_at(time: list[int], live: list[int], moment: int) -> int:
    index = bisect_right(time, moment) - 1
    return live[index] if index >= 0 else 0


def _peak_between(time: list[int], live: list[int], start: int, end: int) -> int:
    inside = live[bisect_right(time, start) : bisect_right(time, end)]
    return max([_live_at(time, live, start), *inside])


def _first_reach(curve: Curve, peak: int, start: int) -> int:
    return next(
        time
        for time, live in zip(curve.time, curve.live, strict=True)
        if live == peak and time >= start
    )


def _by_scope(alive: list[MemoryEvent]) -> list[dict[str, Any]]:
    """Bytes and number of live storages by the op or engine range that made them."""
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in alive:
        total[event.scope] += event.nbytes
        count[event.scope] += 1
    return [
        {"scope": scope, "bytes": nbytes, "storages": count[scope]}
        for scope, nbytes in total.most_common(SHOWN_AT_PEAK)
    ]


def reachable_bytes() -> int:
    """Bytes of the distinct CPU storages that Python objects reach: a check on the events.

    What only C++ holds (DDP's buckets, autograd's saved tensors) is not among them.
    """
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        plain = type(thing) in (torch.Tensor, torch.nn.Parameter)  # not DTensor, which wraps one
        if plain and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _write_history(events: list[MemoryEvent], marks: list[Mark], stem: Path) -> None:
    """All events and marks of this rank as ``<stem>.rank<R>.csv.gz``, one a line."""
    rows = [(e.time, e.nbytes, e.address, e.thread, "/".join(e.scopes)) for e in events]
    rows += [
        (m.start, 0, 0, 0, f"mark {m.kind} {m.step} {m.phase} {m.unit} {m.edge}") for m in marks
    ]
    rank = int(os.environ.get("RANK", "0"))
    stem.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(f"{stem}.rank{rank}.csv.gz", "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time_ns", "bytes", "address", "thread", "where"])
        writer.writerows(sorted(rows))
