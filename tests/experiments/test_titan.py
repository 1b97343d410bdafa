"""The published FSDP2 run with activation checkpointing, to a fifth of a percent."""

from __future__ import annotations

import pytest

from experiments.public_runs.titan import RUNS, predict


@pytest.mark.slow
def test_the_active_peak_of_an_eager_run_is_predicted() -> None:
    run = next(run for run in RUNS if run.checkpointing == "full")
    assert run.active is not None
    peak = predict(run).worst.peak
    assert peak.allocated == pytest.approx(run.active, rel=0.002)
