"""Gemini's placements ``cpu`` and ``auto``: chunks rest in host memory, and come to the GPU to be used.

Read in Colossal-AI 0.3.0 (commit d4fb7bf), colossalai/zero/gemini: ``placement_policy.py``,
``gemini_mgr.py``, ``gemini_hook.py``, ``memory_tracer`` and ``chunk/chunk.py``:

* both kinds of chunks start on the host, but for those that stay gathered; the optimizer's states
  lie where the masters do;
* before each op that has parameters, in forward, recomputation and backward, chunks are evicted
  and those of the op come in: a shard is copied to the GPU, then gathered. The first time after an
  optimizer step it is the master's shard that comes, which is cast there (``__paired_shard_move``);
* a chunk can be evicted as long as none of its gradients has been copied into it. Its own shard is
  copied out, the rest freed, the shard moved (``release_chunk``, ``move_chunk``);
* ``cpu`` evicts all that it can. ``auto`` evicts only what the op needs beyond a budget for chunks: in
  the first step 20 % of the GPU, in the order of the chunks; then 90 % of the GPU less what else was
  allocated between this op and the next in the first step, those first whose next use is farthest;
* reduced gradients, a shard, are moved to the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmem.errors import LlmemError
from llmem.lifetimes import TICK, Category, Lifetimes, Parameter, Phase, Touch, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.gemini import FULL, HALF, STATES, GeminiPass, Layout
from llmem.parallel.gradients import gradient_rows
from llmem.timeline import replay

WARMUP_SHARE = 1 - 0.8
"""Of the GPU, for chunks in the first step (``_warmup_non_model_data_ratio``)."""
STEADY_SHARE = 0.9
"""Of the GPU, for everything in the later ones (``_steady_cuda_cap_ratio``)."""


@dataclass(frozen=True)
class Use:
    """An op with parameters: its chunks, and its place among those of its step."""

    tick: int
    step: int
    number: int
    chunks: tuple[int, ...]


def uses_of(trace: Trace, layout: Layout) -> list[Use]:
    """Every op with parameters in forward, recomputation and backward, one for each call of a module.

    Backward of an op counts where it reads a parameter or makes its gradient.
    """
    chunk_of = {
        layout.parameters[m].row: index for index, c in enumerate(layout.chunks) for m in c.members
    }
    reads = (trace.touch_kind == Touch.READ) & np.isin(trace.touch_row, list(chunk_of))
    phases = [int(Phase.FORWARD), int(Phase.BACKWARD)]
    found: dict[tuple[int, int], set[int]] = {}
    for op, row in zip(trace.touch_op[reads].tolist(), trace.touch_row[reads].tolist(), strict=True):
        if trace.ops.phase[op] in phases:
            found.setdefault((int(trace.ops.tick[op]), op), set()).add(chunk_of[row])
    rows, made = {p.key: p.row for p in layout.parameters}, gradient_rows(trace)
    for (step, key), ready in trace.gradient_ready.items():
        if (step, key) not in made:
            continue
        # The op that makes it, and of a weight that is used twice the last one that adds to it.
        adds = int(np.searchsorted(trace.ops.tick, ready // TICK * TICK)) - 1
        for op in (int(trace.lifetimes.birth_op[made[step, key]]), adds):
            found.setdefault((int(trace.ops.tick[op]), op), set()).add(chunk_of[rows[key]])
    uses: list[Use] = []
    last: tuple[object, ...] = ()
    for (tick, op), chunks in sorted(found.items()):
        step = int(trace.ops.step[op])
        same = (step, int(trace.ops.module[op]), int(trace.ops.phase[op]), tuple(sorted(chunks)))
        if same == last:
            continue
        number = uses[-1].number + 1 if uses and uses[-1].step == step else 0
        uses.append(Use(tick, step, number, tuple(sorted(chunks))))
        last = same
    return uses


Budget = Callable[[Use], float]
"""Bytes that chunks may take when an op starts."""


@dataclass
class HostPlacement(GeminiPass):
    """Plays the chunks' lives over a trace; ``budget`` of ``auto``, None for ``cpu``."""

    budget: Budget | None = None
    _ready: dict[int, int] = field(default_factory=dict)
    """Chunk -> how many of its gradients are in it."""
    _stale: set[int] = field(default_factory=set)
    """Chunks whose 16-bit shards an optimizer step left behind their masters'."""
    after_use: dict[Use, int] = field(default_factory=dict)
    """Bytes of chunks on the GPU when an op runs."""

    def run(self) -> Editor:
        trace, layout = self.trace, self.layout
        self.editor = Editor(trace)
        self.editor.drop(np.unique(np.array([p.row for p in trace.parameters], np.int64)))
        for index in sorted(layout.gathered):
            for size in (HALF, FULL):
                nbytes = size * layout.chunks[index].elements
                self._add(nbytes, 0, category=Category.PARAMETER)
        self._uses = uses_of(trace, layout)
        self._numbers: dict[int, list[int]] = {}
        for use in self._uses:
            for index in use.chunks if use.step == 0 else ():
                self._numbers.setdefault(index, []).append(use.number)
        events: list[tuple[int, int, Use | tuple[int, int, Parameter]]] = [
            (use.tick, 1, use) for use in self._uses
        ]
        for tick, index, step, parameter in self._finished_gradients():
            if parameter is not None:
                events.append((tick, 0, (index, step, parameter)))
        step = 0
        # A gradient that is done where an op starts was done before it.
        for tick, _, event in sorted(events, key=lambda e: (e[0] // TICK, e[1], e[0])):
            if isinstance(event, Use):
                if event.step != step:
                    step = event.step
                    self._stale = set(range(len(layout.chunks))) - layout.gathered
                self._use(event)
            else:
                index, at_step, parameter = event
                self._ready[index] = self._ready.get(index, 0) + 1
                self._gradient(index, tick, at_step, parameter)
        return self.editor

    # -- before an op ------------------------------------------------------------------------------

    def _use(self, use: Use) -> None:
        coming = [c for c in use.chunks if c not in self._held and c not in self.layout.gathered]
        for index in self._evicted(use, sum(self._nbytes(c) for c in coming)):
            self._evict(index, use.tick)
        for index in coming:
            self._access(index, use)
        self.after_use[use] = self.used(use.step)

    def used(self, step: int) -> int:
        """``total_mem["cuda"]``: chunks on the GPU, and optimizer states once they are there."""
        states = STATES * FULL if step else 0
        whole = sum(self.layout.chunks[c].elements for c in self.layout.gathered)
        kept = (HALF + FULL) * whole + states * sum(slices_on_gpu(self.layout))
        return kept + sum(self._nbytes(c) for c in self._held)

    def _nbytes(self, index: int) -> int:
        return HALF * self.layout.chunks[index].elements

    def _evicted(self, use: Use, demand: int) -> list[int]:
        free = [c for c in sorted(self._held) if c not in use.chunks and not self._ready.get(c)]
        if self.budget is None:
            return free
        lacking = demand - (self.budget(use) - self.used(use.step))
        if lacking <= 0:
            return []
        if use.step:
            free.sort(key=lambda chunk: self._next_use(chunk, use), reverse=True)
        found: list[int] = []
        while free and lacking > 0:
            found.append(free.pop(0))
            lacking -= self._nbytes(found[-1])
        if lacking > 0:
            raise LlmemError(
                f"Gemini's placement auto fails in step {use.step + 1}: it finds no chunks to evict for "
                f"the last {lacking / 2**20:,.0f} MiB of an op's; use a smaller batch, more GPUs or "
                "--placement-policy cpu"
            )
        return found

    def _next_use(self, chunk: int, now: Use) -> int:
        """Number of the next op of the first step's list that needs ``chunk``."""
        numbers = self._numbers.get(chunk, [])
        place = bisect_right(numbers, now.number)
        return numbers[place] if place < len(numbers) else len(self._uses)

    # -- a chunk's life ----------------------------------------------------------------------------

    def _evict(self, index: int, tick: int) -> None:
        shard = self._add(HALF * self.layout.shard(index), tick)
        self.editor.free([self._held.pop(index), shard], tick)

    def _access(self, index: int, use: Use) -> None:
        elements, master = self.layout.shard(index), None
        if index in self._stale:
            self._stale.remove(index)
            master = self._add(FULL * elements, use.tick)
        self._held[index] = self._add(HALF * elements, use.tick)
        if master is not None:
            self.editor.free(master, use.tick)
        self._gather(index, use.tick, use.step)

    def _reduce(self, index: int, tick: int, step: int) -> None:
        super()._reduce(index, tick, step)
        self._ready[index] = 0
        if index not in self.layout.gathered:
            self.editor.free(self._held.pop(index), tick)


def slices_on_gpu(layout: Layout) -> tuple[int, ...]:
    """Elements of the parameters in chunks that stay gathered, whose optimizer states lie there too."""
    return tuple(
        layout.parameters[m].numel for c in sorted(layout.gathered) for m in layout.chunks[c].members
    )


def host_bytes(layout: Layout) -> int:
    """Bytes on each rank's host: masters, reduced gradients and two states of its shards."""
    rest = sorted(set(range(len(layout.chunks))) - layout.gathered)
    return (FULL + HALF + STATES * FULL) * sum(layout.shard(c) for c in rest)


def auto_budget(trace: Trace, layout: Layout, capacity: int) -> Budget:
    """``AutoPlacementPolicy`` on a GPU of ``capacity`` bytes, its first step measured by replay."""
    first = HostPlacement(trace, layout, budget=lambda use: WARMUP_SHARE * capacity)
    lifetimes, _ = first.run().finish()
    measured = _beside_chunks(lifetimes, trace, first)

    def budget(use: Use) -> float:
        if use.step == 0:
            return WARMUP_SHARE * capacity
        return STEADY_SHARE * capacity - measured[min(use.number, len(measured) - 1)]

    return budget


def _beside_chunks(lifetimes: Lifetimes, trace: Trace, first: HostPlacement) -> list[int]:
    """Bytes beside chunks from each op of the first step to the next, at most (``_step_nmd_dict``)."""
    timeline = replay(lifetimes)
    mine = [use for use in first.after_use if use.step == 0]
    last = next(tick for tick, phase, _ in trace.phase_ticks if phase is Phase.OPTIMIZER)
    ends: Iterable[int] = [use.tick for use in mine[1:]] + [last]
    return [
        _most(timeline.allocated, timeline.span(use.tick + 1, end + 1)) - first.after_use[use]
        for use, end in zip(mine, ends, strict=True)
    ]


def _most(curve: Sequence[int] | np.ndarray, span: tuple[int, int]) -> int:
    start, stop = span
    return int(np.max(np.asarray(curve)[max(start - 1, 0) : max(stop, start, 1)]))

