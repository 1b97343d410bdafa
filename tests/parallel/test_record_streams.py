"""Blocks that other streams use wait for the GPU: ticks by hand, and what it costs in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmem
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.gpu.replay import replay_events
from llmem.lifetimes import NEVER, TICK, Category, HostWait, Lifetimes, Ops, Phase, Recorded, Trace
from llmem.parallel.fsdp.fsdp1_flat import FlatParameter, flatten
from llmem.parallel.fsdp.fsdp1_pass import UNSHARD_STREAM, Fsdp1Options, Fsdp1Pass
from llmem.parallel.record_streams import NOTE, held_until
from llmem.parallel.units import units_of
from llmem.spec import RunSpec, make_spec
from llmem.timeline import replay
from llmem.trace.run import DEFAULT_GPU
from llmem.trace.split.process_group import rank_of
from tests.parallel.toy import ROWS, WIDTH, toy_trace

MIB = 2**20
OLD = "2.7"
BYTES = ROWS * WIDTH * 4


def spec_of(**fields: Any) -> RunSpec:
    return make_spec(model="gpt2", record_streams=True, **fields)


# -- the allocator ---------------------------------------------------------------------------------


def test_a_held_block_is_freed_but_not_given_out_again() -> None:
    """12 MiB freed, 12 MiB asked for: a second segment, unless the first block can be reused."""
    kind = np.array([0, 1, 0, 1, 0], np.int8)
    ids = np.array([0, 0, 1, 1, 2])
    nbytes = np.full(5, 12 * MIB)
    plain = replay_events(kind, ids, nbytes)
    held = replay_events(kind, ids, nbytes, held={0: 3, 1: 3})  # the first until event 3
    assert (plain.peak_reserved, held.peak_reserved) == (12 * MIB, 24 * MIB)
    assert plain.peak_allocated == held.peak_allocated == 12 * MIB
    assert held.requested is not None
    assert (held.requested // MIB).tolist() == [12, 12, 24, 0, 12]


def test_a_full_device_waits_for_the_other_stream() -> None:
    """``release_cached_blocks`` synchronises all events before it gives up."""
    kind, ids = np.array([0, 1, 0], np.int8), np.array([0, 0, 1])
    found = replay_events(kind, ids, np.full(3, 12 * MIB), capacity=12 * MIB, held={0: 99})
    assert found.oom is None
    assert found.retries == 1


# -- tensor parallelism ----------------------------------------------------------------------------


class Reduced(torch.autograd.Function):
    """Row-parallel: partial sums -> a new tensor with their sum, as functional collectives do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Split(torch.nn.Module):
    """Two layers, each half of one, whose outputs are summed over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, group: str) -> torch.Tensor:
        for layer in self.layers:
            x = Reduced.apply(layer(x), group)
        return x.sum()


def split_trace() -> Trace:
    import torch.distributed as dist

    with rank_of(2, 0):
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        with torch.device("meta"):
            model, x = Split(), torch.empty(ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            model(x, group).backward()
            optimizer.step()

        return llmem.trace(step, model=model, optimizer=optimizer, steps=2, gpu=DEFAULT_GPU)


def test_what_collectives_touch_is_held_until_the_loss_is_read() -> None:
    trace = split_trace()
    table = trace.lifetimes
    held = held_until(trace, spec_of(gpus=2, tp=2, as_torch=OLD))
    changed = np.flatnonzero(held != table.death)
    # Of each step: the partial sums and the sums of two layers.
    assert table.nbytes[changed].tolist() == [BYTES] * 8
    backwards = [start for start, phase, _ in trace.phase_ticks if phase is Phase.BACKWARD]
    following = [min(t for t, _, _ in trace.phase_ticks if t > start) for start in backwards]
    assert sorted(set(held[changed].tolist())) == following
    # At the end of the first forward: two inputs of all-reduces and the last sum, which nobody needs.
    more = lifted(table, held, backwards[0]) - lifted(table, table.death, backwards[0])
    assert more == 3 * BYTES


def lifted(table: Lifetimes, until: np.ndarray, tick: int) -> int:
    return int(table.nbytes[(table.birth <= tick) & (until > tick)].sum())


@pytest.mark.parametrize(("version", "held"), [("2.1", 8), ("2.7", 8), ("2.8", 0), (None, 0)])
def test_torch_stopped_recording(version: str | None, held: int) -> None:
    trace = split_trace()
    found = held_until(trace, spec_of(gpus=2, tp=2, as_torch=version))
    assert int((found != trace.lifetimes.death).sum()) == held


# -- FSDP1 -----------------------------------------------------------------------------------------


def test_fsdp1_holds_what_its_rate_limiter_allows() -> None:
    trace = toy_trace()
    units = units_of(trace, trace.wrapped)
    flats: list[FlatParameter | None] = [
        flatten(u.parameters, 2, kept=trace.masters, computed=None) for u in units
    ]
    table, named = Fsdp1Pass(trace, units, flats, Fsdp1Options()).run().finish()
    held = held_until(named, spec_of(gpus=2, strategy="fsdp"))
    [backward, _] = [tick for tick, phase, _ in named.phase_ticks if phase is Phase.BACKWARD]

    first = table.birth < named.step_ticks[1]
    gathered = np.flatnonzero(
        first & (table.stream == UNSHARD_STREAM) & (table.category == Category.COMMUNICATION)
    )
    order = gathered[np.argsort(table.birth[gathered])]
    names = [named.modules[table.module[row]] for row in order]
    assert names == ["", "blocks.0", "blocks.1", "blocks.1", "blocks.0"]
    # Two were let go of in forward; the root's unshard in backward waits for the first of them.
    assert backward < held[order[1]] < int(table.birth[order[3]])
    # One event waits then, so that no other unshard of this step has to wait. Then the loss is read,
    # after the root's parameter and its flat gradient have been let go of, as the last of the step.
    [read] = set(held[order[[0, 2, 3, 4]]].tolist())
    whole = first & (table.stream == UNSHARD_STREAM) & (table.category == Category.GRADIENT)
    assert read == int(table.death[whole].max())
    # Flat gradients are recorded on the stream that reduces them.
    assert set(held[whole].tolist()) == {read}
    assert int(whole.sum()) == 3
    untouched = np.setdiff1d(np.flatnonzero(first), [*gathered, *np.flatnonzero(whole)])
    assert np.array_equal(held[untouched], table.death[untouched])


def test_a_wait_tells_that_a_stream_has_come_so_far() -> None:
    trace = toy_trace()
    table = trace.lifetimes
    [row] = np.flatnonzero(table.death == np.sort(table.death[table.death > trace.step_ticks[0]])[5])
    death, spec = int(table.death[row]), spec_of(gpus=2, strategy="fsdp")
    trace.recorded = {int(row): Recorded(on_compute=True)}
    trace.host_waits = [HostWait(death + 2, death - 1, death), HostWait(death + 5, death, 0)]
    assert held_until(trace, spec)[row] == death + 5
    trace.recorded = {int(row): Recorded()}
    assert held_until(trace, spec)[row] == death + 2


def test_the_launch_queue_ends_the_wait_of_what_compute_waits_for() -> None:
    """3000 ops, two of three launch a kernel: 1024 launches are 1536 ops."""
    trace = toy_trace()
    number, forward = 3000, trace.phase_ticks[1][0]
    trace.names = ["mul", "mm", "empty_like"]
    ticks = forward + np.arange(1, number + 1) * TICK
    trace.ops = Ops(
        name=np.arange(number, dtype=np.int32) % 3, tick=ticks,
        module=np.zeros(number, np.int32), phase=np.full(number, Phase.FORWARD, np.int8),
        step=np.zeros(number, np.int16), recompute=np.zeros(number, np.bool_),
    )  # fmt: skip
    trace.phase_ticks = [(forward, Phase.FORWARD, 0)]
    trace.step_ticks = [0, int(ticks[-1]) + TICK]
    death = int(ticks[299]) + 1  # after op 299, of which 200 have launched a kernel
    row = {"nbytes": 1, "birth": forward, "death": death}
    trace.lifetimes = Lifetimes.build([row] * 3)
    trace.recorded = {0: Recorded(on_compute=True), 1: Recorded()}
    held = held_until(trace, spec_of(gpus=2, strategy="fsdp"))
    # Kernel 1224 is the first of the 613th triple; the loss is not read before the step ends.
    assert held.tolist() == [int(ticks[3 * 612]), trace.step_ticks[1], death]


# -- whole estimates -------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [
    {"strategy": "fsdp", "gpus": 2}, {"strategy": "zero3", "gpus": 2},
    {"tp": 2, "gpus": 2, "as_torch": OLD},
    {"strategy": "zero2", "gpus": 2, "as_torch": OLD,
     "deepspeed": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5000}}},
])  # fmt: skip
def test_allocated_is_as_before_and_more_is_active(config: str, fields: dict[str, Any]) -> None:
    common = {"model": config, "per_device_train_batch_size": 2, "seq_length": 64,
              "gpu": "a100-80gb", **fields}  # fmt: skip
    plain = estimate(make_spec(**common))
    held = estimate(make_spec(**common, record_streams=True))
    assert NOTE in held.assumptions
    assert NOTE not in plain.assumptions
    a, b = plain.worst.timeline, held.worst.timeline
    assert np.array_equal(a.lifetimes.nbytes, b.lifetimes.nbytes)
    assert (b.requested >= a.requested).all()
    assert (b.requested > a.requested).any()
    second = a.span(plain.worst.table.trace.step_ticks[1], 0)[0]
    assert a.requested[second] == b.requested[second]  # the first step is over, all streams are done


def test_pipelines_are_refused(config: str) -> None:
    with pytest.raises(LlmemError, match="--record-streams with --pp"):
        estimate(make_spec(
            model=config, per_device_train_batch_size=2, seq_length=16, gpus=2, pp=2,
            record_streams=True, gpu="a100-80gb",
        ))  # fmt: skip


# -- properties ------------------------------------------------------------------------------------

rows = st.lists(
    st.tuples(st.integers(0, 99), st.integers(1, 40 * MIB), st.integers(1, 99), st.integers(0, 60)),
    min_size=1, max_size=30,
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(rows)
def test_never_fewer_bytes_and_equal_once_all_is_done(made: list[tuple[int, int, int, int]]) -> None:
    last = 1000
    table = Lifetimes.build([
        *({"birth": born, "nbytes": size, "death": born + span} for born, size, span, _ in made),
        {"birth": last, "nbytes": 1},
    ])  # fmt: skip
    more = np.array([extra for _, _, _, extra in made] + [0])
    held = np.where(table.death == NEVER, NEVER, table.death + np.where(table.death == NEVER, 0, more))
    plain, waited = replay(table), replay(table, held=held)
    assert (waited.requested >= plain.requested).all()
    assert waited.requested[-1] == plain.requested[-1] == 1
    alive = [
        int(table.nbytes[(table.birth <= t) & (held > t)].sum()) for t in plain.events.tick.tolist()
    ]
    # After the last event of a tick, what is active is what has neither died nor is held.
    final = np.append(np.diff(plain.events.tick) > 0, True)
    born_here = np.isin(plain.events.tick, held)  # a hold may end at this very tick
    sure = final & ~born_here
    assert np.array_equal(waited.requested[sure], np.array(alive)[sure])
