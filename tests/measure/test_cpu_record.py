"""Hand-made events and marks: what counts, what is left out, where peaks lie."""

from __future__ import annotations

import pytest
import torch

from llmem.lifetimes import Phase
from llmem.measure.cpu_memory import MemoryEvent, alive_after, curve_of, profiler, read
from llmem.measure.cpu_record import reachable_bytes, summarise
from llmem.measure.marks import Mark

MAIN = ("llmem:phase:0:forward::",)


def event(time: int, nbytes: int, address: int, *scopes: str, thread: int = 1) -> MemoryEvent:
    return MemoryEvent(time, nbytes, address, thread, (*MAIN, *scopes))


def phase(step: int, which: Phase, start: int, end: int) -> Mark:
    return Mark.parse(Mark.name("phase", step, which), start, end)


def test_curve_is_a_running_sum() -> None:
    curve = curve_of([event(1, 100, 7), event(2, 28, 8), event(3, -100, 7)])
    assert curve.live == [100, 128, 28]
    assert (curve.foreign_frees, curve.unseen_frees, curve.unknown_frees) == (0, 0, 0)


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ("gloo:all_gather", "gloo"),
        ("c10d::_allgather_base_", "gloo"),
        ("host:device mesh", "host"),
        ("aten::_chunk_cat", "chunk_cat"),
    ],
)
def test_what_has_no_counterpart_on_a_gpu_is_left_out_and_named(scope: str, reason: str) -> None:
    curve = curve_of([event(1, 100, 7), event(2, 50, 8, scope, "aten::empty"), event(3, -100, 7)])
    assert curve.live == [100, 100, 0]
    assert curve.left_out == {reason: 50}


def test_an_address_given_out_twice_means_a_free_that_nobody_reported() -> None:
    curve = curve_of([event(1, 100, 7), event(2, 60, 7)])
    assert curve.live == [100, 60]
    assert curve.unseen_frees == 1


def test_frees_of_other_threads_and_of_older_memory_are_counted() -> None:
    curve = curve_of([event(1, 100, 7), event(2, -100, 7, thread=9), event(3, -4, 99)])
    assert curve.live == [100, 0, 0]
    assert (curve.foreign_frees, curve.unknown_frees) == (1, 1)


def test_alive_after() -> None:
    events = [event(1, 100, 7), event(2, 50, 8, "gloo:x"), event(3, -100, 7), event(4, 8, 7)]
    assert [e.nbytes for e in alive_after(events, 2)] == [100]
    assert [e.nbytes for e in alive_after(events, 4)] == [8]


def test_summary_by_step_and_phase() -> None:
    events = [
        event(1, 500, 1),  # before setup: the whole model
        event(12, -400, 1),
        event(12, 100, 1),  # the engine keeps a shard
        event(22, 40, 2),
        event(24, 30, 3),
        event(31, -40, 2),
        event(33, 60, 4),
        event(52, -30, 3),
    ]
    marks = [
        phase(0, Phase.SETUP, 10, 15),
        phase(0, Phase.FORWARD, 20, 30),
        Mark.parse(Mark.name("unit", 0, Phase.FORWARD, "layers.0", "enter"), 23, 23),
        phase(0, Phase.BACKWARD, 30, 40),
        phase(1, Phase.FORWARD, 50, 60),
    ]
    found = summarise(events, marks)
    assert found["setup_peak"] == 500
    assert found["before_steps"] == 100
    assert found["steps"] == [
        {"step": 0, "peak": 190, "end": 190, "phases": {"forward": 170, "backward": 190}},
        {"step": 1, "peak": 190, "end": 160, "phases": {"forward": 190}},
    ]
    assert found["boundaries"] == [[0, "forward", "layers.0", "enter", 140]]
    assert found["peak"] == 190


def test_host_bytes_leave_every_number() -> None:
    marks = [phase(0, Phase.FORWARD, 5, 9)]
    found = summarise([event(1, 100, 1), event(6, 10, 2)], marks, host=30)
    assert (found["before_steps"], found["peak"], found["end"]) == (70, 80, 80)
    assert found["left_out"] == {"batch": 30}


def test_mark_names_survive() -> None:
    mark = Mark.parse(Mark.name("unit", 2, Phase.BACKWARD, "model.layers.1", "enter"), 3, 4)
    assert mark == Mark("unit", 2, "backward", "model.layers.1", "enter", 3, 4)


def test_profiler_sees_every_allocation() -> None:
    recorder = profiler()
    recorder.start()
    with torch.profiler.record_function(Mark.name("phase", 0, Phase.FORWARD)):
        kept = torch.empty(1000)
        gone = torch.empty(500, dtype=torch.int64)
        del gone
    recorder.stop()
    events, marks = read(recorder)
    assert [e.nbytes for e in events] == [4000, 4000, -4000]
    assert [m.phase for m in marks] == ["forward"]
    found = summarise(events, marks)
    assert (found["peak"], found["end"]) == (8000, kept.nbytes)


def test_reachable_bytes_counts_storages_once() -> None:
    before = reachable_bytes()
    whole = torch.empty(100, 10)
    part = whole[1]
    assert reachable_bytes() - before == 4000
    assert part.untyped_storage().nbytes() == 4000
