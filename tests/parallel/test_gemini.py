"""Gemini on the toy (three weights of 36 elements), with a smallest chunk of 50 elements."""

from __future__ import annotations

import numpy as np
import pytest

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, TICK, Category, Lifetimes, Trace
from llmem.parallel.gemini import GeminiPass, compute_dtype, layout_of, ranks
from llmem.spec import make_spec
from tests.parallel.toy import toy_trace

WEIGHT = 36


def played(trace: Trace, world: int, min_chunk: int) -> tuple[Lifetimes, Trace]:
    layout = layout_of(trace.parameters, world, min_chunk=min_chunk)
    return GeminiPass(trace, layout).run().finish()


def alive(table: Lifetimes, trace: Trace, category: Category, op_name: str, nth: int) -> list[int]:
    name = trace.names.index(op_name)
    found = np.flatnonzero((trace.ops.name == name) & (trace.ops.step == 0))
    now = table.alive_at(int(trace.ops.tick[found[nth]]) + TICK) & (table.category == category)
    return sorted(int(n) for n in table.nbytes[now])


def test_chunks_and_slices() -> None:
    layout = layout_of(toy_trace().parameters, 2, min_chunk=50)
    # the search starts at 1024 elements, where all three weights share a chunk of 1024
    assert [(c.elements, c.members) for c in layout.chunks] == [(1024, (0, 1, 2))]
    assert layout.slices(0) == (WEIGHT, WEIGHT, WEIGHT) and layout.slices(1) == ()


def test_gathered_in_forward_until_reduced_in_backward() -> None:
    trace = toy_trace()
    table, named = played(trace, 2, min_chunk=50)
    chunk, shard = 1024 * 2, 512 * 2
    assert table.nbytes[table.birth < TICK].tolist().count(512 * 4) == 1  # the fp32 shard
    for mm in range(7):  # all of forward and backward but the last gradient
        assert alive(table, named, Category.COMMUNICATION, "mm", mm) == [chunk]
        assert shard not in alive(table, named, Category.PARAMETER, "mm", mm)
    assert alive(table, named, Category.COMMUNICATION, "add_", 0) == []
    assert alive(table, named, Category.PARAMETER, "add_", 0) == [shard, 512 * 4]


def test_gradients_do_not_outlive_backward() -> None:
    table, named = played(toy_trace(), 2, min_chunk=50)
    assert alive(table, named, Category.GRADIENT, "add_", 0) == []
    assert not (table.death[table.category == Category.GRADIENT] == NEVER).any()


def test_collectives_flatten_their_lists() -> None:
    table, named = played(toy_trace(), 2, min_chunk=50)
    made = [named.op_name(int(op)) for op in table.birth_op]
    sizes = table.nbytes.tolist()
    gathers = [n for n, name in zip(sizes, made, strict=True) if name == "all_gather"]
    reduces = [n for n, name in zip(sizes, made, strict=True) if name == "reduce_scatter"]
    assert gathers == [2048, 2048] * 2  # per step: the chunk and its flat copy
    assert sorted(reduces) == [1024] * 2 + [2048] * 2


@pytest.mark.parametrize(("world", "min_chunk"), [(1, 50), (4, 1000)])
def test_kept_gathered_on_one_rank_or_below_the_smallest_chunk(world: int, min_chunk: int) -> None:
    trace = toy_trace()
    layout = layout_of(trace.parameters, world, min_chunk=min_chunk)
    assert layout.kept
    assert {layout.slices(rank) for rank in range(world)} == {(WEIGHT, WEIGHT, WEIGHT)}
    _, named = played(trace, world, min_chunk)
    assert not {"all_gather", "reduce_scatter"} & set(named.names)


def test_states_are_slices_of_the_shards() -> None:
    # OPT-125m: chunks of 44,101,632 elements, the search's golden value for one and four ranks
    tables = llmem.estimate(
        model="opt-125m", per_device_train_batch_size=1, seq_length=64, gpus=4, strategy="gemini",
        gradient_checkpointing=True,
    ).ranks  # fmt: skip
    states = sum(
        rank.table.optimizer["state_elements"] * len(rank.table.ranks) for rank in tables
    )
    parameters = tables[0].table.trace.parameters
    assert states == 2 * sum(p.numel for p in parameters)
    chunk = max(int(n) for n in tables[0].table.lifetimes.nbytes) // 2
    assert chunk == 44_101_632


def test_what_gemini_has_not() -> None:
    trace = toy_trace()
    for fields, said in (
        ({"offload": "optimizer"}, "use --placement-policy cpu or auto"),
        ({"placement_policy": "auto"}, "name it with --gpu"),
        ({"gradient_accumulation_steps": 2}, "accumulate"),
        ({"optim": "sgd"}, "HybridAdam alone, not sgd"),
    ):
        with pytest.raises(LlmemError, match=said):
            ranks(trace, make_spec(model="gpt2", gpus=2, strategy="gemini", **fields))
    assert compute_dtype(make_spec(model="gpt2", gpus=2, strategy="gemini", bf16=True)) == "bfloat16"
