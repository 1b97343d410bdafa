"""What the recorder writes down, on steps small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import llmem
from llmem.lifetimes import NEVER, Category, Phase, Touch, Trace
from llmem.timeline import replay

from .net import CLASSES, F32, ROWS, WIDTH, Net, plain, run


def rows(trace: Trace) -> list[tuple[str, str, int, str]]:
    """(op, module, bytes, category) of every storage that an op made, in order of birth."""
    table = trace.lifetimes
    return [
        (
            trace.op_name(int(table.birth_op[row])),
            trace.modules[int(table.module[row])],
            int(table.nbytes[row]),
            Category(int(table.category[row])).name,
        )
        for row in range(len(table))
        if table.birth_op[row] >= 0
    ]


def test_every_storage_of_a_step(net: Net) -> None:
    trace = run(plain, net)
    hidden, logits = ROWS * WIDTH * F32, ROWS * CLASSES * F32
    body, head = WIDTH * WIDTH * F32, WIDTH * CLASSES * F32
    assert rows(trace) == [
        ("empty", "", hidden, "ACTIVATION"),  # the batch
        ("mm", "body", hidden, "ACTIVATION"),
        ("relu", "", hidden, "ACTIVATION"),
        ("mm", "lm_head", logits, "LOGITS_AND_LOSS"),
        ("sum", "", F32, "LOGITS_AND_LOSS"),
        # The seed of backward; sum's gradient is a view of it, [3, 7] with strides of zero.
        ("ones_like", "", F32, "ACTIVATION_GRADIENT"),
        ("mm", "lm_head", head, "GRADIENT"),
        ("mm", "lm_head", hidden, "LOGITS_AND_LOSS"),
        ("threshold_backward", "", hidden, "ACTIVATION_GRADIENT"),
        ("mm", "body", body, "GRADIENT"),
    ]
    existing = trace.lifetimes.take(trace.lifetimes.birth_op < 0)
    assert existing.nbytes.tolist() == [body, head]
    assert set(existing.category) == {Category.PARAMETER}
    assert set(existing.death) == {NEVER}


def test_peak_by_hand(net: Net) -> None:
    trace = run(plain, net)
    hidden, logits = ROWS * WIDTH * F32, ROWS * CLASSES * F32
    weights = (WIDTH * WIDTH + WIDTH * CLASSES) * F32
    # In lm_head's backward: batch, relu's output, the sum and its seed, the head's gradient and
    # the one of its input. Relu works on a copy of body's output, which is gone; logits are too.
    at_head = weights + 2 * hidden + 2 * F32 + WIDTH * CLASSES * F32 + hidden
    # In forward: batch, relu's output, logits and their sum.
    in_forward = weights + 2 * hidden + logits + F32
    # After threshold_backward the head's input gradient goes; body's gradient comes.
    assert int(replay(trace.lifetimes, exact=True).requested.max()) >= max(at_head, in_forward)
    assert peak_op(trace) in ("threshold_backward", "mm")


def peak_op(trace: Trace) -> str:
    timeline = replay(trace.lifetimes, exact=True)
    row = int(timeline.events.row[timeline.peak_index()])
    return trace.op_name(int(trace.lifetimes.birth_op[row]))


def test_phases_and_steps(net: Net) -> None:
    trace = run(plain, net, steps=2, momentum=0.9)
    columns = (trace.ops.step.tolist(), trace.ops.phase.tolist())
    seen = [(step, Phase(phase).name) for step, phase in zip(*columns, strict=True)]
    assert list(dict.fromkeys(seen)) == [
        (0, "FORWARD"), (0, "BACKWARD"), (0, "OPTIMIZER"),
        (1, "FORWARD"), (1, "BACKWARD"), (1, "OPTIMIZER"),
    ]  # fmt: skip
    assert len(trace.step_ticks) == 3
    made = trace.lifetimes.take(trace.lifetimes.birth_op >= 0)
    for birth, op in zip(made.birth.tolist(), made.birth_op.tolist(), strict=True):
        step = int(trace.ops.step[op])
        assert trace.step_ticks[step] < birth < trace.step_ticks[step + 1]
        assert trace.phase_at(birth) == (Phase(int(trace.ops.phase[op])), step)


def test_momentum_is_made_in_the_first_step_and_stays(net: Net) -> None:
    trace = run(plain, net, steps=2, momentum=0.9)
    table = trace.lifetimes
    state = table.take(table.category == Category.OPTIMIZER_STATE)
    assert state.nbytes.tolist() == [100, 140]
    assert set(state.death) == {NEVER}
    assert (state.birth < trace.step_ticks[1]).all()
    assert trace.optimizer == {"name": "SGD", "state_elements": 60, "state_bytes": 240}
    assert sorted(state.key.tolist()) == [0, 1]


def test_gradients_live_until_zero_grad_and_are_ready_in_backward_order(net: Net) -> None:
    trace = run(plain, net, steps=2)
    table = trace.lifetimes
    first = table.take((table.category == Category.GRADIENT) & (table.birth < trace.step_ticks[1]))
    assert (first.death > trace.step_ticks[1]).all()
    keys = {p.name: p.key for p in trace.parameters}
    ready = [trace.gradient_ready[0, keys[name]] for name in ("lm_head.weight", "body.weight")]
    assert ready == sorted(ready)
    births = {int(k): int(b) for k, b in zip(first.key, first.birth, strict=True)}
    assert ready[0] > births[keys["lm_head.weight"]]
    assert ready[1] > births[keys["body.weight"]] > ready[0]


def test_spans_are_module_calls(net: Net) -> None:
    trace = run(plain, net)
    calls = [(trace.modules[s.module], s.phase, s.recompute) for s in trace.spans]
    assert calls == [
        ("", Phase.FORWARD, False),
        ("body", Phase.FORWARD, False),
        ("lm_head", Phase.FORWARD, False),
    ]
    whole, body, head = trace.spans
    assert whole.enter <= body.enter < body.exit <= head.enter < head.exit <= whole.exit


def test_touches_are_reads_and_writes(net: Net) -> None:
    trace = run(plain, net)
    names = {p.name: p.row for p in trace.parameters}
    weight = names["body.weight"]
    mask = trace.touch_row == weight
    touched = zip(trace.touch_op[mask], trace.touch_kind[mask], strict=True)
    found = [(trace.op_name(int(op)), Touch(int(kind))) for op, kind in touched]
    assert found == [("mm", Touch.READ), ("add_", Touch.READ), ("add_", Touch.WRITE)]


def test_views_are_no_ops_and_share_their_storage() -> None:
    x = torch.empty(4, 6, device="meta")
    trace = llmem.trace(lambda: x.view(2, 12).t()[0].add(1), steps=1, gpu="cpu")
    assert [trace.op_name(op) for op in range(len(trace.ops))] == ["add"]
    assert trace.lifetimes.nbytes.tolist() == [2 * F32]


def test_in_place_ops_make_nothing() -> None:
    trace = llmem.trace(lambda: torch.empty(5, device="meta").add_(1).mul_(2), steps=1, gpu="cpu")
    assert [trace.op_name(op) for op in range(len(trace.ops))] == ["empty", "add_", "mul_"]
    assert trace.lifetimes.nbytes.tolist() == [5 * F32]


class Checkpointed(torch.nn.Module):
    """Two blocks that are run again in backward, each with a sum that the sine keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)
        )

    def block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        y = self.layers[index](x)
        return (y.sigmoid() + y.tanh()).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            x = checkpoint(self.block, x, index, use_reentrant=False, preserve_rng_state=False)
        return x.sum()


