"""Colossal-AI's Gemini, as LLMem ran it with placement ``cuda`` (0.3.0, commit d4fb7bf).

Read in the notes on colossalai/zero/gemini (``chunk/chunk.py``, ``gemini_ddp.py``,
``gemini_optimizer.py``) and colossalai/nn/optimizer/hybrid_adam.py:

* parameters lie in 16-bit chunks and, as masters, in fp32 chunks of the same elements; each rank
  holds 1/N of a chunk (``llmem.baselines.gemini_chunks`` finds sizes and members);
* the first op of forward that uses a parameter gathers its chunk, which replaces the shard. Nothing
  is evicted under this placement, so it stays until backward has reduced it;
* a finished gradient is copied over its parameter's place in the chunk and freed (an empty tensor of
  its size, whose storage is freed at once, goes on to autograd). When all of a chunk are in, they
  are reduce-scattered to a new shard and the chunk is freed; the shard is searched for infinities;
* all_gather and reduce_scatter are given lists, which NCCL's process group of torch 2.0 flattens to
  one more buffer of the chunk's size;
* HybridAdam updates the slices of parameters in this rank's fp32 shards in place; its two states are
  zeros like each slice, made in the first step;
* placements that use the host are in ``gemini_placement``;
* with one rank (LLMem's change), or if all parameters are fewer than the smallest chunk, chunks stay
  gathered;
* under tensor parallelism parameters are grouped by the ranks that hold the same part
  (``classify_params_by_dp_degree``): split weights lie in chunks of their own, shared by
  gpus / tp ranks, and the whole ones (biases, norms) in others, shared by all.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmem.baselines.gemini_chunks import (
    MI_ELEMENTS,
    Chunk,
    assign_chunks,
    search_chunk_size,
)
from llmem.errors import LlmemError
from llmem.gpu.devices import get_device
from llmem.lifetimes import Category, Parameter, Phase, Touch, Trace
from llmem.parallel import RankTable
from llmem.parallel.editor import Editor
from llmem.parallel.gradients import gradient_rows
from llmem.spec import RunSpec

HALF, FULL = 2, 4
"""Bytes of an element in the two kinds of chunks."""
STATES = 2
"""exp_avg and exp_avg_sq."""
ADAMS = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_foreach", "adamw_torch_single", "adam",
)  # fmt: skip
"""Optimizers that HybridAdam stands in for (its ``adamw_mode``, on or off); memory is the same."""


@dataclass(frozen=True)
class Layout:
    """The chunks of a model's parameters on ``ranks`` ranks.

    ``gathered`` holds the numbers of the chunks that stay so; ``kept``: they all do.
    """

    parameters: tuple[Parameter, ...]
    chunks: tuple[Chunk, ...]
    ranks: int
    gathered: frozenset[int]

    @property
    def kept(self) -> bool:
        return len(self.gathered) == len(self.chunks)

    def shard(self, index: int) -> int:
        """Elements of chunk number ``index`` that a rank holds."""
        elements = self.chunks[index].elements
        return elements if index in self.gathered else elements // self.ranks

    def slices(self, rank: int) -> tuple[int, ...]:
        """Elements of each parameter's part in ``rank``'s shards, the empty ones left out."""
        found = []
        for index, chunk in enumerate(self.chunks):
            size = self.shard(index)
            first = 0 if index in self.gathered else rank * size
            start = 0
            for member in chunk.members:
                end = start + self.parameters[member].numel
                inside = min(end, first + size) - max(start, first)
                if inside > 0:
                    found.append(inside)
                start = end
        return tuple(found)


def layout_of(
    parameters: list[Parameter],
    ranks: int,
    *,
    min_chunk: int = 32 * MI_ELEMENTS,
    split: Container[int] | None = None,
) -> Layout:
    """Chunks for ``parameters`` in the order of ``model.parameters()``, tied ones once.

    ``min_chunk`` in elements: Gemini's ``min_chunk_size_mb`` of 32 (which it does not mean as MB).
    ``split`` holds the keys of parameters split over tensor-parallel ranks (None: no such ranks);
    ``ranks`` hold the same part of them. Raises LlmemError if the whole ones are no small group:
    they would be sharded over other ranks than the split ones.
    """
    whole = [] if split is None else [i for i, p in enumerate(parameters) if p.key not in split]
    if sum(parameters[i].numel for i in whole) >= min_chunk:
        raise LlmemError(
            f"gemini with --tp: the parameters that are not split have {min_chunk:,} elements or "
            "more, so that Gemini shards them over all GPUs, which is not modelled; leave --tp out"
        )
    rest = sorted(set(range(len(parameters))) - set(whole))
    chunks: list[Chunk] = []
    gathered: set[int] = set()
    for members in (rest, whole):
        numels = [parameters[i].numel for i in members]
        if not numels:
            continue
        size = search_chunk_size(numels, min_chunk=min_chunk, dp_degree=ranks)
        found = assign_chunks(numels, size, ranks)
        if ranks == 1 or sum(numels) < min_chunk:
            gathered.update(range(len(chunks), len(chunks) + len(found)))
        chunks += [replace(c, members=tuple(members[m] for m in c.members)) for c in found]
    return Layout(tuple(parameters), tuple(chunks), ranks, frozenset(gathered))


def compute_dtype(spec: RunSpec) -> str:
    """GeminiPlugin's ``precision``: fp16, or bf16 if asked for."""
    return spec.autocast_dtype or "float16"


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """Raises LlmemError for what Gemini 0.3.0 has not, or what is not modelled of it."""
    policy = placement_of(spec)
    if spec.gradient_accumulation_steps > 1:
        raise LlmemError(
            "Gemini 0.3.0 does not accumulate gradients (they overwrite the parameters in the chunks); "
            "use --gradient-accumulation-steps 1"
        )
    if spec.optim not in ADAMS:
        raise LlmemError(
            f"Gemini trains with HybridAdam alone, not {spec.optim}; use --optim {', '.join(ADAMS)}, or "
            "zero3"
        )
    if not all(p.trainable for p in trace.parameters):
        raise LlmemError("Gemini 0.3.0 trains all parameters; use --method full, or zero3")
    layout = layout_of(trace.parameters, spec.gpus, split=trace.sharded or None)
    make, slices_of, told = _placed(trace, layout, spec, policy)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank in range(spec.gpus):
        kinds.setdefault(slices_of(rank), []).append(rank)
    notes = [
        f"gemini: Colossal-AI 0.3.0, placement {policy}, {len(layout.chunks)} chunks of up to "
        f"{max(c.elements for c in layout.chunks):,} elements, "
        + ("kept gathered" if layout.kept else f"1/{spec.gpus} on each rank"),
        f"gemini: HybridAdam for {spec.optim}; clipping scales inside its kernel",
        *told,
    ]
    tables = []
    for slices, members in kinds.items():
        editor = make().run()
        optimizer = _states(editor, slices)
        lifetimes, named = editor.finish()
        tables.append(RankTable(members[0], lifetimes, named, optimizer, notes, tuple(members)))
    return tables


