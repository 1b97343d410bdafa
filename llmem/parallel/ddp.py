"""DistributedDataParallel, as torch 2.6 to 2.13 runs it.

Read in torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp:

* at construction parameters and buffers are broadcast in flat copies of up to 250 MiB, two in
  flight (``_sync_module_states``, broadcast_coalesced);
* every trained parameter has a place in a bucket, allocated once and kept: one bucket per dtype in
  the first iteration (no unused parameters are looked for), then, at the second forward, buckets
  of 1 MiB first and ``bucket_cap_mb`` after, in the order in which gradients arrived;
* gradients are copied into their bucket when ready. With ``gradient_as_bucket_view`` they then
  become views of it and their own storage is freed;
* buffers, if there are any, are broadcast in a flat copy before each forward.

Where each rank has a batch and a part of the experts, DDP skips the experts, and those of each layer are
in a DDP of their own among the ranks that hold the same ones; alone, a rank exchanges nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmem.errors import LlmemError
from llmem.lifetimes import TICK, Category, Parameter, Phase, Trace
from llmem.parallel import RankTable
from llmem.parallel.editor import Editor
from llmem.parallel.gradients import gradient_rows
from llmem.spec import RunSpec

BROADCAST_BYTES = 250 * 2**20
"""``broadcast_bucket_size`` in DistributedDataParallel.__init__."""
IN_FLIGHT = 2
"""``max_in_flight`` of broadcast_coalesced (torch/csrc/distributed/c10d/comm.cpp)."""
FIRST_BUCKET_BYTES = 2**20
"""``dist._DEFAULT_FIRST_BUCKET_BYTES``."""


def compute_dtype(spec: RunSpec) -> str | None:
    """None: mixed precision under DDP is autocast."""
    return None


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """All ranks are alike."""
    if spec.offload != "none":
        raise LlmemError("DDP has no offload; use --strategy zero2 or zero3 with --offload")
    editor = Editor(trace)
    wholes = _wholes(trace, spec)
    for whole in wholes:
        _broadcast_states(editor, whole)
    if spec.gpus > 1:
        _broadcast_buffers(editor)
    for whole in wholes:
        _buckets(editor, spec, whole)
    lifetimes, named = editor.finish()
    view = "views of the buckets" if spec.gradient_as_bucket_view else "beside the buckets"
    notes = [
        f"ddp: buckets of {spec.bucket_cap_mb:g} MiB (bucket_cap_mb), gradients {view}, "
        "no unused parameters looked for"
    ]
    if len(wholes) > 1:
        notes.append(
            f"ddp: the experts of each layer in buckets of their own, reduced among the "
            f"{spec.gpus // spec.ep} ranks that hold them"
        )
    everyone = tuple(range(spec.gpus))
    return [RankTable(0, lifetimes, named, trace.optimizer, notes, everyone)]


@dataclass(frozen=True)
class _Whole:
    """What one DistributedDataParallel is around: a module's name, and the parameters inside."""

    module: str
    parameters: list[Parameter]
    skipped: frozenset[int] = frozenset()
    """Rows of parameters inside that are not its own."""


def _wholes(trace: Trace, spec: RunSpec) -> list[_Whole]:
    """The model; under expert parallelism with own batches, first the experts of each layer."""
    if spec.ep == 1 or spec.ep_plan == "transformers":
        return [_Whole("", trace.parameters)]
    inside = {
        name: [p for p in trace.parameters if p.name.startswith(f"{name}.")] for name in trace.experts
    }
    apart = frozenset(p.row for parameters in inside.values() for p in parameters)
    rest = _Whole("", [p for p in trace.parameters if p.row not in apart], apart)
    exchanged = inside.items() if spec.gpus > spec.ep else ()  # DDP refuses what is frozen
    return [
        *(_Whole(name, own) for name, own in exchanged if any(p.trainable for p in own)), rest,
    ]  # fmt: skip


def _broadcast_states(editor: Editor, whole: _Whole) -> None:
    """The flat copies in which the first rank's parameters and buffers reach the others."""
    table = editor.trace.lifetimes
    existing = table.birth <= editor.trace.step_ticks[0]
    kinds = np.isin(table.category, [Category.PARAMETER, Category.BUFFER])
    rows = np.flatnonzero(existing & kinds)
    mine = {p.row for p in whole.parameters} if whole.module else set(rows.tolist()) - whole.skipped
    sizes = [int(table.nbytes[row]) for row in rows if row in mine]
    at = before_steps(editor.trace)
    _flat_copies(editor, sizes, at, Phase.SETUP, 0)


