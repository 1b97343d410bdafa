"""Tables of lifetimes and traces: arithmetic that can be done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmem.lifetimes import (
    BREAKDOWN,
    COLUMNS,
    NEVER,
    TICK,
    Category,
    Lifetimes,
    Ops,
    Parameter,
    Phase,
    Touch,
    Trace,
)


def table() -> Lifetimes:
    """a: 8 bytes over [1, 4); b: 16 over [2, never); c: 4 over [3, 5)."""
    return Lifetimes.build(
        [
            {"nbytes": 8, "birth": 1, "death": 4, "category": Category.ACTIVATION},
            {"nbytes": 16, "birth": 2, "category": Category.GRADIENT, "key": 3},
            {"nbytes": 4, "birth": 3, "death": 5, "module": 2},
        ]
    )


def test_build_fills_in_what_is_not_said() -> None:
    made = table()
    assert made.death.tolist() == [4, NEVER, 5]
    assert made.category.tolist() == [Category.ACTIVATION, Category.GRADIENT, Category.OTHER]
    assert made.key.tolist() == [-1, 3, -1]
    assert made.module.tolist() == [0, 0, 2]
    assert [getattr(made, name).dtype for name in COLUMNS] == list(map(np.dtype, COLUMNS.values()))
    assert len(Lifetimes.empty()) == 0
    assert len(Lifetimes.empty().events()) == 0


def test_nbytes_and_birth_are_required() -> None:
    with pytest.raises(KeyError):
        Lifetimes.build([{"nbytes": 8}])


def test_take_add_and_with_columns() -> None:
    made = table()
    assert made.take(made.nbytes > 4).nbytes.tolist() == [8, 16]
    assert made.take([2, 0]).birth.tolist() == [3, 1]
    both = made + made.take([1])
    assert both.nbytes.tolist() == [8, 16, 4, 16]
    assert both.key.tolist() == [-1, 3, -1, 3]
    halved = made.with_columns(nbytes=made.nbytes // 2)
    assert halved.nbytes.tolist() == [4, 8, 2]
    assert made.nbytes.tolist() == [8, 16, 4]


def test_alive_is_from_birth_until_before_death() -> None:
    alive = {tick: np.flatnonzero(table().alive_at(tick)).tolist() for tick in range(7)}
    assert alive == {0: [], 1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [1, 2], 5: [1], 6: [1]}


def test_events_in_order() -> None:
    events = table().events()
    assert list(zip(events.tick, events.sign, events.row, strict=True)) == [
        (1, 1, 0), (2, 1, 1), (3, 1, 2), (4, -1, 0), (5, -1, 2),
    ]  # fmt: skip


def test_frees_come_before_requests_of_the_same_tick() -> None:
    made = Lifetimes.build(
        [{"nbytes": 1, "birth": 0, "death": 5}, {"nbytes": 1, "birth": 5, "death": 9}]
    )
    assert made.events().sign.tolist() == [1, -1, 1, -1]


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For machines that are busy with something else."""

lifetimes = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 10**6), st.integers(1, 99) | st.none()),
    max_size=30,
).map(
    lambda rows: Lifetimes.build(
        [
            {"birth": born, "nbytes": n, "death": int(NEVER) if span is None else born + span}
            for born, n, span in rows
        ]
    )
)


@unhurried
@given(lifetimes, st.integers(0, 200))
def test_running_sum_of_events_is_what_is_alive(made: Lifetimes, tick: int) -> None:
    events = made.events()
    upto = events.tick <= tick
    running = int((events.sign[upto] * made.nbytes[events.row[upto]]).sum())
    assert running == int(made.nbytes[made.alive_at(tick)].sum())


def test_every_category_is_in_one_part_of_the_breakdown() -> None:
    members = [category for part in BREAKDOWN.values() for category in part]
    assert sorted(members) == sorted(Category)


def trace() -> Trace:
    """Forward op 0 (mul) reads storage 0 and makes 1; backward op 1 (add_) reads 1, writes 0."""
    return Trace(
        ops=Ops(
            name=np.array([0, 1], np.int32),
            module=np.array([1, 0], np.int32),
            phase=np.array([Phase.FORWARD, Phase.BACKWARD], np.int8),
            step=np.array([0, 0], np.int16),
            tick=np.array([1, 2]) * TICK,
            recompute=np.array([False, False]),
        ),
        lifetimes=Lifetimes.build(
            [
                {"nbytes": 24, "birth": TICK, "category": Category.PARAMETER, "key": 0},
                {
                    "nbytes": 40,
                    "birth": 2 * TICK,
                    "death": 3 * TICK,
                    "birth_op": 0,
                    "death_op": 1,
                    "category": Category.ACTIVATION,
                },
            ]
        ),
        names=["mul", "add_"],
        modules=["", "layer"],
        touch_op=np.array([0, 0, 1, 1]),
        touch_row=np.array([0, 1, 1, 0]),
        touch_kind=np.array([Touch.READ, Touch.WRITE, Touch.READ, Touch.WRITE], np.int8),
        parameters=[Parameter(0, "layer.w", (2, 3), "float32", 4, True, 0)],
        step_ticks=[TICK + 1, 3 * TICK + 1],
        phase_ticks=[
            (0, Phase.SETUP, 0),
            (TICK + 1, Phase.FORWARD, 0),
            (2 * TICK + 1, Phase.BACKWARD, 0),
        ],
    )


def test_names_and_places() -> None:
    made = trace()
    assert [made.op_name(op) for op in (-1, 0, 1)] == ["", "mul", "add_"]
    assert made.module_name(1) == "layer"
    assert [made.op_at(tick) for tick in (0, TICK, 2 * TICK - 1, 2 * TICK)] == [-1, 0, 0, 1]
    assert made.phase_at(TICK) == (Phase.SETUP, 0)
    assert made.phase_at(2 * TICK) == (Phase.FORWARD, 0)
    assert made.phase_at(3 * TICK) == (Phase.BACKWARD, 0)
    assert Phase.ZERO_GRAD.label == "zero_grad"


def test_parameter_bytes() -> None:
    parameter = trace().parameters[0]
    assert (parameter.numel, parameter.nbytes) == (6, 24)
    assert Parameter(1, "scale", (), "bfloat16", 2, True, 1).nbytes == 2


def test_graph_has_an_edge_per_touch() -> None:
    graph = trace().graph()
    assert set(graph.edges) == {
        (("storage", 0), ("op", 0)),
        (("op", 0), ("storage", 1)),
        (("storage", 1), ("op", 1)),
        (("op", 1), ("storage", 0)),
    }
    assert graph.nodes["op", 0] == {"name": "mul", "module": "layer", "phase": "forward", "step": 0}
    assert graph.nodes["storage", 1]["nbytes"] == 40
    assert graph.nodes["storage", 1]["category"] == "activation"


def test_graph_of_chosen_storages() -> None:
    graph = trace().graph([1])
    assert set(graph.nodes) == {("storage", 1), ("op", 0), ("op", 1)}
