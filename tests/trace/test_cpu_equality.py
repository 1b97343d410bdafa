"""Predicted against real steps on CPU: a fast part of ``experiments/real_cpu``."""

from __future__ import annotations

import re

import pytest

from experiments.real_cpu.cases import CASES, spec_of
from experiments.real_cpu.compare import against_profiler, against_recorder
from experiments.real_cpu.models import MODELS

NAMES = list(CASES)
ONE_EACH = [(model, NAMES[index % len(NAMES)]) for index, model in enumerate(MODELS)]
"""Every model once, every case at least twice."""

@pytest.mark.parametrize(("model", "case"), ONE_EACH)
def test_births_and_deaths_are_those_of_a_real_run(model: str, case: str) -> None:
    found = against_recorder(spec_of(model, case))
    assert found.real == found.predicted
    assert found.difference == ""


PROFILED = [
    ("llama", "sdpa fp32 adamw-single ckpt"),
    ("qwen3", "eager bf16 adamw-single ckpt"),
    ("mixtral", "sdpa fp32 sgd"),
    ("gpt2", "eager fp32 sgd ckpt"),
    ("opt", "sdpa fp32 lora adamw-single"),
]


@pytest.mark.parametrize(("model", "case"), PROFILED)
def test_allocations_are_those_the_profiler_sees(model: str, case: str) -> None:
    """No mode is active in that run, so this also holds autograd's in-place work to account."""
    found = against_profiler(spec_of(model, case))
    assert found.only_real == {}
    assert found.only_predicted == {}
    # What is left are scalars: a Python number that a product keeps for backward is 8 bytes.
    assert 0 <= found.real_without_scratch - found.predicted < 0.0002 * found.predicted
    gap = found.real - found.real_without_scratch
    # oneDNN's scratch of a bf16 product has a size of the processor's and its threads'.
    assert gap < 0.02 * found.predicted or re.match(r"1 x \d+ bytes in mm", found.scratch)
