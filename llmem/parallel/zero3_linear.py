"""What ZeRO-3's own linear function keeps that torch's does not.

``LinearFunctionForZeroStage3`` (DeepSpeed 0.19, runtime/zero/linear.py) replaces
``torch.nn.functional.linear``. It saves its input for backward even where the weight is frozen
and torch would not; and it saves after it has computed, so that a recomputation that stops there
has made the layer's output as well.
"""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import Category, Parameter, Phase, Touch, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.zero3_hooks import own_ops, regions_of
from llmem.parallel.zero_layout import owners_of
from llmem.parallel.zero_ready import Backward, backwards_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def keep_inputs_of_frozen_linears(editor: Editor, trace: Trace) -> None:
    """Let the inputs of frozen linear layers live until the layer's backward."""
    frozen = [p for p in trace.parameters if not p.trainable and len(p.shape) == 2]
    modules = {m for p in frozen for m in owners_of(trace, p)}
    ids = [i for i, name in enumerate(trace.modules) if name in modules]
    names = [i for i, name in enumerate(trace.names) if name in PRODUCTS]
    products = np.flatnonzero(np.isin(trace.ops.module, ids) & np.isin(trace.ops.name, names))
    if not len(products):
        return
    weights = {p.row for p in trace.parameters}
    death = trace.lifetimes.death.copy()
    start = trace.step_ticks[0]
    for backward in backwards_of(trace):
        own = own_ops(trace, backward)
        users = _first_by_module(trace, own[np.isin(own, products)])
        for op in _forward_products(trace, products, backward, start).tolist():
            until = users.get(int(trace.ops.module[op]))
            if until is None:
                continue
            tick = int(trace.ops.tick[until])
            mask = (trace.touch_op == op) & (trace.touch_kind == Touch.READ)
            for row in trace.touch_row[mask].tolist():
                if row not in weights and death[row] <= tick:
                    death[row] = tick
                    editor.end(row, editor.at(tick))
        start = backward.end


def compute_last_outputs_again(editor: Editor, trace: Trace) -> None:
    """Add the output of the linear layer at which each recomputation stops."""
    weights = {m: p for p in trace.parameters if len(p.shape) == 2 for m in owners_of(trace, p)}
    products = np.isin(trace.ops.name, [i for i, n in enumerate(trace.names) if n in PRODUCTS])
    forward = np.flatnonzero(products & (trace.ops.phase == int(Phase.FORWARD)))
    for backward in backwards_of(trace):
        for region in regions_of(trace, backward):
            module = region.calls[-1].module
            weight = weights.get(trace.modules[module])
            ops = forward[trace.ops.module[forward] == module]
            if weight is None or not len(ops):
                continue
            nbytes = _output_bytes(trace, int(ops[0]), weight)
            if nbytes:
                editor.free(
                    editor.add(nbytes, editor.at(region.end), category=Category.ACTIVATION),
                    region.end,
                )


def _output_bytes(trace: Trace, op: int, weight: Parameter) -> int:
    """Bytes of ``x @ weight.T``; 0 if the weight was used the other way round (Conv1D)."""
    mask = trace.touch_op == op
    sizes = [
        int(trace.lifetimes.nbytes[row])
        for row in trace.touch_row[mask].tolist()
        if row != weight.row
    ]
    out, into = weight.shape
    fits = len(sizes) >= 2 and sizes[-1] * into == sizes[-2] * out
    return sizes[-1] if fits else 0


def _first_by_module(trace: Trace, ops: np.ndarray) -> dict[int, int]:
    first: dict[int, int] = {}
    for op in ops.tolist():
        first.setdefault(int(trace.ops.module[op]), op)
    return first


def _forward_products(
    trace: Trace, products: np.ndarray, backward: Backward, start: int
) -> np.ndarray:
    """The products whose inputs are saved: those run again in backward, or else in forward."""
    ticks, ops = trace.ops.tick[products], trace.ops
    again = products[(ticks >= backward.start) & (ticks < backward.end) & ops.recompute[products]]
    forward = products[
        (ticks >= start) & (ticks < backward.start) & (ops.phase[products] == int(Phase.FORWARD))
    ]
    recomputed = np.isin(ops.module[forward], ops.module[again])
    return np.concatenate([forward[~recomputed], again])
