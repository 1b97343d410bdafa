"""Every allocation of the CPU allocator in this process, as torch's profiler reports it.

``torch.profiler(profile_memory=True)`` tells address and bytes of each allocation and free, on all
threads that inherit the profiler's state (gloo's included), without a dispatch mode, so that
autograd does what it always does. Memory that was allocated before the profiler started is unknown
to it: start it before the model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from llmem.measure.marks import PREFIX, Mark

HOST = "host:"
"""Prefix of ranges whose allocations are in host memory on a GPU machine too."""

LEFT_OUT = {
    "gloo": ("c10d::", "gloo:"),
    "host": (HOST,),
    "chunk_cat": ("fsdp::chunk_cat", "aten::_chunk_cat"),
}
"""What is not counted because a GPU run has no such memory on the device, by the ops or ranges in
which it is allocated: gloo's copies (NCCL makes none), host memory, and the padded copies that
``_chunk_cat`` makes on CPU (on CUDA it is one kernel, ATen/native/cuda/TensorShape.cu)."""


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation (``nbytes`` > 0) or free (< 0); ``scopes`` are the ops and ranges around it."""

    time: int
    nbytes: int
    address: int
    thread: int
    scopes: tuple[str, ...]

    @property
    def left_out(self) -> str | None:
        """Why this allocation is not counted (a key of ``LEFT_OUT``), None if it is."""
        for reason, prefixes in LEFT_OUT.items():
            if any(scope.startswith(prefixes) for scope in self.scopes):
                return reason
        return None

    @property
    def scope(self) -> str:
        """The engine's range or the op that a reader knows, for a breakdown."""
        known = [s for s in self.scopes if not s.startswith(PREFIX)]
        engine = [s for s in known if s.startswith(("FSDP", "Distributed", "Optimizer"))]
        ops = [s for s in known if not s.startswith("autograd::engine")]
        return (engine or ops[:1] or known[:1] or ["(python)"])[-1]


@dataclass
class Curve:
    """Live bytes after each event, without what is left out.

    ``left_out`` sums the bytes ever allocated for each reason (when gloo's threads free them is not
    reliably seen). ``foreign_frees`` counts buffers that another thread than the step's freed,
    ``unseen_frees`` those whose address was given out again although no free was reported,
    ``unknown_frees`` frees of memory from before the recording.
    """

    time: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    foreign_frees: int = 0
    unseen_frees: int = 0
    unknown_frees: int = 0


def profiler() -> Any:
    """A profiler that records memory events of the CPU."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )


def read(profile: Any) -> tuple[list[MemoryEvent], list[Mark]]:
    """The memory events and marks of a stopped profiler, in the order in which they happened."""
    events: list[MemoryEvent] = []
    marks: list[Mark] = []
    for node, scopes in _walk(profile.profiler.kineto_results.experimental_event_tree()):
        kind, data = node.typed
        if kind.name == "Allocation":
            if data.device.type == "cpu":
                events.append(
                    MemoryEvent(
                        node.start_time_ns, data.alloc_size, data.ptr, node.start_tid, scopes
                    )
                )
        elif node.name.startswith(PREFIX):
            marks.append(Mark.parse(node.name, node.start_time_ns, node.end_time_ns))
    events.sort(key=lambda event: event.time)
    marks.sort(key=lambda mark: mark.start)
    return events, marks


def _walk(roots: list[Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every node of the tree with the names above it."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(node, ()) for node in reversed(roots)]
    while stack:
        node, scopes = stack.pop()
        yield node, scopes
        if node.children:
            inside = (*scopes, node.name)
            stack.extend((child, inside) for child in reversed(node.children))


def curve_of(events: list[MemoryEvent]) -> Curve:
    """Running sums of the events, each free matched with its allocation by address."""
    curve = Curve()
    alive: dict[int, MemoryEvent] = {}
    live = 0
    main = _main_thread(events)
    for event in events:
        before = alive.pop(event.address, None)
        if before is not None and not before.left_out:
            live -= before.nbytes
            curve.unseen_frees += event.nbytes > 0
            curve.foreign_frees += event.nbytes < 0 and event.thread != main
        if event.nbytes > 0:
            alive[event.address] = event
            if reason := event.left_out:
                curve.left_out[reason] = curve.left_out.get(reason, 0) + event.nbytes
            else:
                live += event.nbytes
        elif before is None:
            curve.unknown_frees += 1
        curve.time.append(event.time)
        curve.live.append(live)
    return curve


def _main_thread(events: list[MemoryEvent]) -> int:
    """The thread that runs the step: the one that any mark is on, else the first seen."""
    for event in events:
        if any(scope.startswith(PREFIX) for scope in event.scopes):
            return event.thread
    return events[0].thread if events else 0


def alive_after(events: list[MemoryEvent], time: int) -> list[MemoryEvent]:
    """The counted allocations alive after the events up to ``time``."""
    alive: dict[int, MemoryEvent] = {}
    for event in events:
        if event.time > time:
            break
        if event.nbytes > 0:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    return [event for event in alive.values() if not event.left_out]
