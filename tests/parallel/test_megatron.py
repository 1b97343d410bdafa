"""Megatron-LM's gradient buffer and mixed-precision optimizer, byte by byte; its GPT as published."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, Category, Phase
from llmem.measure.published.grading import Predictor
from llmem.measure.published.many import public
from llmem.measure.published.megatron import rank_of
from llmem.measure.published.megatron_gpt import GPT, Size, builder
from llmem.parallel.megatron_layout import lay_out
from llmem.spec import RunSpec, make_spec

DATA = Path(__file__).parents[2] / "experiments" / "public_runs" / "data"
SMALL = Size(layers=2, hidden=32, heads=4, words=100, positions=16)
BATCH, TOKENS = 2, 16
HALF, FULL = 2, 4


def spec_of(dtype: torch.dtype = torch.float16, **fields: Any) -> RunSpec:
    return make_spec(**{
        "model": builder(SMALL, dtype), "per_device_train_batch_size": BATCH, "seq_length": TOKENS,
        "gpus": 2, "strategy": "megatron", "gpu": "cpu", **fields,
    })  # fmt: skip


def numel(degree: int = 1) -> int:
    """Parameters of a rank, by hand: vocabularies are padded to 128 words per rank."""
    h = SMALL.hidden
    layer = (12 * h * h + 7 * h) // degree + 6 * h  # columns' biases are split, rows' are not
    return 128 * h + SMALL.positions * h + SMALL.layers * layer + 2 * h


@pytest.mark.parametrize(("dtype", "grad"), [(torch.float16, HALF), (torch.bfloat16, FULL)])
def test_every_buffer_of_the_optimizer(dtype: torch.dtype, grad: int) -> None:
    found = estimate(spec_of(dtype))
    [rank] = found.ranks
    assert rank.table.ranks == (0, 1)
    table, trace, n = rank.table.lifetimes, rank.table.trace, numel()
    assert sum(p.numel for p in trace.parameters) == n

    def held(category: Category, tick: int) -> int:
        return int(table.nbytes[table.alive_at(tick) & (table.category == category)].sum())

    starts = trace.step_ticks
    second = starts[1] - 1
    assert held(Category.PARAMETER, second) == (HALF + FULL) * n  # and their masters
    assert held(Category.OPTIMIZER_STATE, starts[0]) == 0
    assert held(Category.OPTIMIZER_STATE, second) == 2 * FULL * n
    # The buffer, and main gradients of their own unless it is fp32, until the next step begins.
    main = FULL * n if grad == HALF else 0
    assert held(Category.GRADIENT, starts[0]) == grad * n
    assert held(Category.GRADIENT, second) == grad * n + main
    assert held(Category.GRADIENT, starts[1] + len(trace.parameters) + 1) == grad * n
    assert found.optimizer["state_bytes"] == 2 * FULL * n


def test_a_gradient_goes_into_the_buffer_as_soon_as_it_is_there() -> None:
    """Of weights of linear layers there is none at all; norms and biases have a moment's."""
    for accumulation in (1, 2):
        table = estimate(spec_of(gradient_accumulation_steps=accumulation)).worst.table.lifetimes
        recorded = (table.category == Category.GRADIENT) & (table.key >= 0)
        assert not (table.death[recorded] == NEVER).any()
        widest = int(table.nbytes[recorded].max())
        assert widest == 128 * SMALL.hidden * HALF  # the embedding's
        alive = [int(table.nbytes[recorded] @ table.alive_at(int(t))[recorded].astype(np.int64))
                 for t in table.birth[recorded]]  # fmt: skip
        assert max(alive) <= widest + 64 * SMALL.hidden * HALF


@pytest.mark.parametrize("sp", [False, True])
def test_a_rank_of_the_split_model(sp: bool) -> None:
    found = estimate(spec_of(gpus=2, tp=2, tp_plan="megatron", sp=sp))
    assert [rank.table.ranks for rank in found.ranks] == [(0, 1)]
    assert sum(p.numel for p in found.trace.parameters) == numel(2)
    # The attention scores' buffer is larger than any gathered input, so it serves both.
    table = found.trace.lifetimes
    made = [found.trace.op_name(int(op)) == "global_memory_buffer" for op in table.birth_op]
    scores = BATCH * SMALL.heads // 2 * TOKENS * TOKENS * HALF
    gathered = BATCH * TOKENS * SMALL.hidden * HALF
    assert max(table.nbytes[made]) == max(scores, gathered if sp else 0)


