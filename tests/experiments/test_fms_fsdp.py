"""Two of the published FSDP1 runs: the optimizer's step, and LoRA's held inputs of frozen blocks."""

from __future__ import annotations

import pytest

from experiments.public_runs import fms_fsdp


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mistral-7b full 2 GPUs, batch 2, bf16 mixed, tf 4.44 (4e81c64)",
        "mistral-7b lora 2 GPUs, batch 2, bf16, tf 4.48 (24bdadb)",
    ],
)
def test_allocated_peak_is_the_published_one(name: str) -> None:
    (measured,) = [row for row in fms_fsdp.rows() if row.name == name]
    row = fms_fsdp.predict(measured)
    assert row is not None
    assert abs(row.error) < 0.0005
