"""What is refused before anything starts, and how records are written."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from llmem.errors import LlmemError
from llmem.measure import measure
from llmem.measure import validate as validate_record
from llmem.measure.launch import SCHEMA, SMALL, failure, read_record, spec_json, write_record
from llmem.spec import make_spec

RECORD: dict[str, Any] = {"schema": SCHEMA, "spec": {"model": "gpt2"}, "ranks": [{"rank": 0}]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps 0 measures nothing"),
        ({"fake_world": 0}, "--fake-world 0 is no number of ranks"),
        ({"history": True}, "needs a place: give --out"),
        ({"device": "tpu"}, "--device tpu is not known; use cpu or cuda"),
    ],
)
def test_impossible_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmemError, match=message):
        measure(make_spec(model="gpt2"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(LlmemError, match="sees no CUDA device here; use --device cpu"):
        measure(make_spec(model="gpt2"), device="cuda")


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LlmemError, match="need 4 GPUs and 1 are here; use --fake-world 4"):
        measure(make_spec(model="gpt2", gpus=4, strategy="ddp"), device="cuda")


def test_a_module_cannot_travel() -> None:
    with pytest.raises(LlmemError, match="cannot be sent to the measuring processes"):
        spec_json(make_spec(model=torch.nn.Linear(2, 2)))


def test_a_spec_survives_json() -> None:
    spec = make_spec(model={"model_type": "gpt2"}, gpus=2, strategy="fsdp2", bf16=True)
    fields = spec_json(spec)
    assert fields == {"model": {"model_type": "gpt2"}, "gpus": 2, "strategy": "fsdp2", "bf16": True}
    assert make_spec(**fields) == spec


def test_small_records_stay_text_and_large_ones_are_packed(tmp_path: Path) -> None:
    small = write_record(RECORD, tmp_path / "a" / "small.json")
    assert small.name == "small.json" and read_record(small) == RECORD
    large = {**RECORD, "notes": ["x" * SMALL]}
    packed = write_record(large, tmp_path / "large.json")
    assert packed.name == "large.json.gz" and read_record(packed) == large
    again = write_record(large, tmp_path / "large.json")
    assert gzip.decompress(again.read_bytes()) == gzip.decompress(packed.read_bytes())


@pytest.mark.parametrize("text", ["not json", "[]", '{"schema": "llmem.estimate/1"}'])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(LlmemError, match=r"x\.json"):
        read_record(path)


def test_a_rank_that_the_estimate_lacks() -> None:
    class Empty:
        ranks: tuple[()] = ()

    record = {**RECORD, "device": "cpu"}
    with pytest.raises(LlmemError, match="says nothing about rank 0"):
        validate_record(record, lambda spec: Empty())


def test_a_failed_process_is_reported_in_one_sentence(tmp_path: Path) -> None:
    trace = "Traceback:\n  line\n[rank1]: RuntimeError: shape mismatch\nChildFailedError: x"
    assert failure(tmp_path, trace).endswith("run failed: [rank1]: RuntimeError: shape mismatch")
    assert failure(tmp_path, "").endswith("run failed: no message")
    (tmp_path / "error1.txt").write_text("fp16 needs a GPU; use --bf16")
    assert failure(tmp_path, trace) == "fp16 needs a GPU; use --bf16"
