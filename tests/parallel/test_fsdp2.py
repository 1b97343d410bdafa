"""FSDP2 on two ranks of the toy, every buffer written down (weights: 3 x 6 x 6 x 4 = 144 bytes)."""

from __future__ import annotations

import numpy as np
import pytest

from llmem.errors import LlmemError
from llmem.lifetimes import TICK, Category, Lifetimes, Trace
from llmem.parallel.fsdp2 import Fsdp2Options, Fsdp2Pass
from llmem.parallel.fsdp2_ranks import kinds_of_rank, options_of
from llmem.parallel.units import units_of
from llmem.spec import make_spec
from tests.parallel.toy import collectives, toy_trace

WEIGHT = 144
SHARD = WEIGHT // 2


def sharded(trace: Trace, **options: object) -> tuple[Lifetimes, Trace]:
    fsdp = Fsdp2Options(shard_size=2, **options)  # type: ignore[arg-type]
    return Fsdp2Pass(trace, units_of(trace, trace.wrapped), trace.masters, fsdp).run().finish()


def alive(table: Lifetimes, trace: Trace, category: Category, op_name: str, nth: int) -> list[int]:
    """Sizes of a category alive when the nth op of that name in step 0 has made its output."""
    name = trace.names.index(op_name)
    found = np.flatnonzero((trace.ops.name == name) & (trace.ops.step == 0))
    now = table.alive_at(int(trace.ops.tick[found[nth]]) + TICK) & (table.category == category)
    return sorted(int(n) for n in table.nbytes[now])


def test_parameters_are_shards() -> None:
    table, _ = sharded(toy_trace())
    assert table.nbytes[table.category == Category.PARAMETER].tolist() == [SHARD] * 3


def test_gathered_while_each_block_runs() -> None:
    table, trace = sharded(toy_trace())
    # mm of the blocks in forward: the root's copy, the block's copy, the block's gather output
    for forward_mm in (1, 2):
        assert alive(table, trace, Category.COMMUNICATION, "mm", forward_mm) == [WEIGHT] * 3
    # block 1 in backward: root, block 1, and block 0's gather output, prefetched
    assert alive(table, trace, Category.COMMUNICATION, "mm", 3) == [WEIGHT] * 3
    # block 0 in backward: root, block 0, block 1's reduce-scatter input
    assert alive(table, trace, Category.COMMUNICATION, "mm", 5) == [WEIGHT] * 3
    # the embedding's gradient: root, and block 0's reduce-scatter input
    assert alive(table, trace, Category.COMMUNICATION, "mm", 7) == [WEIGHT] * 2


def test_nothing_gathered_survives_backward() -> None:
    table, trace = sharded(toy_trace())
    assert alive(table, trace, Category.COMMUNICATION, "add_", 0) == []
    assert alive(table, trace, Category.GRADIENT, "add_", 0) == [SHARD] * 3


def test_gathers_and_reduces_by_unit() -> None:
    _, trace = sharded(toy_trace())
    assert collectives(trace) == [
        ("all_gather", ""),
        ("all_gather", "blocks.0"),
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.0"),
        ("reduce_scatter", "blocks.1"),
        ("reduce_scatter", "blocks.0"),
        ("reduce_scatter", ""),
    ]


def test_without_resharding_backward_gathers_nothing() -> None:
    _, trace = sharded(toy_trace(), reshard=False)
    gathers = [op for op in range(len(trace.ops)) if trace.op_name(op) == "all_gather"]
    assert [int(trace.ops.step[op]) for op in gathers] == [0, 0, 0, 1, 1, 1]


def test_mixed_precision_sizes() -> None:
    trace = toy_trace()
    trace.masters = dict.fromkeys(trace.masters, "float32")
    table, named = sharded(trace, param_dtype="bfloat16", reduce_dtype="float32")
    # gathered copies in bf16, the flat input of the cast freed at once
    assert alive(table, named, Category.COMMUNICATION, "mm", 1) == [WEIGHT // 2] * 3
    # reduce-scatter inputs in fp32, gradients stay fp32 shards
    assert alive(table, named, Category.COMMUNICATION, "mm", 7) == [WEIGHT // 2, WEIGHT]
    assert alive(table, named, Category.GRADIENT, "add_", 0) == [SHARD] * 3


def test_ranks_with_equal_shapes_are_one_kind() -> None:
    trace = toy_trace()
    assert kinds_of_rank(trace, 2, 4) == [(0, 1, 2, 3)]
    # six rows over four ranks: 2, 2, 2, 0
    assert kinds_of_rank(trace, 4, 4) == [(0, 1, 2), (3,)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hybrid_shard": 3}, "does not divide"),
        ({"reshard_after_forward": 3}, "must be a divisor"),
        ({"offload": "all"}, "not supported"),
    ],
)
def test_impossible_options(fields: dict[str, object], said: str) -> None:
    spec = make_spec(model="gpt2", gpus=8, strategy="fsdp2", **fields)
    with pytest.raises(LlmemError, match=said):
        options_of(spec)