def before_steps(trace: Trace) -> int:
    """A tick after everything that exists before the first step, and before that step."""
    return trace.step_ticks[0] // TICK * TICK


def _flat_copies(editor: Editor, sizes: list[int], at: int, phase: Phase, step: int) -> None:
    flat, flats = 0, []
    for nbytes in sizes:
        flat += nbytes
        if flat >= BROADCAST_BYTES:
            flats.append(flat)
            flat = 0
    alive: list[int] = []
    for nbytes in flats + ([flat] if flat else []):
        if len(alive) == IN_FLIGHT:
            editor.free(alive.pop(0), at)
        op = editor.op("broadcast", "", phase, step, editor.at(at))
        alive.append(editor.add(nbytes, editor.at(at), op=op))
    editor.free(alive, at)


def _broadcast_buffers(editor: Editor) -> None:
    table = editor.trace.lifetimes
    sizes = table.nbytes[table.category == Category.BUFFER].tolist()
    if not sizes:
        return
    for tick, phase, step in list(editor.trace.phase_ticks):
        if phase is Phase.FORWARD:
            _flat_copies(editor, sizes, tick, phase, step)


def _second_forward(trace: Trace, whole: _Whole) -> list[int]:
    """The tick at which it starts, if the step is run twice."""
    if not whole.module:
        return [t for t, phase, step in trace.phase_ticks if phase is Phase.FORWARD and step == 1]
    return [
        span.enter
        for span in trace.spans
        if (span.step, span.phase) == (1, Phase.FORWARD) and trace.modules[span.module] == whole.module
    ]


def _buckets(editor: Editor, spec: RunSpec, whole: _Whole) -> None:
    trace = editor.trace
    trained = [p for p in whole.parameters if p.trainable]
    first = _by_dtype(trained)
    rebuilt = _by_size(_arrival_order(trace, trained), spec.bucket_cap_mb * 2**20)
    category = Category.GRADIENT if spec.gradient_as_bucket_view else Category.COMMUNICATION
    setup = before_steps(trace)
    handles = [
        editor.add(sum(p.nbytes for p in bucket), editor.at(setup), category=category)
        for bucket in first
    ]
    second = _second_forward(trace, whole)
    if second:
        editor.free(handles, second[0])
        for bucket in rebuilt:
            editor.add(
                sum(p.nbytes for p in bucket), editor.at(second[0]), category=category
            )
    if spec.gradient_as_bucket_view:
        keys = {p.key for p in trained}
        for (step, key), row in gradient_rows(trace).items():
            ready = trace.gradient_ready.get((step, key)) if key in keys else None
            if ready is not None:
                editor.end(row, editor.at(ready))


def _by_dtype(parameters: list[Parameter]) -> list[list[Parameter]]:
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _arrival_order(trace: Trace, parameters: list[Parameter]) -> list[Parameter]:
    """Parameters in the order in which the first backward finished their gradients."""
    ready = trace.gradient_ready
    return sorted(
        (p for p in parameters if (0, p.key) in ready), key=lambda p: ready[0, p.key]
    )


def _by_size(parameters: list[Parameter], cap: float) -> list[list[Parameter]]:
    """compute_bucket_assignment_by_size: a bucket of a dtype closes when it reaches its limit.

    >>> p = [Parameter(i, str(i), (2**18,), "float32", 4, True, i) for i in range(4)]
    >>> [len(b) for b in _by_size(p, 2 * 2**20)]
    [1, 2, 1]
    """
    done: list[list[Parameter]] = []
    open_buckets: dict[str, list[Parameter]] = {}
    limits: dict[str, float] = {}
    for parameter in parameters:
        bucket = open_buckets.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        limit = limits.setdefault(parameter.dtype, FIRST_BUCKET_BYTES)
        if sum(p.nbytes for p in bucket) >= limit:
            done.append(open_buckets.pop(parameter.dtype))
            limits[parameter.dtype] = cap
    return done + [bucket for bucket in open_buckets.values() if bucket]
