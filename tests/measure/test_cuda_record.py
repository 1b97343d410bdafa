"""The GPU recorder with counters put in: what it reads, when it resets, what it writes."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmem.errors import LlmemError
from llmem.measure.cuda_record import HISTORY_EVENTS, CudaRecorder, TorchCounters, cuda_counters
from llmem.measure.validate import validate

WRAPPED: Any = SimpleNamespace(notes=["a note"])


class FakeCuda:
    """An allocator of numbers with torch.cuda's interface."""

    def __init__(self) -> None:
        self.now = self.top = self.cached = 0
        self.calls: list[str] = []
        self.memory = SimpleNamespace(
            _record_memory_history=lambda max_entries: self.calls.append(f"history {max_entries}"),
            _snapshot=lambda: {"segments": [], "device_traces": [[]]},
        )

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.top = max(self.top, self.now)
        self.cached = max(self.cached, self.now + 1000)

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=80_000)

    def synchronize(self) -> None:
        self.calls.append("wait")

    def empty_cache(self) -> None:
        self.cached = self.now
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self) -> None:
        self.top = self.now
        self.calls.append("reset")

    def memory_allocated(self) -> int:
        return self.now

    def max_memory_allocated(self) -> int:
        return self.top

    def max_memory_reserved(self) -> int:
        return self.cached


def recorded(history: Path | None = None) -> tuple[dict[str, Any], FakeCuda]:
    """Build (peak 900, 400 stay), then two steps of peaks 700 and 1,200."""
    cuda = FakeCuda()
    recorder = CudaRecorder(TorchCounters(cuda, lambda: 5_000 + cuda.cached), history)
    recorder.start()
    cuda.take(900)
    cuda.take(-500)
    recorder.before_steps(WRAPPED)
    for more in (300, 800):
        cuda.take(more)
        cuda.take(-more)
        recorder.after_step()
    return recorder.finish(), cuda


def test_peaks_of_each_step_alone() -> None:
    record, cuda = recorded()
    assert record["device_used_at_start"] == 5_000
    assert record["setup"] == {"allocated": 900, "reserved": 1_900}
    assert record["before_steps"] == 400
    assert record["steps"] == [
        {"step": 0, "allocated": 700, "reserved": 1_700, "end": 400, "device_used": 6_700},
        {"step": 1, "allocated": 1_200, "reserved": 2_200, "end": 400, "device_used": 7_200},
    ]
    assert (record["gpu"], record["capacity"]) == ("NVIDIA A100-SXM4-80GB", 80_000)
    assert cuda.calls == ["wait", "empty_cache", "reset", "wait", "reset", "wait", "reset"]


def test_history_is_torchs_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    _, cuda = recorded(tmp_path / "deep" / "run.history")
    assert cuda.calls[0] == f"history {HISTORY_EVENTS}"
    file = tmp_path / "deep" / "run.history.rank3.pickle"
    assert pickle.loads(file.read_bytes()) == {"segments": [], "device_traces": [[]]}


def test_validate_compares_allocated_and_reserved_on_the_recorded_gpu() -> None:
    rank, _ = recorded()
    record = {"device": "cuda", "spec": {"model": "gpt2"}, "ranks": [{"rank": 0, **rank}]}
    asked = []

    def estimate(spec: Any) -> Any:
        asked.append(spec.gpu)
        levels = SimpleNamespace(allocated=1_212, reserved=2_200)
        first = SimpleNamespace(allocated=700, reserved=1_700)
        table = SimpleNamespace(ranks=(0,))
        predicted = SimpleNamespace(table=table, peak=levels, first=first, steady=levels)
        return SimpleNamespace(ranks=[predicted])

    rows = {row.metric: row for row in validate(record, estimate)}
    assert asked == ["NVIDIA A100-SXM4-80GB"]
    assert rows["peak.allocated"].error == pytest.approx(0.01)
    assert rows["steady.allocated"].measured == 1_200
    assert rows["first.reserved"].error == 0
    assert len(rows) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_no_gpu_is_said_in_one_sentence() -> None:
    with pytest.raises(LlmemError, match="sees no CUDA device here; use --device cpu"):
        cuda_counters()