def test_recomputed_ops_are_marked_and_stay_out_of_place() -> None:
    """A sum in recomputed forward code is no accumulation of gradients: it makes a tensor."""
    with torch.device("meta"):
        model = Checkpointed()
    trace = run(plain, model)
    names = [trace.op_name(op) for op in range(len(trace.ops)) if trace.ops.recompute[op]]
    # Recomputation stops once the sine has its input back.
    assert names == ["mm", "sigmoid", "tanh", "add"] * 2
    table = trace.lifetimes
    born = [op for op in table.birth_op.tolist() if op >= 0 and trace.ops.recompute[op]]
    assert [trace.op_name(op) for op in born] == names
    recomputed = table.take([op in born for op in table.birth_op.tolist()])
    assert set(recomputed.category) == {Category.ACTIVATION}
    # The gradients of y, though, meet in backward: autograd adds one into the other.
    in_backward = (trace.ops.phase == Phase.BACKWARD) & ~trace.ops.recompute
    sums = [op for op in np.flatnonzero(in_backward) if trace.op_name(int(op)) == "add"]
    assert len(sums) == 2
    assert not set(sums) & set(table.birth_op.tolist())


def test_storage_dies_with_its_last_reference() -> None:
    def step() -> None:
        a = torch.empty(2, device="meta")
        b = a + 1
        del a
        b + 1

    trace = llmem.trace(step, steps=1, gpu="cpu")
    table = trace.lifetimes
    moves = [(int(s), int(r)) for s, r in zip(table.events().sign, table.events().row, strict=True)]
    assert moves == [(1, 0), (1, 1), (-1, 0), (1, 2), (-1, 2), (-1, 1)]
    assert [trace.op_name(int(op)) for op in table.death_op] == ["add", "add", "add"]