def test_what_a_layer_saves() -> None:
    """Korthikanti et al. (arXiv 2205.05198), equation (1): 34 sbh + 5 a s^2 b bytes per layer."""
    size = Size(layers=3, hidden=64, heads=4, words=100, positions=TOKENS)

    def saved(layers: int) -> int:
        model = builder(size._replace(layers=layers), torch.float16)
        found = estimate(spec_of(model=model, gpu="a100-80gb"))
        table, trace = found.trace.lifetimes, found.trace
        forward_end = next(t for t, phase, _ in trace.phase_ticks if phase.label == "backward")
        alive = table.alive_at(forward_end) & (table.category == Category.ACTIVATION)
        return int(table.nbytes[alive].sum())

    s, b, h, a = TOKENS, BATCH, size.hidden, size.heads
    statistics = 2 * 2 * s * b * FULL  # of two norms: mean and deviation of each token
    # The output of the layer is the next one's input, so a layer more adds exactly its own.
    assert saved(3) - saved(2) == 34 * s * b * h + 5 * a * s * s * b + statistics


def rows(name: str) -> list[Any]:
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        lines = [x for x in csv.DictReader(file) if x["model"].startswith("GPT-345M")]
    return [(line, public(line)) for line in lines]


def test_published_runs_are_read() -> None:
    [(_, allocated), (_, reserved)] = rows("public_runs")
    assert allocated.spec is not None and reserved.spec is not None
    assert (allocated.spec.gpus, allocated.spec.tp) == (4, 1)
    assert allocated.spec.gradient_accumulation_steps == 2
    more = rows("megatron_345m")
    by_plan = {line["parallel_strategy"]: run for line, run in more}
    assert "a later stage than the first" in by_plan["PP4"].why_not  # the last row of each
    first = next(run.spec for line, run in more if line["parallel_strategy"] == "TP2xPP2+SP")
    assert (first.gpus, first.tp, first.pp, first.sp, first.pipeline_micro_batches) == (4, 2, 2, True, 4)
    spec = by_plan["TP4+SP"].spec
    assert (spec.tp, spec.sp, spec.gradient_accumulation_steps) == (4, True, 4)


@pytest.mark.slow
def test_published_allocated_peaks() -> None:
    """DP4 to 0.01 %; TP4 with sequence parallelism to 0.4 %, whose ranks differ by 0.7 %."""
    for name, within in (("public_runs", 1e-4), ("megatron_345m", 7e-3)):
        runs = [run for _, run in rows(name) if run.spec and run.metric == "allocated"]
        predict = Predictor()
        for run in runs:
            assert predict(run.spec, "allocated").nbytes == pytest.approx(run.measured, rel=within)


@pytest.mark.slow
def test_published_reserved_lies_between_both_bounds_of_recorded_streams() -> None:
    """torch 2.1 recorded the streams of TP4's collectives: four like ranks differ, all lie between."""
    found = [run for line, run in rows("megatron_345m") if line["parallel_strategy"] == "TP4+SP"]
    measured = {run.measured for run in found if run.metric == "reserved"}
    spec = found[0].spec
    assert spec is not None
    low, high = (
        estimate(spec.model_copy(update={"record_streams": on})).worst.peak.reserved
        for on in (False, True)
    )
    assert len(measured) > 1
    assert all(low < bytes_ < high < 1.25 * bytes_ for bytes_ in measured)


@pytest.mark.slow
def test_published_pipelines_rank_by_rank() -> None:
    """Every rank of PP4 and of TP2xPP2 with sequence parallelism, within 1.2 %."""
    found: dict[str, Any] = {}
    for line, run in rows("megatron_345m"):
        plan = line["parallel_strategy"]
        if "PP" not in plan or line["metric"] != "max_allocated":
            continue
        if plan not in found:
            found[plan] = estimate(run.spec)  # the first row's, of rank 0
        [rank] = [r for r in found[plan].ranks if rank_of(line) in r.table.ranks]
        assert rank.peak.allocated == pytest.approx(int(line["measured_bytes"]), rel=1.2e-2)
    assert len(found) == 2


