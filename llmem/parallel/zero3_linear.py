"""What ZeRO-3's own linear function keeps that torch's does not.

``LinearFunctionForZeroStage3`` (DeepSpeed 0.19, runtime/zero/linear.py) replaces
``torch.nn.functional.linear``. It saves its input for backward even where the weight is frozen
and torch would not.
"""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import Phase, Touch, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.zero3_hooks import own_ops
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
