"""Gemini's placements on the host: the toy's three weights of 36 elements, a chunk each, two ranks.

A 16-bit chunk has 72 bytes, its shard 36, the shard of its master 72.
"""

from __future__ import annotations

import pytest

from llmem.baselines.gemini_chunks import Chunk
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, Category, Lifetimes, Phase, Trace
from llmem.parallel.gemini import Layout, placement_of
from llmem.parallel.gemini_placement import (
    Budget,
    HostPlacement,
    Use,
    auto_budget,
    host_bytes,
    slices_on_gpu,
    uses_of,
)
from llmem.spec import make_spec
from tests.parallel.test_gemini import WEIGHT, alive
from tests.parallel.toy import toy_trace

CHUNK, SHARD, MASTER = 72, 36, 72


def layout(trace: Trace, gathered: frozenset[int] = frozenset()) -> Layout:
    chunks = tuple(Chunk(WEIGHT, (index,), WEIGHT) for index in range(3))
    return Layout(tuple(trace.parameters), chunks, 2, gathered)


def played(budget: Budget | None = None) -> tuple[Lifetimes, Trace]:
    trace = toy_trace()
    return HostPlacement(trace, layout(trace), budget=budget).run().finish()


def test_ops_with_parameters() -> None:
    trace = toy_trace()
    uses = [use for use in uses_of(trace, layout(trace)) if use.step == 0]
    assert [use.chunks for use in uses] == [(0,), (1,), (2,), (2,), (1,), (0,)]
    assert [use.number for use in uses] == [0, 1, 2, 3, 4, 5]


def test_on_the_host_only_the_chunk_of_the_op_is_there() -> None:
    table, named = played()
    for mm in range(8):
        assert alive(table, named, Category.COMMUNICATION, "mm", mm) == [CHUNK]
    assert alive(table, named, Category.COMMUNICATION, "add_", 0) == []
    assert not (table.category == Category.PARAMETER)[table.death == NEVER].any()


def test_what_an_eviction_and_a_return_allocate() -> None:
    table, named = played()
    made = table.take(table.category == Category.COMMUNICATION)
    starts = [0, named.step_ticks[1]]
    ends = [tick for tick, phase, _ in named.phase_ticks if phase is Phase.BACKWARD]
    first, second = (
        made.nbytes[(made.birth >= start) & (made.birth < end)].tolist()
        for start, end in zip(starts, ends, strict=True)
    )
    # in: shard, chunk, and the collective's flat copy; out: shard
    come, go = [SHARD, CHUNK, CHUNK], [SHARD]
    assert first == [*come, *go, *come, *go, *come]
    # after an optimizer step the master's shard comes and is cast
    assert second == [MASTER, *come, *go, MASTER, *come, *go, MASTER, *come]


def test_auto_evicts_what_the_op_lacks() -> None:
    table, named = played(lambda use: 2 * CHUNK)
    assert alive(table, named, Category.COMMUNICATION, "mm", 1) == [CHUNK] * 2
    assert alive(table, named, Category.COMMUNICATION, "mm", 2) == [CHUNK] * 2
    table, named = played(lambda use: 3 * CHUNK)
    assert alive(table, named, Category.COMMUNICATION, "mm", 2) == [CHUNK] * 3


def test_later_steps_evict_the_chunk_whose_next_use_is_farthest() -> None:
    trace = toy_trace()
    placement = HostPlacement(trace, layout(trace), budget=lambda use: 2 * CHUNK)
    placement.run()
    placement._held = {1: 0, 2: 0}
    assert placement._evicted(Use(0, 0, 0, (0,)), CHUNK) == [1]  # by number
    assert placement._evicted(Use(0, 1, 0, (0,)), CHUNK) == [2]  # 1 comes sooner
    placement._ready = {2: 1}  # holds a gradient
    assert placement._evicted(Use(0, 1, 0, (0,)), CHUNK) == [1]


def test_auto_without_room_fails_as_gemini_does() -> None:
    with pytest.raises(LlmemError, match="placement auto fails in step 1"):
        played(lambda use: CHUNK - 1)


def test_the_budget_is_what_the_first_step_left() -> None:
    trace = toy_trace()
    capacity = 10**6
    budget = auto_budget(trace, layout(trace), capacity)
    assert budget(Use(0, 0, 3, (0,))) == pytest.approx(0.2 * capacity)
    # the first mm: what it makes (a block of 512 bytes), cuBLAS's workspace of 8,519,680, and the chunk's
    # block, of which 72 bytes are the chunk
    left = 0.9 * capacity - budget(Use(0, 1, 0, (0,)))
    assert left == pytest.approx(8_519_680 + 2 * 512 - CHUNK)


def test_chunks_that_stay_gathered_have_their_states_there() -> None:
    trace = toy_trace()
    mixed = layout(trace, frozenset({1}))
    assert slices_on_gpu(mixed) == (WEIGHT,)
    # fp32 master, 16-bit gradient and two states of two chunks' halves
    assert host_bytes(mixed) == 2 * (WEIGHT // 2) * (4 + 2 + 8)
    table, _ = HostPlacement(trace, mixed).run().finish()
    kept = table.nbytes[(table.category == Category.PARAMETER) & (table.death == NEVER)]
    assert sorted(kept.tolist()) == [2 * WEIGHT, 4 * WEIGHT]


def test_by_the_options() -> None:
    common = {"model": "gpt2", "gpus": 2, "strategy": "gemini"}
    assert placement_of(make_spec(**common)) == "cuda"
    assert placement_of(make_spec(**common, offload="all")) == "cpu"
    assert placement_of(make_spec(**common, offload="all", placement_policy="auto")) == "auto"


def test_a_large_gpu_keeps_under_auto_what_cuda_keeps() -> None:
    done = {
        policy: estimate(
            model="opt-125m", per_device_train_batch_size=1, seq_length=64, gpus=4, strategy="gemini",
            placement_policy=policy, gpu="a100-40gb",
        )
        for policy in ("cuda", "cpu", "auto")
    }  # fmt: skip
    parts = {policy: run.worst.breakdown for policy, run in done.items()}
    assert parts["cpu"]["optimizer_states"] == parts["auto"]["optimizer_states"] == 0
    assert parts["auto"]["communication"] >= parts["cpu"]["communication"]
    peaks = {policy: run.worst.peak.allocated for policy, run in done.items()}
    assert peaks["cpu"] < peaks["auto"] < peaks["cuda"]
    [note] = [line for line in done["auto"].assumptions if "host memory" in line]
    assert "first step" in note
