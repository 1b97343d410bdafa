"""Pipeline stages under FSDP2: what is gathered and reduced when, on a toy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, Category, Trace
from llmem.parallel import RankTable
from llmem.parallel.fsdp.fsdp2_ranks import ranks as fsdp2_ranks
from llmem.parallel.pipeline import ranks as pipeline
from llmem.spec import make_spec
from tests.parallel.test_pipeline import HIDDEN, WEIGHT, toy_trace

SHARD = WEIGHT // 2


def tables(layers: int, micro_batches: int, **fields: Any) -> list[RankTable]:
    """Two pipeline ranks of two replicas each."""
    trace = toy_trace(layers)
    trace = replace(trace, masters={p.key: p.dtype for p in trace.parameters})
    spec = make_spec(
        model="gpt2", gpus=4, pp=2, strategy="fsdp2", micro_batches=micro_batches, gpu="cpu",
        per_device_train_batch_size=micro_batches, **fields,
    )  # fmt: skip
    return pipeline.ranks(trace, spec, fsdp2_ranks)


def rows(table: RankTable, category: Category, nbytes: int) -> list[tuple[int, int | None]]:
    """(birth, death) of the first step's rows of that kind; events numbered from 0."""
    found = table.lifetimes
    place = {tick: number for number, tick in enumerate(sorted(set(found.events().tick.tolist())))}
    mine = (found.category == category) & (found.nbytes == nbytes)
    mine &= found.birth < table.trace.step_ticks[1]
    return [
        (place[int(b)], None if d == NEVER else place[int(d)])
        for b, d in zip(found.birth[mine], found.death[mine], strict=True)
    ]


def ticks_of(trace: Trace, op: str) -> list[int]:
    return [int(t) for o, t in enumerate(trace.ops.tick) if trace.op_name(o) == op]


def test_gathered_once_and_reduced_after_the_last_micro_batch() -> None:
    """1F1B on rank 0: F0 F1 B0 B1, one layer. Numbers are events."""
    first, last = tables(2, 2)
    assert (first.ranks, last.ranks) == ((0, 1), (2, 3))
    assert rows(first, Category.PARAMETER, SHARD) == [(0, None)]
    # Two receive buffers, then the all-gather's output, which waits for the forward's end, and the
    # weight copied out of it, which waits for the reduction; last the reduction's input.
    assert rows(first, Category.COMMUNICATION, WEIGHT) == [(3, 8), (4, 21), (22, 25)]
    assert rows(first, Category.COMMUNICATION, HIDDEN) == [(1, None), (2, None)]
    # B0's gradient is what B1 adds its own to. The reduced one lives until the next step drops it.
    whole = rows(first, Category.GRADIENT, WEIGHT)
    assert whole == [(13, 23), (17, 19)]
    [(born, dropped)] = rows(first, Category.GRADIENT, SHARD)
    assert born == 24 and dropped is not None


@pytest.mark.parametrize(("reshard", "gathers"), [(None, 1), (False, 1), (True, 4)])
def test_forward_frees_what_the_next_backward_gathers_again(
    reshard: bool | None, gathers: int
) -> None:
    """F0 F1 B0 F2 B1 B2: a forward gathers but after B0, which leaves the layer there.

    F0, F1 and B0 gather, F2 finds B0's and frees it, B1 gathers for B2 too.
    """
    fields = {} if reshard is None else {"reshard_after_forward": reshard}
    first, _ = tables(2, 3, **fields)
    end = first.trace.step_ticks[1]
    assert sum(tick < end for tick in ticks_of(first.trace, "all_gather")) == gathers
    assert sum(tick < end for tick in ticks_of(first.trace, "reduce_scatter")) == 1


def test_interleaved_gathers_all_stages_before_the_first_forward() -> None:
    first, _ = tables(4, 4, pp_schedule="interleaved")
    table, end = first.lifetimes, first.trace.step_ticks[1]
    names = [first.trace.op_name(int(op)) for op in table.birth_op]
    gathered = [row for row, name in enumerate(names) if name == "all_gather" and table.birth[row] < end]
    products = sorted(int(table.birth[row]) for row, name in enumerate(names) if name == "mm")
    assert len(gathered) == 2 and max(table.birth[gathered]) < products[0]
    # The first stage's is copied out at once, the second one's after two micro-batches of the first.
    before = [sum(product < table.death[row] for product in products) for row in gathered]
    assert before == [0, 2]


@pytest.mark.parametrize(
    "fields", [{"offload": "all"}, {"fsdp_units": "accelerate"}, {"reshard_after_forward": 2}]
)
def test_what_has_no_sharded_pipeline(fields: dict[str, Any]) -> None:
    with pytest.raises(LlmemError, match="--pp with --strategy fsdp2 takes"):
        tables(2, 2, **fields)
