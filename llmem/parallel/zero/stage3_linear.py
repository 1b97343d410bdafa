"""What ZeRO-3's own linear function keeps that torch's does not.

``LinearFunctionForZeroStage3`` (DeepSpeed 0.19, runtime/zero/linear.py) replaces
``torch.nn.functional.linear``. It saves its input for backward even where the weight is frozen
and torch would not; and it saves after it has computed, so that a recomputation that stops there
has made the layer's output as well.
"""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import TICK, Category, Phase, Touch, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.zero.layout import owners_of
from llmem.parallel.zero.ready import Backward, backwards_of
from llmem.parallel.zero.stage3_hooks import own_ops, regions_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def keep_inputs_of_frozen_linears(editor: Editor, trace: Trace) -> None:
    """Let the inputs of frozen linear layers live until the layer's backward."""
    linears = _Linears(trace)
    death = trace.lifetimes.death.copy()
    start = trace.step_ticks[0]
    for backward in backwards_of(trace):
        own = own_ops(trace, backward)
        users = linears.first_in(own)
        for op in linears.saved(backward, start).tolist():
            until = users.get(int(trace.ops.module[op]))
            weight = linears.weights[int(trace.ops.module[op])]
            if until is None or weight.trainable:
                continue
            tick, row = int(trace.ops.tick[until]), linears.input_row(op)
            if row >= 0 and death[row] <= tick:
                death[row] = tick
                editor.end(row, editor.at(tick))
        start = backward.end


def compute_last_layers_again(editor: Editor, trace: Trace) -> None:
    """The linear layer at which a recomputation stops: its output, its input if it is frozen."""
    linears = _Linears(trace)
    next_tick = np.append(trace.ops.tick[1:], trace.step_ticks[-1])
    for backward in backwards_of(trace):
        own = own_ops(trace, backward)
        for region in regions_of(trace, backward):
            module = region.calls[-1].module
            op = linears.forward_op.get(module)
            if op is None:
                continue
            output, kept = linears.output_bytes(op), None
            if not linears.weights[module].trainable:
                kept = editor.add(
                    linears.input_bytes(op), editor.at(region.end), category=Category.ACTIVATION
                )
            made = editor.add(output, editor.at(region.end), category=Category.ACTIVATION)
            editor.free(made, region.end)
            mine = own[trace.ops.module[own] == module]
            mine = mine[trace.ops.tick[mine] // TICK >= region.end // TICK]
            if kept is not None:
                editor.free(kept, int(next_tick[mine[0]]) if len(mine) else region.end)


class _Linears:
    """The linear layers of a trace: where they multiply, and what goes in and out."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        ids = {name: i for i, name in enumerate(trace.modules)}
        weights = {
            ids[module]: p
            for p in trace.parameters
            if len(p.shape) == 2
            for module in owners_of(trace, p)
            if module in ids
        }
        names = [i for i, name in enumerate(trace.names) if name in PRODUCTS]
        ops = trace.ops
        products = np.flatnonzero(np.isin(ops.module, list(weights)) & np.isin(ops.name, names))
        order = np.argsort(trace.touch_op, kind="stable")
        self._touches = (trace.touch_op[order], trace.touch_row[order], trace.touch_kind[order])
        forward = products[(ops.phase[products] == int(Phase.FORWARD)) | ops.recompute[products]]
        self.weights = weights
        self._transposed = self._products_of_conv1d(forward)
        right = {int(ops.module[op]) for op in forward.tolist() if self._is_linear(op)}
        self.products = products[np.isin(ops.module[products], list(right))]
        self.forward = forward[np.isin(ops.module[forward], list(right))]
        self.forward_op = {int(ops.module[op]): op for op in self.forward.tolist()[::-1]}

    def _rows(self, op: int, kind: Touch) -> list[int]:
        ops, rows, kinds = self._touches
        low, high = np.searchsorted(ops, [op, op + 1])
        weight = self.weights[int(self.trace.ops.module[op])].row
        found = zip(rows[low:high].tolist(), kinds[low:high].tolist(), strict=True)
        return [row for row, touch in found if touch == kind and row != weight]

    def input_row(self, op: int) -> int:
        return max(self._rows(op, Touch.READ), key=self._size, default=-1)

    def _size(self, row: int) -> int:
        return int(self.trace.lifetimes.nbytes[row])

    def input_bytes(self, op: int) -> int:
        row = self.input_row(op)
        return self._size(row) if row >= 0 else 0

    def output_bytes(self, op: int) -> int:
        return max((self._size(row) for row in self._rows(op, Touch.WRITE)), default=0)

    def _is_linear(self, op: int) -> bool:
        """Whether it is ``x @ weight.T``, not ``x @ weight`` (transformers' Conv1D)."""
        out, into = self.weights[int(self.trace.ops.module[op])].shape
        if out == into:
            return self.trace.op_name(op) not in self._transposed
        return self.output_bytes(op) * into == self.input_bytes(op) * out

    def _products_of_conv1d(self, ops: np.ndarray) -> set[str]:
        """Names of the ops that no weight but a square one leaves in doubt, and Conv1D uses."""
        straight: set[str] = set()
        transposed: set[str] = set()
        for op in ops.tolist():
            out, into = self.weights[int(self.trace.ops.module[op])].shape
            if out != into:
                name = self.trace.op_name(op)
                (straight if self._is_linear(op) else transposed).add(name)
        return transposed - straight

    def first_in(self, own: np.ndarray) -> dict[int, int]:
        """Module -> its first product among ``own``."""
        first: dict[int, int] = {}
        for op in own[np.isin(own, self.products)].tolist():
            first.setdefault(int(self.trace.ops.module[op]), op)
        return first

    def saved(self, backward: Backward, start: int) -> np.ndarray:
        """The products whose inputs are saved: those run again in backward, or else in forward."""
        ops, trace = self.forward, self.trace
        ticks, again = trace.ops.tick[ops], trace.ops.recompute[ops]
        inside = (ticks >= backward.start) & (ticks < backward.end) & again
        called = [c.module for r in regions_of(trace, backward) for c in r.calls]
        before = (ticks >= start) & (ticks < backward.start) & ~again
        return ops[inside | (before & ~np.isin(trace.ops.module[ops], called))]
