"""When DeepSpeed's module hooks run in a traced step.

ZeRO-3 hooks every module: before and after its forward, and, through identity functions on its
outputs and inputs, before and after its backward (runtime/zero/parameter_offload.py,
``_register_deepspeed_module``). Forward hooks are the trace's module calls. A module's backward
begins with its first op in backward; it ends after its last one, if its input needs a gradient
(otherwise the hook is not on the graph).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from llmem.lifetimes import TICK, Phase, Span, Touch, Trace
from llmem.parallel.zero.ready import Backward


class Kind(IntEnum):
    """Hooks, in the order in which they run at one moment of backward."""

    POST_BACKWARD = 1
    PRE_BACKWARD = 2
    PRE_FORWARD = 3
    POST_FORWARD = 4


@dataclass(frozen=True)
class Hook:
    """A hook of ``module`` at ``tick``; ``recompute`` if checkpointing runs it inside backward."""

    tick: int
    kind: Kind
    module: str
    recompute: bool = False


def forward_hooks(trace: Trace, step: int, start: int, end: int) -> list[Hook]:
    """Hooks of the module calls in a forward phase [start, end)."""
    spans = [
        s for s in trace.spans
        if s.step == step and s.phase is Phase.FORWARD and start <= s.enter < end
    ]
    return _calls(trace, spans)


@dataclass(frozen=True)
class Region:
    """One recomputation: its module calls, and the op of backward that asked for it.

    Checkpointing stops it by an exception as soon as all is there that backward needs: the last
    call and those around it have no hook after them.
    """

    calls: list[Span]
    asked_by: int

    @property
    def start(self) -> int:
        return self.calls[0].enter

    @property
    def end(self) -> int:
        return max(span.exit for span in self.calls)


def regions_of(trace: Trace, backward: Backward) -> list[Region]:
    """The recomputations of a backward. Ops of backward between two calls part two regions."""
    own = own_ops(trace, backward)
    slots = trace.ops.tick[own] // TICK
    found: dict[int, list[Span]] = {}
    for span in trace.spans:
        if span.recompute and backward.start <= span.enter < backward.end:
            before = int(np.searchsorted(slots, span.enter // TICK, side="left"))
            found.setdefault(before, []).append(span)
    return [
        Region(calls, int(own[before]) if before < len(own) else -1)
        for before, calls in found.items()
    ]


def _calls(trace: Trace, spans: list[Span], region: Region | None = None) -> list[Hook]:
    """Enter and exit of nested calls, in order."""
    hooks: list[Hook] = []
    stack: list[Span] = []
    recompute = region is not None
    cut = set(lineage(trace.modules[region.calls[-1].module])) if region else set()

    def leave() -> None:
        span = stack.pop()
        name = trace.modules[span.module]
        if region is None or span.exit != region.end or name not in cut:
            hooks.append(Hook(span.exit, Kind.POST_FORWARD, name, recompute))

    for span in spans:
        name = trace.modules[span.module]
        while stack and not _encloses(trace.modules[stack[-1].module], stack[-1], name, span):
            leave()
        stack.append(span)
        hooks.append(Hook(span.enter, Kind.PRE_FORWARD, name, recompute))
    while stack:
        leave()
    return hooks


def _encloses(outer: str, around: Span, inner: str, span: Span) -> bool:
    if around.exit != span.enter:
        return around.exit > span.enter
    return outer == "" or inner.startswith(outer + ".")


def backward_hooks(trace: Trace, backward: Backward) -> list[Hook]:
    """Hooks of one backward, those of recomputation among them, in order."""
    first, last = _first_and_last_ops(trace, backward)
    flowing = _modules_that_pass_gradients(trace, backward)
    regions = regions_of(trace, backward)
    moved = {region.asked_by: region.start for region in regions}
    next_tick = np.append(trace.ops.tick[1:], trace.step_ticks[-1])
    timed: list[tuple[int, int, int, int, Hook]] = []
    for module, op in first.items():
        tick = moved.get(op, int(trace.ops.tick[op]))
        depth = module.count(".") + bool(module)
        hook = Hook(tick, Kind.PRE_BACKWARD, module)
        timed.append((tick // TICK, int(hook.kind), depth, 0, hook))
    for module in _embeddings_whose_output_is_made_to_need_gradients(trace, backward, first):
        hook = Hook(backward.end, Kind.PRE_BACKWARD, module)
        timed.append((backward.end // TICK, int(hook.kind), 0, 0, hook))
    for module in flowing & set(last):
        tick = min(int(next_tick[last[module]]), backward.end)
        depth = module.count(".") + bool(module)
        hook = Hook(tick, Kind.POST_BACKWARD, module)
        timed.append((tick // TICK, int(hook.kind), -depth, 0, hook))
    again = [hook for region in regions for hook in _calls(trace, region.calls, region)]
    for number, hook in enumerate(again):
        timed.append((hook.tick // TICK, int(Kind.PRE_FORWARD), 0, number, hook))
    return [item[-1] for item in sorted(timed, key=lambda item: item[:4])]


def own_ops(trace: Trace, backward: Backward) -> np.ndarray:
    """Indices of the ops of a backward, recomputation left out."""
    low, high = np.searchsorted(trace.ops.tick, [backward.start, backward.end])
    ops = np.arange(low, high)
    return ops[~trace.ops.recompute[low:high] & (trace.ops.phase[low:high] == int(Phase.BACKWARD))]


def lineage(module: str) -> list[str]:
    """A module's name, its ancestors' and the root's ''.

    >>> lineage("a.b")
    ['a.b', 'a', '']
    """
    names = [module]
    while module:
        module = module.rpartition(".")[0]
        names.append(module)
    return names


def _first_and_last_ops(
    trace: Trace, backward: Backward
) -> tuple[dict[str, int], dict[str, int]]:
    """First and last op in backward of each module that was called, submodules included."""
    called = {trace.modules[s.module] for s in trace.spans if s.step == backward.step}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for op in own_ops(trace, backward).tolist():
        for module in lineage(trace.modules[trace.ops.module[op]]):
            if module in called:
                first.setdefault(module, op)
                last[module] = op
    return first, last


def _modules_that_pass_gradients(trace: Trace, backward: Backward) -> set[str]:
    """Modules one of whose gradients is read by an op of another module later in backward."""
    ops = own_ops(trace, backward)
    if not len(ops):
        return set()
    mask = (trace.touch_op >= ops[0]) & (trace.touch_op <= ops[-1])
    maker: dict[int, str] = {}
    found: set[str] = set()
    own = set(ops.tolist())
    columns = (trace.touch_op[mask], trace.touch_row[mask], trace.touch_kind[mask])
    for op, row, kind in zip(*(c.tolist() for c in columns), strict=True):
        if op not in own:
            continue
        module = trace.modules[trace.ops.module[op]]
        if kind == Touch.WRITE:
            maker[row] = module
        elif (made := maker.get(row)) is not None and made != module:
            found |= set(lineage(made)) - set(lineage(module))
    return found


def _embeddings_whose_output_is_made_to_need_gradients(
    trace: Trace, backward: Backward, first: dict[str, int]
) -> list[str]:
    """Frozen embeddings under ``enable_input_require_grads``: no op, but a hook in backward.

    Then frozen modules that run before the first trained one have ops in backward.
    """
    trained = {p.name.rpartition(".")[0] for p in trace.parameters if p.trainable}
    calls = [
        trace.modules[s.module]
        for s in trace.spans
        if s.step == backward.step and s.phase is Phase.FORWARD
    ]
    around = {m for name in trained for m in lineage(name)}
    before = calls[: next((i for i, m in enumerate(calls) if m in trained), len(calls))]
    if not any(m in first and m not in around for m in before):
        return []
    embedding = trace.names.index("embedding") if "embedding" in trace.names else -1
    made = np.unique(trace.ops.module[trace.ops.name == embedding]).tolist()
    return [trace.modules[m] for m in made if trace.modules[m] not in {*trained, *first}]