def placement_of(spec: RunSpec) -> str:
    """GeminiPlugin's ``placement_policy``; ``--offload all`` is ``cpu``.

    Raises LlmemError for the optimizer alone, which Gemini cannot offload.
    """
    if spec.offload == "optimizer":
        raise LlmemError(
            "Gemini offloads chunks and optimizer states together; use --placement-policy cpu or auto"
        )
    return "cpu" if spec.offload == "all" and spec.placement_policy == "cuda" else spec.placement_policy


def _placed(
    trace: Trace, layout: Layout, spec: RunSpec, policy: str
) -> tuple[Callable[[], GeminiPass], Callable[[int], tuple[int, ...]], list[str]]:
    """The pass of a placement, which slices of a rank have their states on the GPU, and notes."""
    if policy == "cuda":
        return lambda: GeminiPass(trace, layout), layout.slices, []
    from llmem.parallel import gemini_placement as host

    budget, told = None, f"{host.host_bytes(layout) / 2**20:,.1f} MiB of host memory on each rank"
    if policy == "auto":
        capacity = get_device(spec.gpu or "").capacity if spec.gpu else 0
        if not capacity:
            raise LlmemError("Gemini's placement auto goes by the GPU's memory; name it with --gpu")
        budget = host.auto_budget(trace, layout, capacity)
        told += f"; budgets by the {capacity / 2**30:.1f} GiB of {spec.gpu} and the first step"
    on_gpu = host.slices_on_gpu(layout)
    return lambda: host.HostPlacement(trace, layout, budget=budget), lambda rank: on_gpu, [f"gemini: {told}"]


