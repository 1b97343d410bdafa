"""From lifetimes to bytes over time: replay, peak, breakdown.

A timeline is the running state of the allocator after every birth and death. *requested* counts
the bytes that ops asked for, *allocated* the blocks handed out, *reserved* the segments held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.blocks import SegmentView
from llmem.gpu.replay import replay_events
from llmem.lifetimes import BREAKDOWN, Events, Ints, Lifetimes, Phase, Trace


@dataclass(frozen=True)
class OutOfMemory:
    """The request that did not fit: its bytes, when (event index), and torch's message."""

    event: int
    row: int
    requested: int
    message: str


@dataclass(frozen=True)
class Timeline:
    """Bytes after each event of a table of lifetimes; the three curves have one value per event."""

    lifetimes: Lifetimes
    events: Events
    requested: Ints
    allocated: Ints
    reserved: Ints
    block_bytes: Ints
    """Bytes of the block that each lifetime got (at least what it asked for)."""
    retries: int = 0
    """How often cached blocks had to be given back before a request fitted."""
    oom: OutOfMemory | None = None
    segments: int = 0
    addresses: dict[int, int] = field(default_factory=dict)
    layout: list[SegmentView] = field(default_factory=list)
    """The segments at the end; like ``addresses``, only if asked for."""

    def peak_index(self, curve: Ints | None = None, start: int = 0, stop: int | None = None) -> int:
        """Index of the first maximum of ``curve`` (default: allocated) among events start..stop."""
        values = self.allocated if curve is None else curve
        return start + int(np.argmax(values[start:stop]))

    def span(self, first_tick: int, last_tick: int) -> tuple[int, int]:
        """Event indices [start, stop) whose ticks lie in [first_tick, last_tick)."""
        ticks = self.events.tick
        return int(np.searchsorted(ticks, first_tick)), int(np.searchsorted(ticks, last_tick))

    def alive(self, index: int) -> NDArray[np.bool_]:
        """Which lifetimes are alive just after event ``index``."""
        alive = np.zeros(len(self.lifetimes), np.bool_)
        upto = slice(0, index + 1)
        alive[self.events.row[upto][self.events.sign[upto] > 0]] = True
        alive[self.events.row[upto][self.events.sign[upto] < 0]] = False
        return alive

    def breakdown(self, index: int) -> dict[str, int]:
        """Allocated bytes by what they are for, just after event ``index``; sums to ``allocated``."""
        alive = self.alive(index)
        bytes_of = self.block_bytes[alive]
        category = self.lifetimes.category[alive]
        return {
            name: int(bytes_of[np.isin(category, [int(c) for c in members])].sum())
            for name, members in BREAKDOWN.items()
        }

    def by_part(self) -> dict[str, Ints]:
        """Allocated bytes after each event, by part of the breakdown; they sum to ``allocated``."""
        row = self.events.row
        change = self.events.sign * self.block_bytes[row]
        category = self.lifetimes.category[row]
        return {
            name: np.cumsum(np.where(np.isin(category, [int(c) for c in members]), change, 0))
            for name, members in BREAKDOWN.items()
        }


def replay(
    lifetimes: Lifetimes,
    *,
    exact: bool = False,
    conf: AllocConf | None = None,
    capacity: int | None = None,
    addresses: bool = False,
    cache_emptied: Sequence[int] = (),
    held: Ints | None = None,
) -> Timeline:
    """Run lifetimes through the caching allocator.

    ``exact`` counts requested bytes only, as on a CPU, where nothing is rounded or cached.
    ``capacity`` is what the allocator may reserve, in bytes (None: no limit); a request that does
    not fit ends the timeline with ``oom``. ``cache_emptied``: ticks of ``torch.cuda.empty_cache``.
    ``held`` [rows]: ticks until which freed blocks wait for other streams (see
    ``llmem.parallel.record_streams``).
    """
    events = lifetimes.events()
    if exact:
        requested = np.cumsum(events.sign * lifetimes.nbytes[events.row])
        return Timeline(lifetimes, events, requested, requested, requested, lifetimes.nbytes)
    result: Any = replay_events(
        (events.sign < 0).astype(np.int8),
        events.row,
        lifetimes.nbytes[events.row],
        lifetimes.stream[events.row].astype(np.int64),
        conf=conf or AllocConf(),
        capacity=capacity,
        want_addresses=addresses,
        emptied=np.searchsorted(events.tick, cache_emptied).tolist(),
        held=_held_events(lifetimes, events, held),
    )
    oom = None
    if result.oom is not None:
        info = result.oom
        oom = OutOfMemory(info.event, int(info.id), int(info.requested), info.message)
    allocated = result.allocated
    born = events.sign > 0
    block_bytes = np.zeros(len(lifetimes), np.int64)
    block_bytes[events.row[born]] = np.diff(allocated, prepend=0)[born]
    return Timeline(
        lifetimes,
        events,
        result.requested,
        allocated,
        result.reserved,
        block_bytes,
        retries=result.retries,
        oom=oom,
        segments=result.segment_count,
        addresses=result.addresses,
        layout=result.segments,
    )


def _held_events(lifetimes: Lifetimes, events: Events, held: Ints | None) -> dict[int, int]:
    """Row -> the first event at or after the tick until which its block is held."""
    if held is None:
        return {}
    rows = np.flatnonzero(held > lifetimes.death)
    until = np.searchsorted(events.tick, held[rows])
    return dict(zip(rows.tolist(), until.tolist(), strict=True))


@dataclass(frozen=True)
class PeakAt:
    """Where a peak is: phase, module and op names, step, event index and tick."""

    phase: str
    module: str
    op: str
    step: int
    index: int
    tick: int


def locate(timeline: Timeline, trace: Trace, index: int) -> PeakAt:
    """Name the place in the step of event ``index``."""
    tick = int(timeline.events.tick[index])
    phase, step = trace.phase_at(tick)
    row = int(timeline.events.row[index])
    op = int(timeline.lifetimes.birth_op[row])
    if op < 0 or timeline.events.sign[index] < 0:
        op = trace.op_at(tick)
    module = trace.modules[int(timeline.lifetimes.module[row])]
    if op >= 0:
        phase, step = Phase(int(trace.ops.phase[op])), int(trace.ops.step[op])
        module = trace.modules[int(trace.ops.module[op])] or module
    return PeakAt(phase.label, module, trace.op_name(op), step, index, tick)
