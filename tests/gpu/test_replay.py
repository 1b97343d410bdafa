"""Replays: of simulated events, of real recorded histories, of histories made by the model."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmem.errors import LlmemError
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.allocator import Block, CachingAllocator, OutOfMemory
from llmem.gpu.replay import ReplayReport, replay_events, replay_log
from llmem.gpu.snapshot import TraceRow, read_snapshot, write_snapshot

DATA = Path(__file__).parent / "data"
MIB = 1 << 20

# (log, reserved bytes and segments at its end, from the segments file; segment_allocs in it)
LOGS = [
    ("large_ctx128_forward", 19_667_091_456, 516, 289),
    ("large_ctx512_forward_rerun", 44_715_474_944, 658, 428),
    ("medium_ctx128_inference", 1_763_704_832, 98, 0),
    ("medium_ctx512_training", 12_660_506_624, 400, 1),
]

# A malloc of some bytes on a stream, a free of the n-th live block (deferred, if the flag is 0),
# the end of the deferred frees, or an emptied cache.
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("malloc"),
            st.one_of(st.integers(1, 2 * MIB), st.integers(1, 90 * MIB)),
            st.integers(0, 1),
        ),
        st.tuples(st.just("free"), st.integers(0, 50), st.integers(0, 3)),
        st.tuples(st.sampled_from(["empty", "complete"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def log_path(name: str) -> Path:
    return DATA / f"{name}.events.csv.gz"


# -- simulated events ---------------------------------------------------------------------


def test_replay_events_by_hand() -> None:
    kind = np.array([0, 0, 1, 0, 1], dtype=np.int8)
    ids = np.array([7, 8, 7, 9, 9])
    nbytes = np.array([3 * MIB, 100, 0, 2 * MIB, 0])
    result = replay_events(kind, ids, nbytes, np.zeros(5, dtype=int), want_addresses=True)
    assert result.requested is not None and result.requested.dtype == np.int64
    assert result.requested.tolist() == [3 * MIB, 3 * MIB + 100, 100, 2 * MIB + 100, 100]
    assert result.allocated is not None
    assert result.allocated.tolist() == [3 * MIB, 3 * MIB + 512, 512, 2 * MIB + 512, 512]
    assert result.reserved is not None
    assert result.reserved.tolist() == [20 * MIB] + [22 * MIB] * 4
    assert (result.peak_requested, result.peak_allocated) == (3 * MIB + 100, 3 * MIB + 512)
    assert (result.peak_reserved, result.segment_count, result.retries) == (22 * MIB, 2, 0)
    assert result.oom is None
    assert result.addresses[9] == result.addresses[7] != result.addresses[8]
    assert [len(view.blocks) for view in result.segments] == [1, 2]


def test_replay_events_stops_at_out_of_memory() -> None:
    kind = np.array([0, 1, 0, 0, 1], dtype=np.int8)
    ids = np.array([0, 0, 1, 2, 1])
    nbytes = np.array([20 * MIB, 0, 30 * MIB, 40 * MIB, 0])
    result = replay_events(kind, ids, nbytes, capacity=50 * MIB)
    assert result.oom is not None
    assert (result.oom.event, result.oom.id, result.oom.requested) == (3, 2, 40 * MIB)
    assert "Tried to allocate 40.00 MiB" in result.oom.message
    assert result.reserved is not None
    assert result.reserved.tolist() == [20 * MIB, 20 * MIB, 50 * MIB, 50 * MIB, 50 * MIB]
    assert result.retries == 1
    # The peak that fits only because cached blocks were freed:
    assert replay_events(kind[:3], ids[:3], nbytes[:3], capacity=49 * MIB).retries == 1
    assert replay_events(kind[:3], ids[:3], nbytes[:3]).peak_reserved == 50 * MIB


# -- real histories -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reserved", "segments", "segment_allocs"), LOGS)
def test_real_logs_replay_to_the_byte(
    name: str, reserved: int, segments: int, segment_allocs: int
) -> None:
    report = replay_log(log_path(name))
    assert report.first_difference is None  # every segment event and every address
    assert (report.reserved_real, report.segments_real) == (reserved, segments)
    assert (report.reserved_replayed, report.segments_replayed) == (reserved, segments)
    assert report.segment_allocs_replayed == report.segment_allocs_real
    assert report.segment_allocs_real[0] == segment_allocs
    assert report.allocated_peak_real == report.allocated_peak_replayed
    assert report.reserved_peak_real == report.reserved_peak_replayed
    assert report.notes == []


def test_the_report_names_its_bytes() -> None:
    fields = replay_log(log_path("large_ctx128_forward")).to_json()
    assert fields["reserved_real"] == fields["reserved_replayed"] == 19_667_091_456
    assert fields["segment_allocs_real"] == {"count": 289, "bytes": 5630 * MIB}
    assert fields["start_reserved"] == 13_763_608_576
    assert fields["first_difference"] is None


def test_other_settings_are_seen_to_differ() -> None:
    report = replay_log(
        log_path("large_ctx128_forward"), AllocConf.parse("large_segment_size_mb:32")
    )
    assert report.first_difference is not None
    assert report.first_difference["event"] == 1
    assert "segment_alloc of 20971520 bytes" in report.first_difference["what"]
    assert report.reserved_replayed != report.reserved_real


def test_a_changed_size_is_found(tmp_path: Path) -> None:
    name = "large_ctx128_forward"
    lines = gzip.decompress(log_path(name).read_bytes()).decode().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("segment_alloc")) + 1
    while not lines[at - 1].startswith("segment_alloc") or "33554432" not in lines[at - 1]:
        at += 1
    fields = lines[at].split(",")
    lines[at] = ",".join([fields[0], fields[1], str(int(fields[2]) * 2), fields[3]])
    (tmp_path / "x.events.csv").write_text("\n".join(lines) + "\n")
    segments = (DATA / f"{name}.segments.csv.gz").read_bytes()
    (tmp_path / "x.segments.csv").write_bytes(gzip.decompress(segments))
    report = replay_log(tmp_path / "x.events.csv")
    assert report.first_difference is not None
    assert report.first_difference["event"] == at - 1


def test_without_segments_a_cold_start_is_assumed(tmp_path: Path) -> None:
    lines = [
        "i,action,addr,size,stream",
        f"0,segment_alloc,{1 << 30},20971520,0",
        f"1,alloc,{1 << 30},3145728,0",
        "2,free_requested,77,512,0",
        "3,free_completed,77,512,0",
        f"4,free_requested,{1 << 30},3145728,0",
        f"5,free_completed,{1 << 30},3145728,0",
        f"6,segment_free,{1 << 30},20971520,0",
        f"7,segment_free,{1 << 31},2097152,0",
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))
    report = replay_log(path)
    assert report.first_difference is None
    assert (report.reserved_real, report.reserved_replayed) == (0, 0)
    assert (report.reserved_peak_real, report.reserved_peak_replayed) == (22 * MIB, 22 * MIB)
    assert (report.allocated_peak_real, report.allocated_peak_replayed) == (3 * MIB, 3 * MIB)
    assert "no segments file" in report.notes[0] and "1 free(s)" in report.notes[1]


# -- histories made by the model ----------------------------------------------------------


def record(
    allocator: CachingAllocator, steps: list[tuple[str, int, int]]
) -> tuple[list[TraceRow], list[Block]]:
    """The trace that torch would record of these steps."""
    trace: list[TraceRow] = []
    live: list[Block] = []
    awaiting: list[Block] = []

    def note(action: str, address: int, size: int, stream: int) -> None:
        trace.append((action, address, size, stream, [("train.py", 12, "step")], len(trace)))

    def drain() -> None:
        for event in allocator.segment_events or ():
            note(*event)
        allocator.segment_events = []

    def complete() -> None:
        for block in awaiting:
            note("free_completed", block.address, block.requested, block.stream)
            allocator.complete(block)
        awaiting.clear()

    allocator.segment_events = []
    for action, number, flag in steps:
        if action == "malloc":
            try:
                block = allocator.malloc(number, flag)
            except OutOfMemory:
                drain()
                note("oom", 0, number, flag)
                continue
            drain()
            note("alloc", block.address, block.requested, block.stream)
            live.append(block)
        elif action == "free" and live:
            block = live.pop(number % len(live))
            note("free_requested", block.address, block.requested, block.stream)
            allocator.free(block, defer=True)
            awaiting.append(block)
            if flag:
                awaiting.pop()
                note("free_completed", block.address, block.requested, block.stream)
                allocator.complete(block)
        elif action in ("empty", "complete"):
            complete()
            if action == "empty":
                allocator.empty_cache()
                drain()
    return trace, live


def check_replay(path: Path, allocator: CachingAllocator) -> ReplayReport:
    report = replay_log(path)
    assert report.first_difference is None, report.first_difference
    assert all("out-of-memory" in note for note in report.notes)
    assert report.reserved_real == report.reserved_replayed == allocator.reserved
    assert report.segments_real == report.segments_replayed == len(allocator.snapshot_segments())
    assert report.allocated_peak_real == report.allocated_peak_replayed
    return report


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "roundup_power2_divisions:4"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_snapshots_replay_from_any_start(
    tmp_path_factory: pytest.TempPathFactory, conf: str, steps: list[tuple[str, int, int]]
) -> None:
    """Whatever of its beginning a record has lost, the state is rebuilt from its end."""
    allocator = CachingAllocator(AllocConf.parse(conf))
    trace, _ = record(allocator, steps)
    path = tmp_path_factory.mktemp("snapshot") / "snapshot.pickle"
    for lost in {0, len(trace) // 3, len(trace) - 1}:
        if trace[max(lost, 0) :]:
            write_snapshot(
                path, trace[max(lost, 0) :], allocator.snapshot_segments(),
                allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": conf},
            )  # fmt: skip
            check_replay(path, allocator)


def test_a_long_record_of_two_streams_under_pressure(tmp_path: Path) -> None:
    rng = random.Random(1)
    steps: list[tuple[str, int, int]] = []
    for _ in range(3000):
        if rng.random() < 0.52:
            steps.append(("malloc", int(2 ** rng.uniform(6, 26)), rng.randrange(2)))
        else:
            steps.append(("free", rng.randrange(1000), 1))
    allocator = CachingAllocator(capacity=1400 * MIB)
    trace, live = record(allocator, steps)
    assert allocator.num_alloc_retries > allocator.num_ooms and live
    for lost in (0, 1500):
        write_snapshot(tmp_path / "s.pickle", trace[lost:], allocator.snapshot_segments())
        check_replay(tmp_path / "s.pickle", allocator)


# -- snapshots ----------------------------------------------------------------------------


def test_a_written_snapshot_reads_as_torch_wrote_it(tmp_path: Path) -> None:
    allocator = CachingAllocator()
    trace, _ = record(allocator, [("malloc", 3 * MIB, 0), ("malloc", 100, 0), ("free", 0, 1)])
    path = tmp_path / "s.pickle"
    write_snapshot(path, trace, allocator.snapshot_segments())
    snapshot = read_snapshot(path)
    large, small = snapshot["segments"]
    assert (large["total_size"], large["segment_type"], small["segment_type"]) == (
        20 * MIB, "large", "small",
    )  # fmt: skip
    assert [block["state"] for block in small["blocks"]] == ["active_allocated", "inactive"]
    assert (small["allocated_size"], small["blocks"][0]["requested_size"]) == (512, 100)
    frames = [{"filename": "train.py", "line": 12, "name": "step"}]
    assert small["blocks"][0]["frames"] == frames
    (rows,) = snapshot["device_traces"]
    assert [row["action"] for row in rows] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip
    assert rows[1]["frames"] == frames


def test_torch_draws_a_written_snapshot(tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    allocator = CachingAllocator()
    trace, _ = record(allocator, [("malloc", 15 * MIB + MIB // 2, 0), ("malloc", 100, 0)])
    path = tmp_path / "s.pickle"
    write_snapshot(path, trace, allocator.snapshot_segments())
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    assert "segments: 2" in viz.segsum(snapshot)
    assert "alloc" in viz.trace(snapshot)
    assert len(viz.trace_plot(snapshot)) > 1000


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.cwd, ())


def test_a_pickle_may_hold_nothing_but_plain_containers(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[_Payload()]]}))
    with pytest.raises(LlmemError, match="only plain containers"):
        replay_log(path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "lacks the column"),
        (b"a,b\n1,2\n", "lacks the column"),
        (b"action,addr,size,stream\nalloc,1\n", "cut off"),
        (b"action,addr,size,stream\nalloc,x,1,0\n", "whole number"),
        (b"\xff\xfe\x00", "neither a CSV"),
        (b"\x80\x05garbage", "not a readable pickle"),
        (b"\x1f\x8b\x08\x00", "cannot read"),
        (pickle.dumps([1, 2]), "no memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": []}), "no events"),
        (pickle.dumps({"segments": [{}], "device_traces": [[{"action": "alloc"}]]}), "schema"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(LlmemError, match=cause):
        replay_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlmemError, match=r"cannot read .*nothing\.csv"):
        replay_log(tmp_path / "nothing.csv")
