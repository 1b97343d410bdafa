"""The paper's tables: published cells, the rule for batches, and what the equations give there."""

from __future__ import annotations

import pytest

from experiments.paper import figures, parallel, setting, table2, table3


def test_published_errors_follow_from_the_cells() -> None:
    """The errors printed in Table 2 (0.4, 1.6, 1.6, 0.8; 36.5, 42.5, 34.3, 57.1 %)."""
    printed = {"llmem_mb": (0.4, 1.6, 1.6, 0.8), "dnnmem_mb": (36.5, 42.5, 34.3, 57.1)}
    for column, errors in printed.items():
        for row, error in zip(setting.rows("table2"), errors, strict=True):
            found = abs(float(row[column]) / float(row["truth_mb"]) - 1)
            assert round(100 * found, 1) == error


def test_batches_by_the_equations_lie_where_the_published_estimate_does() -> None:
    assert table2.batch_by("llmem-code", "bloom-560m") == 9
    assert table2.nearest_batch("llmem-code", "bloom-560m", 16578, 614) == 10
    assert table2.nearest_batch("llmem-code", "codegen-350m", 16236, 532) == 33


def test_the_traced_loss_is_that_of_4_29() -> None:
    """Three fp16 buffers of logits in OPT; the peak of the loss is the step's."""
    worst = setting.traced("opt-125m", 4).worst
    one, shifted = 4 * 512 * 50272 * 2, 4 * 511 * 50272 * 2
    counted = worst.breakdown["logits_and_loss"]
    assert one + 2 * shifted <= counted <= one + 2 * shifted + 2**20
    assert worst.peak_at.phase == "forward"


def test_a_full_card_shows_the_clipped_truth() -> None:
    """Without a limit the run of the largest batch takes more than the card; on the card it fits."""
    assert setting.fits("opt-125m", 69)
    assert not setting.fits("opt-125m", 70)
    result = setting.traced("opt-125m", 69)
    assert result.worst.peak.device > 16384 * setting.MIB
    assert setting.clipped_mb(result) == pytest.approx(16378, rel=0.02)


def test_algorithm_1_beside_table_3(capsys: pytest.CaptureFixture[str]) -> None:
    table3.main(["--no-trace"])
    out = capsys.readouterr().out
    assert "published one for 6 of 9 (base 600 MiB)" in out
    assert "published one for 7 of 9 (base 1500 MiB)" in out
    assert "llama-7b: LLMem picks CPU offload" in out


def test_four_gpus_split_tensors_under_gemini() -> None:
    """4TP of the paper: whole logits on every GPU, a quarter of the split weights' states."""
    found = parallel.traced("opt-125m", 4, 4)
    assert [rank.table.ranks for rank in found.ranks] == [(0, 1, 2, 3)]
    one, shifted = 4 * 512 * 50272 * 2, 4 * 511 * 50272 * 2
    assert found.worst.breakdown["logits_and_loss"] >= one + 2 * shifted
    whole = sum(p.numel() for p in setting.shape("opt-125m").parameters())
    split = sum(p.numel for p in found.trace.parameters if p.key in found.trace.sharded)
    rest = sum(p.numel for p in found.trace.parameters) - split
    assert 4 * split + rest == whole
    assert found.optimizer["state_elements"] == 2 * (split + rest)
    assert parallel.fits("opt-125m", 4, 4)


def test_figure_7_models_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert not setting.fits("opt-1.3b", 1)
    assert (setting.baseline_mb("llmem-paper", "opt-1.3b", 1) or 0) > setting.CAPACITY_MB
    assert (setting.baseline_mb("dnnmem", "opt-1.3b", 1) or 0) < setting.CAPACITY_MB
    assert figures._side(16385) == "above"
