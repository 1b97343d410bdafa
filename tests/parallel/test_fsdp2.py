"""FSDP2 on two ranks of the toy, every buffer written down (weights: 3 x 6 x 6 x 4 = 144 bytes)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmem.cli import main
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import TICK, Category, Lifetimes, Trace
from llmem.parallel.fsdp.fsdp2 import ALL_REDUCE_STREAM, COPY_IN_STREAM, Fsdp2Pass
from llmem.parallel.fsdp.fsdp2_ranks import kinds_of_rank, options_of
from llmem.parallel.fsdp.fsdp2_shards import Fsdp2Options
from llmem.parallel.units import units_of
from llmem.spec import make_spec
from tests.parallel.toy import collectives, toy_trace

WEIGHT = 144
SHARD = WEIGHT // 2


def sharded(trace: Trace, **options: object) -> tuple[Lifetimes, Trace]:
    fsdp = Fsdp2Options(**{"shard_size": 2, **options})  # type: ignore[arg-type]
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


def in_bf16() -> Trace:
    """The toy computed in bf16, its masters in fp32: a weight is 72 bytes, its shard 72 in fp32."""
    trace = toy_trace(dtype=torch.bfloat16)
    trace.masters = dict.fromkeys(trace.masters, "float32")
    return trace


def test_replicas_hold_what_they_all_reduced_until_backward_ends() -> None:
    low = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    table, named = sharded(in_bf16(), replicas=2, **low)
    # embedding's gradient: root gathered (72), block 0's reduce-scatter input (72), and the 16-bit
    # outputs of both blocks (36 each), which alone would be gone with their casts
    held = [WEIGHT // 4] * 2 + [WEIGHT // 2] * 2
    assert alive(table, named, Category.COMMUNICATION, "mm", 7) == held
    assert alive(table, named, Category.COMMUNICATION, "add_", 0) == []
    alone, named = sharded(in_bf16(), **low)
    assert alive(alone, named, Category.COMMUNICATION, "mm", 7) == held[2:]
    casts = table.nbytes[table.stream == ALL_REDUCE_STREAM]
    assert casts.tolist() == [SHARD] * 6  # three units, two steps


def test_a_part_of_each_block_stays_for_backward() -> None:
    table, named = sharded(toy_trace(), reshard=2)
    # block 1 in forward: root, block 1 and its gather output, and half of block 0
    assert alive(table, named, Category.COMMUNICATION, "mm", 2) == [SHARD, *[WEIGHT] * 3]
    # block 0 in backward: root, block 0, block 1's reduce-scatter input, no half any more
    assert alive(table, named, Category.COMMUNICATION, "mm", 5) == [WEIGHT] * 3


def test_a_rank_alone_copies_instead_of_gathering() -> None:
    table, named = sharded(in_bf16(), shard_size=1, replicas=2, param_dtype="bfloat16")
    assert collectives(named)[0][0] == "reduce_scatter"
    # blocks in forward: the root's cast copy, the block's, nothing held from a gather
    assert alive(table, named, Category.COMMUNICATION, "mm", 2) == [WEIGHT // 2] * 2


def test_frozen_parameters_of_the_computed_dtype_need_no_cast() -> None:
    trace = toy_trace(dtype=torch.bfloat16)
    with_cast, _ = sharded(in_bf16(), param_dtype="bfloat16")
    without, _ = sharded(trace, param_dtype="bfloat16")
    flat = WEIGHT // 4  # half a weight in bf16
    copies = [int(((t.stream == COPY_IN_STREAM) & (t.nbytes == flat)).sum()) for t in (with_cast, without)]
    assert copies == [10, 0]  # 3 in forward and 2 in backward, in each of two steps


def test_offloaded_shards_are_copied_cast_and_gathered() -> None:
    table, named = sharded(in_bf16(), param_dtype="bfloat16", offload=True)
    assert not np.isin(table.category, [Category.PARAMETER]).any()
    gather = next(op for op in range(len(named.ops)) if named.op_name(op) == "all_gather")
    mine = table.take((table.birth_op == gather) & (table.stream == COPY_IN_STREAM))
    # the shard in fp32, the same in bf16, and what is gathered
    assert mine.nbytes.tolist() == [SHARD, SHARD // 2, WEIGHT // 2]
    assert mine.death[0] < mine.birth[2] < mine.death[1]
    # no gradient is left on the GPU when the optimizer would run
    assert alive(table, named, Category.GRADIENT, "add_", 0) == []


def test_host_memory_is_told() -> None:
    done = estimate(
        model="gpt2", gpus=2, strategy="fsdp2", offload="all", seq_length=8, gpu="cpu",
        param_dtype="fp32", per_device_train_batch_size=1,
    )  # fmt: skip
    # GPT-2's 124,439,808 parameters; 50,257 and 3 odd rows are padded; two Adam states
    [note] = [line for line in done.assumptions if "host memory" in line]
    assert "parameters 237.4 and gradients 237.4 (pinned), optimizer states 474.7" in note
    assert done.worst.breakdown["optimizer_states"] == 0 == done.worst.breakdown["parameters"]


def test_ranks_with_equal_shapes_are_one_kind() -> None:
    trace = toy_trace()
    assert kinds_of_rank(trace, Fsdp2Options(2), 4) == [(0, 1, 2, 3)]
    # six rows over four ranks: 2, 2, 2, 0
    assert kinds_of_rank(trace, Fsdp2Options(4), 4) == [(0, 1, 2), (3,)]


def test_copies_of_the_parameters_by_any_name() -> None:
    spec = make_spec(model="gpt2", gpus=8, strategy="fsdp2", dp_replicate_size=2)
    assert (options_of(spec).shard_size, options_of(spec).replicas) == (4, 2)
    for names in (["--dp-replicate-size", "2"], ["--data-parallel-shard-degree", "4"]):
        command = ["estimate", "gpt2", "--gpus", "8", "-s", "16", "-b", "1", "--strategy", "fsdp2"]
        done = CliRunner().invoke(main, [*command, *names, "--json", "-"])
        assert done.exit_code == 0, done.output
        assert "4 ranks share a copy, 2 copies" in done.output


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp_replicate_size": 3}, "does not divide 8"),
        ({"dp_replicate_size": 2, "hybrid_shard": 2}, "are not 8 data-parallel"),
        ({"dp_replicate_size": 2, "strategy": "zero3"}, "is HSDP's"),
    ],
)
def test_impossible_meshes(fields: dict[str, object], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        make_spec(**{"model": "gpt2", "gpus": 8, "strategy": "fsdp2", **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hybrid_shard": 3}, "does not divide"),
        ({"reshard_after_forward": 3}, "must be a divisor"),
        ({"offload": "optimizer"}, "use --offload all"),
    ],
)
def test_impossible_options(fields: dict[str, object], said: str) -> None:
    spec = make_spec(model="gpt2", gpus=8, strategy="fsdp2", **fields)
    with pytest.raises(LlmemError, match=said):
        options_of(spec)
