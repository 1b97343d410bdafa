"""ZeRO-1 and 2 on two ranks of the toy (three weights of 36 elements, 144 bytes each).

The flat buffer has 108 elements: rank 0 has weight 0 and half of weight 1, rank 1 the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import llmem
from llmem.lifetimes import Category, Lifetimes, Trace
from llmem.parallel import ranks_of
from llmem.parallel.zero.layout import flat_group
from llmem.parallel.zero.ranks import kinds_of_rank
from llmem.spec import make_spec
from tests.parallel.test_zero_layout import parameters
from tests.parallel.toy import toy_trace

WEIGHT, WHOLE, HALF = 144, 3 * 144, 3 * 72
BUCKET = 40 * 4
NEVER = 2**62


def tables(strategy: str, **zero: Any) -> list[tuple[Lifetimes, Trace]]:
    spec = make_spec(
        model="toy", strategy=strategy, gpus=2, gpu="cpu", optim="sgd", max_grad_norm=0,
        deepspeed={"zero_optimization": {"reduce_bucket_size": 40, **zero}},
    )  # fmt: skip
    return [(t.lifetimes, t.trace) for t in ranks_of(toy_trace(), spec)]


def during(table: Lifetimes, trace: Trace, name: str, nth: int = 0) -> list[tuple[str, int]]:
    """What an engine's op named ``name`` finds alive, but parameters and activations."""
    ops = np.flatnonzero(trace.ops.name == trace.names.index(name))
    now = table.alive_at(int(trace.ops.tick[ops[nth]]))
    shown = [Category.GRADIENT, Category.COMMUNICATION, Category.OPTIMIZER_STATE]
    return sorted(
        (Category(int(c)).name.lower(), int(n))
        for c, n in zip(table.category[now], table.nbytes[now], strict=True)
        if c in shown
    )


def test_one_flat_copy_of_parameters_and_a_master() -> None:
    for table, _ in tables("zero2"):
        stays = table.death >= NEVER
        assert table.nbytes[stays & (table.category == Category.PARAMETER)].tolist() == [WHOLE]
        masters = table.category == Category.OPTIMIZER_STATE
        assert table.nbytes[stays & masters].tolist() == [HALF]


def test_bucket_is_opened_by_the_first_gradient_and_closed_by_backward() -> None:
    table, trace = tables("zero2")[0]
    assert during(table, trace, "setup_buckets") == [
        ("gradient", WEIGHT), ("optimizer_state", HALF),
    ]  # fmt: skip
    buffers = np.flatnonzero(table.nbytes == BUCKET)
    assert len(buffers) == 2  # one a step
    assert (table.death[buffers] < NEVER).all()


def test_stage_2_reduces_gradient_by_gradient() -> None:
    table, trace = tables("zero2")[0]
    # weight 2 is rank 1's alone; weight 1 is both ranks', and kept whole; then weight 0
    bucket = ("communication", BUCKET)
    master = ("optimizer_state", HALF)
    assert during(table, trace, "reduce", 0) == [bucket, ("gradient", WEIGHT), master]
    assert during(table, trace, "reduce", 1) == [bucket, ("gradient", WEIGHT), master]
    kept = ("gradient", 2 * WEIGHT)
    assert during(table, trace, "reduce", 2) == [bucket, kept, master]


def test_overlap_has_a_second_bucket() -> None:
    table, trace = tables("zero2", overlap_comm=True)[0]
    assert during(table, trace, "reduce", 0).count(("communication", BUCKET)) == 2


def test_stage_1_reduces_when_backward_is_over() -> None:
    table, trace = tables("zero1")[0]
    seen = during(table, trace, "reduce", 0)
    assert seen.count(("gradient", WEIGHT)) == 2  # weight 0 is in the bucket, 1 and 2 wait
    assert ("communication", BUCKET) in seen


def test_a_gradient_larger_than_the_bucket_stays() -> None:
    table, trace = tables("zero2", reduce_bucket_size=20)[1]
    # weight 2's own gradient is averaged; it lies in one rank's part and needs no flat copy
    assert ("gradient", WEIGHT) in during(table, trace, "reduce", 0)
    assert (table.nbytes == 80).sum() == 2


def test_without_contiguous_gradients_no_bucket() -> None:
    table, trace = tables("zero2", contiguous_gradients=False)[0]
    assert "setup_buckets" not in trace.names
    assert (table.nbytes == BUCKET).sum() == 0


def test_optimizer_runs_on_the_flat_fp32_partition() -> None:
    spec = make_spec(
        model="toy", strategy="zero2", gpus=2, gpu="cpu", optim="adamw_torch", max_grad_norm=0
    )
    [first, second] = ranks_of(toy_trace(), spec)
    assert first.optimizer["state_elements"] == second.optimizer["state_elements"] == 2 * 54 + 1
    table = first.lifetimes
    states = table.nbytes[(table.category == Category.OPTIMIZER_STATE) & (table.death >= NEVER)]
    assert sorted(states.tolist()) == [4, HALF, HALF, HALF]


def test_norm_is_taken_in_fp64() -> None:
    table, trace = tables("zero2")[0]
    copies = np.flatnonzero(trace.ops.name == trace.names.index("_to_copy"))
    made = table.nbytes[np.isin(table.birth_op, copies)]
    assert {36 * 8, 18 * 8} <= set(made.tolist())


def test_offload_leaves_the_flat_copy_and_staging() -> None:
    spec = make_spec(
        model="toy", strategy="zero2", gpus=2, optim="sgd", offload="optimizer",
        deepspeed={"zero_optimization": {"reduce_bucket_size": 40}},
    )  # fmt: skip
    [first, _] = ranks_of(toy_trace(), spec)
    table = first.lifetimes
    stays = table.death >= NEVER
    assert sorted(table.nbytes[stays & (table.category == Category.GRADIENT)].tolist()) == [WEIGHT]
    assert (table.category == Category.OPTIMIZER_STATE).sum() == 0
    assert first.optimizer["state_bytes"] == 0


def test_of_many_ranks_the_fullest_stands_for_all() -> None:
    group = flat_group(parameters(*[5] * 16), 16, 4)
    [members] = kinds_of_rank(group, 16)
    assert sorted(members) == list(range(16))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_every_storage_is_born_before_it_dies(strategy: str) -> None:
    estimate = llmem.estimate(
        model={
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97,
            "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        },
        per_device_train_batch_size=1, seq_length=5, strategy=strategy, gpus=3, bf16=True,
        gradient_accumulation_steps=2, gradient_checkpointing=True,
    )  # fmt: skip
    for rank in estimate.ranks:
        table = rank.table.lifetimes
        assert (table.death > table.birth).all()
        assert sum(rank.breakdown.values()) == rank.peak.allocated