def test_what_a_stage_receives_and_sends() -> None:
    """F0 F1 B0 B1 on the first stage, F0 B0 F1 B1 on the last; hidden states are [16, 1, 32] fp16."""
    found = estimate(spec_of(pp=2, micro_batches=2))
    hidden = TOKENS * SMALL.hidden * HALF
    buffers = []
    for rank in found.ranks:
        table, end = rank.table.lifetimes, rank.table.trace.step_ticks[1]
        mine = (table.category == Category.COMMUNICATION) & (table.birth < end)
        assert set(table.nbytes[mine].tolist()) == {hidden}
        buffers.append(list(zip(table.birth[mine].tolist(), table.death[mine].tolist(), strict=True)))
        assert all(death < end for _, death in buffers[-1])
    (first, second), (third, fourth) = (sorted(pairs) for pairs in buffers)
    assert first[1] - second[0] == 1  # a gradient waits for the next to be received
    assert third[1] < fourth[0]  # an input until its backward is done
    # An output is let go of when it has been sent, in the forward that made it.
    stage, table = found.ranks[0].table, found.ranks[0].table.lifetimes
    starts = [t for t, phase, step in stage.trace.phase_ticks if phase is Phase.FORWARD and step == 0]
    made = (table.nbytes == hidden) & (table.birth > starts[0]) & (table.birth < starts[1])
    output = max(np.flatnonzero(made).tolist(), key=lambda row: int(table.birth[row]))
    assert table.death[output] < starts[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"offload": "all"}, "--strategy megatron offloads nothing"),
        ({"pp": 2, "micro_batches": 2, "pp_schedule": "gpipe"}, "megatron with --pp-schedule gpipe is"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(spec_of(**fields))


def test_the_model_is_a_module() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(SMALL, torch.float16).parameters()) == numel()


# -- the distributed optimizer ---------------------------------------------------------------------


def test_buffers_are_padded_and_cut_in_equal_parts() -> None:
    """In reverse order, starts at 64s, ends at 128s that ranks divide; by hand."""
    layout = lay_out([100, 10, 70], 3, None)
    assert layout.places == [(192, 292), (128, 138), (0, 70)]
    assert layout.buckets == [(0, 384)]  # lcm(3, 128)
    # 128 elements each: [0, 128), [128, 256), [256, 384)
    assert [layout.owned(rank) for rank in range(3)] == [[0, 0, 70], [64, 10, 0], [36, 0, 0]]
    cut = lay_out([100, 10, 70], 2, 75)
    assert cut.buckets == [(0, 256), (256, 384)]  # the last two; then 100 by itself
    assert cut.places == [(256, 356), (128, 138), (0, 70)]
    assert [cut.owned(rank) for rank in range(2)] == [[64, 0, 70], [36, 10, 0]]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 9),
       st.integers(1, 4000) | st.none())  # fmt: skip
def test_every_element_has_one_owner(numels: list[int], ranks: int, size: int | None) -> None:
    layout = lay_out(numels, ranks, size)
    assert [sum(c) for c in zip(*(layout.owned(r) for r in range(ranks)), strict=True)] == numels
    assert layout.numel % ranks == layout.numel % 128 == 0
    ends = [0, *(end for _, end in layout.buckets)]
    assert [start for start, _ in layout.buckets] == ends[:-1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dtype", "grad"), [(torch.float16, HALF), (torch.bfloat16, FULL)])
def test_every_buffer_of_the_distributed_optimizer(
    dtype: torch.dtype, grad: int, overlap: bool
) -> None:
    found = estimate(spec_of(dtype, use_distributed_optimizer=True, overlap_grad_reduce=overlap))
    shapes = [p.numel for p in found.trace.parameters]
    layout = lay_out(shapes, 2, 40_000_000 if overlap else None)
    assert len(layout.buckets) == 1  # a small model closes no bucket of 40 million elements
    assert [rank.table.ranks for rank in found.ranks] == [(0,), (1,)]
    for rank in found.ranks:
        table, trace = rank.table.lifetimes, rank.table.trace
        mine = sum(layout.owned(rank.rank))
        second = trace.step_ticks[1] - 1

        def held(category: Category, tick: int, table: Any = table) -> int:
            return int(table.nbytes[table.alive_at(tick) & (table.category == category)].sum())

        whole = layout.numel
        assert held(Category.PARAMETER, second) == HALF * whole + FULL * mine
        main = FULL * mine if grad == HALF else 0
        assert held(Category.GRADIENT, second) == grad * whole + main
        assert held(Category.OPTIMIZER_STATE, second) == 2 * FULL * mine
        # When the gradients' buffer is made the model still lies beside that of parameters.
        [made] = table.birth[table.nbytes == grad * whole][-1:].tolist()
        assert held(Category.PARAMETER, made) == HALF * (numel() + whole)
    assert sum(r.table.optimizer["state_elements"] for r in found.ranks) == 2 * numel()


def test_one_rank_has_everything() -> None:
    """Of one rank the parts are whole parameters: as without, but for padding."""
    plain, sharded = (
        estimate(spec_of(gpus=1, use_distributed_optimizer=on)).worst.table for on in (False, True)
    )
    padding = lay_out([p.numel for p in plain.trace.parameters], 1, None).numel - numel()
    end = plain.trace.step_ticks[1]

    def live(table: Any) -> int:
        return int(table.lifetimes.nbytes[table.lifetimes.alive_at(end)].sum())

    assert live(sharded) - live(plain) == 2 * HALF * padding  # of parameters and gradients
