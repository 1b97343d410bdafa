"""What the forms of checkpointing keep and compute again."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

import llmem
from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from experiments.real_cpu.optimizers import ONE_EACH, spec_of
from llmem.errors import LlmemError
from llmem.lifetimes import Phase, Trace

LAYERS, WIDTH, BATCH, TOKENS = 6, 48, 2, 64
MODEL = {**MODELS["llama"], "num_hidden_layers": LAYERS}
HIDDEN = BATCH * TOKENS * WIDTH * 2
"""Bytes of a layer's input in bf16."""


@cache
def traced(**fields: Any) -> Trace:
    return llmem.trace(
        MODEL, per_device_train_batch_size=BATCH, seq_length=TOKENS, gpu="a100-80gb", steps=1,
        optim="sgd", param_dtype="bf16", **fields,
    )  # fmt: skip


def checkpointed(**fields: Any) -> Trace:
    return traced(gradient_checkpointing=True, **fields)


def layers_again(trace: Trace) -> set[int]:
    """Numbers of the layers that backward computes again."""
    again = {trace.modules[trace.ops.module[op]] for op in trace.ops.recompute.nonzero()[0]}
    return {int(name.split(".")[2]) for name in again if name.startswith("model.layers.")}


def again(trace: Trace) -> Counter[str]:
    """Ops that backward computes again, by name."""
    return Counter(trace.op_name(int(op)) for op in trace.ops.recompute.nonzero()[0])


def kept(trace: Trace) -> int:
    """Bytes that forward leaves for backward."""
    start = next(tick for tick, phase, _ in trace.phase_ticks if phase is Phase.BACKWARD)
    table = trace.lifetimes
    mine = (table.birth > trace.step_ticks[0]) & table.alive_at(start)
    return int(table.nbytes[mine].sum())


def test_full_computes_every_layer_again() -> None:
    assert layers_again(checkpointed()) == set(range(LAYERS))


@pytest.mark.parametrize(("every", "layers"), [(2, {0, 2, 4}), (3, {0, 3}), (7, {0})])
def test_every_nth_layer_counts_from_the_first(every: int, layers: set[int]) -> None:
    assert layers_again(checkpointed(checkpoint_every=every)) == layers


def test_each_layer_left_out_keeps_the_same_more() -> None:
    full, second, none = (
        kept(trace) for trace in (checkpointed(), checkpointed(checkpoint_every=2), traced())
    )
    assert none - full > LAYERS * HIDDEN
    statistic = BATCH * TOKENS * 4  # one norm's, whose input a checkpoint keeps anyway
    assert 2 * (second - full) == pytest.approx(none - full, abs=2 * statistic)


def test_by_op_computes_attention_never_and_every_second_matmul_again() -> None:
    """A layer has seven: q, k, v, o, gate, up, down; the second, fourth and sixth are repeated.

    Recomputation ends with what backward needs first, the input of the last matmul.
    """
    full, selective = again(checkpointed()), again(checkpointed(checkpoint_policy="op"))
    assert full["mm"] == 6 * LAYERS  # all but down
    assert selective["mm"] == 3 * LAYERS
    attention = [op for op in full if "scaled_dot_product" in op]
    assert sum(full[op] for op in attention) == LAYERS
    assert not any("scaled_dot_product" in op for op in selective)


def test_by_op_keeps_the_outputs_of_four_matmuls_and_of_attention() -> None:
    q, v, gate, down = 48, 16, 104, 48  # the first, third, fifth and seventh
    heads = 6
    more = kept(checkpointed(checkpoint_policy="op")) - kept(checkpointed())
    outputs = 2 * (q + v + gate + down)
    attention = 2 * 48 + 4 * heads  # output, fp32 log-sum-exp
    state = 16 + 8  # of the dropout's random numbers, though there is no dropout
    assert more == LAYERS * (BATCH * TOKENS * (outputs + attention) + state)


def test_offload_leaves_one_layer_s_input_on_the_gpu() -> None:
    plain, offloaded = kept(checkpointed()), kept(checkpointed(activation_offload=True))
    # The last layer's input dies like the others'; what stays is the norm's and the head's.
    assert plain - offloaded >= LAYERS * HIDDEN


def test_offloaded_inputs_come_back_one_by_one() -> None:
    trace = checkpointed(activation_offload=True)
    table = trace.lifetimes
    start = next(tick for tick, phase, _ in trace.phase_ticks if phase is Phase.BACKWARD)
    back = table.take(
        (table.birth > start) & (table.nbytes == HIDDEN)
        & [trace.op_name(int(op)) == "empty" for op in table.birth_op]
    )  # fmt: skip
    assert len(back) == LAYERS
    assert max(int(back.alive_at(tick).sum()) for tick in back.birth) == 1


def test_reentrant_runs_forward_without_a_graph() -> None:
    reentrant, other = checkpointed(use_reentrant=True), checkpointed()
    assert "use_reentrant True (as asked)" in "".join(reentrant.assumptions)
    assert again(reentrant)["mm"] == 7 * LAYERS  # nothing stops it early
    assert again(other)["mm"] == 6 * LAYERS


def test_contradictions_are_one_sentence() -> None:
    for fields, said in (
        ({"checkpoint_every": 2}, "--checkpoint-every says how to checkpoint"),
        ({"activation_offload": True}, "add --gradient-checkpointing"),
        (
            {"gradient_checkpointing": True, "checkpoint_policy": "op", "use_reentrant": True},
            "add --no-use-reentrant",
        ),
        (
            {"gradient_checkpointing": True, "use_reentrant": True, "strategy": "fsdp", "gpus": 2},
            "leave out --use-reentrant",
        ),
    ):
        with pytest.raises(LlmemError, match=said):
            llmem.estimate(model=MODEL, seq_length=16, **fields)


CASES = ("op", "every 2nd", "reentrant")


@pytest.mark.parametrize(("model", "case"), [each for each in ONE_EACH if each[1] in CASES])
def test_recomputation_is_that_of_a_real_run(model: str, case: str) -> None:
    found = against_recorder(spec_of(model, case))
    assert found.real == found.predicted
    assert found.difference == ""
