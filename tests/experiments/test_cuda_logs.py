"""The hand-written decoder, traced on meta, beside what CUDA's allocator recorded of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from experiments.cuda_logs.match import (
    Allocation,
    Side,
    common,
    main,
    match,
    recorded,
    trace_step,
    traced,
)

HERE = Path(__file__).parent / "data"
GPU = Path(__file__).parents[1] / "gpu" / "data"


@pytest.mark.parametrize(
    ("log", "context", "autocast", "is_inference"),
    [
        (HERE / "medium_ctx128_training.events.csv.gz", 128, None, False),
        (GPU / "medium_ctx512_training.events.csv.gz", 512, "bfloat16", False),
        (GPU / "medium_ctx128_inference.events.csv.gz", 128, None, True),
    ],
    ids=["fp32 training", "bf16 training", "fp32 inference"],
)
def test_every_allocation_in_order(
    log: Path, context: int, autocast: str | None, is_inference: bool
) -> None:
    """Each request of 2 KiB and more, and the peak to within a part in five thousand."""
    ours = traced(trace_step(context, autocast, is_inference=is_inference))
    theirs = recorded(log)
    assert [a.nbytes for a in ours.allocations] == [a.nbytes for a in theirs.allocations]
    assert ours.active == pytest.approx(theirs.active, rel=2e-4)
    assert ours.requested == pytest.approx(theirs.requested, rel=2e-4)


def test_the_longest_common_subsequence() -> None:
    assert common("abcbdab", "bdcaba") == common(list("abcbdab"), list("bdcaba"))
    pairs = common("abcbdab", "bdcaba")
    assert len(pairs) == 4
    assert all("abcbdab"[i] == "bdcaba"[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert common("", "a") == [] == common("a", "b")


def test_shares_are_of_either_side() -> None:
    def side(*sizes: int) -> Side:
        return Side(100, 90, [Allocation(n, "") for n in sizes])

    result = match(side(1, 2, 3, 4), side(1, 3))
    assert (result.of_recorded, result.of_traced) == (1.0, 0.5)
    assert result.peak_error == 0.0


def test_the_command_prints_all_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = GPU / "medium_ctx128_inference.events.csv.gz"
    monkeypatch.setattr("sys.argv", ["match", "--log", str(log), "--ctx", "128", "--inference"])
    main()
    out = capsys.readouterr().out
    assert "peak active: traced 1,658.3 MiB, recorded 1,658.4 MiB" in out
    assert "100.00% of the log's 1232, 100.00% of the trace's 1232" in out