@dataclass
class GeminiPass:
    """Plays the chunks' lives over a trace."""

    trace: Trace
    layout: Layout
    _held: dict[int, int] = field(default_factory=dict)
    """Chunk -> its shard or gathered buffer."""

    def run(self) -> Editor:
        trace = self.trace
        self.editor = Editor(trace)
        self.editor.drop(np.unique(np.array([p.row for p in trace.parameters], np.int64)))
        for index in range(len(self.layout.chunks)):
            size = self.layout.shard(index)
            self._held[index] = self._add(HALF * size, 0, category=Category.PARAMETER)
            self._add(FULL * size, 0, category=Category.PARAMETER)
        events = [*self._first_uses(), *self._finished_gradients()]
        for tick, index, step, parameter in sorted(events, key=lambda event: event[0]):
            if parameter is None:
                self._gather(index, tick, step)
            else:
                self._gradient(index, tick, step, parameter)
        return self.editor

    # -- what happens when -------------------------------------------------------------------------

    def _first_uses(self) -> list[tuple[int, int, int, Parameter | None]]:
        """(tick, chunk, step, None) for the first op of each step's forward that reads a chunk."""
        trace = self.trace
        found: list[tuple[int, int, int, Parameter | None]] = []
        reads = trace.touch_kind == Touch.READ
        forward = trace.ops.phase == int(Phase.FORWARD)
        for index, chunk in enumerate(self.layout.chunks):
            if index in self.layout.gathered:
                continue
            rows = [self.layout.parameters[m].row for m in chunk.members]
            ops = np.unique(trace.touch_op[reads & np.isin(trace.touch_row, rows)])
            ops = ops[forward[ops]]
            for step in np.unique(trace.ops.step[ops]).tolist():
                first = ops[trace.ops.step[ops] == step][0]
                found.append((int(trace.ops.tick[first]), index, step, None))
        return found

    def _finished_gradients(self) -> list[tuple[int, int, int, Parameter | None]]:
        chunk_of = {
            self.layout.parameters[m].key: index
            for index, chunk in enumerate(self.layout.chunks)
            for m in chunk.members
        }
        by_key = {p.key: p for p in self.layout.parameters}
        self._rows = gradient_rows(self.trace)
        self._waiting: dict[tuple[int, int], int] = {}
        found: list[tuple[int, int, int, Parameter | None]] = []
        for (step, key), tick in self.trace.gradient_ready.items():
            if (step, key) in self._rows:
                index = chunk_of[key]
                self._waiting[step, index] = self._waiting.get((step, index), 0) + 1
                found.append((tick, index, step, by_key[key]))
        return found

    # -- a chunk's life ----------------------------------------------------------------------------

    def _gather(self, index: int, tick: int, step: int) -> None:
        editor, nbytes = self.editor, HALF * self.layout.chunks[index].elements
        op = editor.op("all_gather", "", Phase.FORWARD, step, editor.at(tick))
        whole = self._add(nbytes, tick, op=op)
        editor.free(self._add(nbytes, tick, op=op), tick)
        editor.free(self._held[index], tick)
        self._held[index] = whole

    def _gradient(self, index: int, tick: int, step: int, parameter: Parameter) -> None:
        row = self._rows[step, parameter.key]
        self.editor.free(self._add(int(self.trace.lifetimes.nbytes[row]), tick), tick)
        self._waiting[step, index] -= 1
        if not self._waiting[step, index]:
            self._reduce(index, tick, step)
        self.editor.end(row, self.editor.at(tick))

    def _reduce(self, index: int, tick: int, step: int) -> None:
        editor, chunk = self.editor, self.layout.chunks[index]
        searched = chunk.used
        if index not in self.layout.gathered:
            searched = self.layout.shard(index)
            op = editor.op("reduce_scatter", "", Phase.BACKWARD, step, editor.at(tick))
            shard = self._add(HALF * searched, tick, op=op, category=Category.PARAMETER)
            editor.free(self._add(HALF * chunk.elements, tick, op=op), tick)
            editor.free(self._held[index], tick)
            self._held[index] = shard
        # isinf is abs() == inf: a 16-bit tensor and a bool one
        temporaries = [self._add(size * searched, tick) for size in (HALF, 1)]
        editor.free(temporaries, tick)

    def _add(
        self, nbytes: int, tick: int, *, op: int = -1, category: Category = Category.COMMUNICATION
    ) -> int:
        return self.editor.add(nbytes, self.editor.at(tick), op=op, category=category)


def _states(editor: Editor, slices: tuple[int, ...]) -> dict[str, Any]:
    """HybridAdam in place of the recorded clipping and optimizer; what ``RankTable`` tells of it."""
    trace = editor.trace
    ticks = np.array([tick for tick, _, _ in trace.phase_ticks])
    phases = np.array([int(phase) for _, phase, _ in trace.phase_ticks])
    born = phases[np.searchsorted(ticks, trace.lifetimes.birth, side="right") - 1]
    editor.drop(np.isin(born, [int(Phase.CLIP), int(Phase.OPTIMIZER)]))
    first = next(t for t, phase, _ in trace.phase_ticks if phase is Phase.OPTIMIZER)
    for numel in slices:
        for _ in range(STATES):
            editor.add(FULL * numel, editor.at(first), category=Category.OPTIMIZER_STATE)
    elements = STATES * sum(slices)
    return {"name": "HybridAdam", "state_elements": elements, "state_bytes": FULL * elements}
