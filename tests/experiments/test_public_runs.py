"""A few rows of the published runs: enough to see that the experiments still hold."""

from __future__ import annotations

import pytest

from experiments.public_runs import liger_ops, xmem
from experiments.public_runs.liger_kernels import KERNELS
from experiments.public_runs.table import MIB, Row, summarise


def test_errors_are_signed_and_summarised() -> None:
    rows = [Row("a", 100, 101), Row("b", 100, 90), Row("c", 100, 100)]
    assert [row.error for row in rows] == pytest.approx([0.01, -0.1, 0.0])
    summary = summarise(rows, 0.03)
    assert (summary.rows, summary.median, summary.within) == (3, pytest.approx(0.01), 2 / 3)


def stock(op: str, x: int, date: str, mode: str = "full") -> Row:
    (run,) = [
        run
        for run in liger_ops.runs()
        if (run.op, run.setting.x, run.setting.date, run.mode, run.grade)
        == (op, x, date, mode, "A")
    ]
    return liger_ops.predict(run, liger_ops.STOCK[op])


@pytest.mark.parametrize(
    ("op", "x", "date", "mode"),
    [
        ("cross_entropy", 4096, "2024-09-03", "full"),
        ("rms_norm", 1024, "2024-09-03", "full"),
        ("layer_norm", 2048, "2025-07-17", "full"),
        ("swiglu", 1024, "2024-09-03", "full"),
        ("kl_div", 4096, "2024-09-04", "full"),
        ("fused_linear_cross_entropy", 4096, "2024-11-22", "full"),
        ("tiled_geglu", 1024, "2025-11-11", "forward"),
        ("tiled_swiglu", 1024, "2025-11-11", "backward"),
    ],
)
def test_stock_ops_on_gpus(op: str, x: int, date: str, mode: str) -> None:
    assert abs(stock(op, x, date, mode).error) < 0.001


@pytest.mark.parametrize(
    ("op", "provider"),
    [("cross_entropy", "liger"), ("layer_norm", "liger"), ("fused_linear_cross_entropy", "liger"),
     ("swiglu", "liger_triton"), ("rope", "liger_triton"), ("fused_moe", "liger"),
     ("tvd", "liger"), ("kl_div", "liger_cutile"), ("tiled_swiglu", "liger_tiled"),
     ("fused_linear_grpo_loss_token", "liger"), ("megatron_cross_entropy", "megatron-fused")],
)  # fmt: skip
def test_liger_ops_on_gpus(op: str, provider: str) -> None:
    run = next(r for r in liger_ops.runs() if (r.op, r.setting.provider) == (op, provider))
    assert abs(liger_ops.predict(run, KERNELS[op, provider]).error) < 0.01


def test_a_whole_run_with_fixed_shapes() -> None:
    run = next(r for r in xmem.runs() if r.fixed_shape and r.optimizer == "SGD")
    assert run.ground == 14_524 * MIB
    assert abs(xmem.predict(run).error) < 0.005


def test_gradients_that_live_through_forward_are_seen_by_nvml() -> None:
    """Equal runs but for the moment of zero_grad, on two cards: 7,144 and 7,738 MiB."""
    runs = {
        run.zero_grad: run
        for run in xmem.runs()
        if (PRESET[run.model], run.optimizer, run.batch) == ("gpt-neo-125m", "SGD", 24)
    }
    rows = {moment: xmem.predict(run) for moment, run in runs.items()}
    assert set(rows) == {"before_forward", "before_backward"}
    assert all(abs(row.error) < 0.01 for row in rows.values())


PRESET = xmem.PRESETS
