"""litgpt's own model against the figures that its authors printed with two digits."""

from __future__ import annotations

import pytest

from experiments.public_runs.litgpt import lines, predict


def test_the_rows_that_are_expressed() -> None:
    found = list(lines())
    assert len(found) == 7
    assert {line["model"] for line in found} == {
        "phi-1.5 1.3 B", "StableLM Alpha 3 B", "Llama 2 13 B"
    }  # fmt: skip


@pytest.mark.slow
def test_a_row_is_predicted_within_what_was_printed() -> None:
    """4.82 GB: the last digit is 0.2 %."""
    line = next(line for line in lines() if line["batch_size_per_gpu"] == "1")
    result = predict(line["model"], 1, int(line["seq_len"]))
    trained = sum(p.numel for p in result.trace.parameters if p.trainable)
    assert trained == 1_572_864  # as litgpt prints it
    assert result.worst.peak.allocated == pytest.approx(int(line["measured_bytes"]), rel=0.002)
