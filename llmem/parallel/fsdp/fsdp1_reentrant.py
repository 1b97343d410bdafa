"""What FSDP1 keeps alive when reentrant checkpointing runs a frozen unit again inside backward.

``CheckpointFunction.backward`` calls the unit on a detached leaf. A frozen flat parameter has no
gradient to wait for, so FSDP1 hooks the inputs instead (``_register_post_backward_reshard_only_hook``
of torch/distributed/fsdp/_runtime_utils.py): ``register_multi_grad_hook`` holds the leaf's
AccumulateGrad node, which holds the leaf and its gradient, until ``_finalize_params`` removes the hook
after backward. Every frozen block so keeps its input and the gradient of it.
"""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import Category, Phase, Touch, Trace
from llmem.parallel.units import Unit


def leaf_of_recompute(trace: Trace, unit: Unit, step: int, end: int) -> list[int]:
    """Rows of the input of ``unit``'s recomputation and of its gradient, if the trace has them.

    ``end`` is the tick at which the unit's backward is done.
    """
    starts = [
        span.enter
        for span in trace.spans
        if span.phase is Phase.BACKWARD
        and span.step == step
        and trace.modules[span.module] == unit.name
        and span.enter <= end
    ]
    if not starts:
        return []
    table, ops = trace.lifetimes, trace.ops
    start = max(starts)
    inside = (ops.tick >= start - 1) & (ops.tick < end) & ops.recompute
    read = np.isin(trace.touch_op, np.flatnonzero(inside)) & (trace.touch_kind == Touch.READ)
    rows = np.unique(trace.touch_row[read])
    kinds = table.category[rows]
    rows = rows[(table.birth[rows] < start) & (kinds == Category.ACTIVATION)]
    if not len(rows):
        return []
    leaf = int(rows[np.argmax(table.nbytes[rows])])
    after = np.flatnonzero(
        (table.birth >= start) & (table.birth < end) & (table.death > end)
        & (table.nbytes == table.nbytes[leaf]) & (table.category == Category.ACTIVATION_GRADIENT)
    )  # fmt: skip
    return [leaf, *(int(row) for row in after[-1:])]
