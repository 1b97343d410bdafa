"""Published runs read as RunSpecs, graded, and put beside baselines."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments.public_runs.compare import second_of_tool, whole_percent
from experiments.public_runs.table import DATA
from llmem.cli import main
from llmem.errors import LlmemError
from llmem.lifetimes import Lifetimes
from llmem.measure.published import grading
from llmem.measure.published.files import Claim, Run, read
from llmem.measure.published.grading import Graded, Prediction, fits_capped, summary_of
from llmem.spec import RunSpec, make_spec

MIB = 2**20


def test_summary_by_hand() -> None:
    found = summary_of([(90, 100), (100, 100), (130, 100)])
    assert (found.rows, found.median, found.largest) == (3, pytest.approx(0.1), pytest.approx(0.3))
    assert found.mean == pytest.approx(0.4 / 3)
    assert found.under == pytest.approx(1 / 3)
    assert found.margin == pytest.approx(1 / 9)  # 90 must become 100


def test_no_margin_where_nothing_is_under_estimated() -> None:
    assert summary_of([(110, 100)]).margin == 0.0


def test_xmem_rows_carry_what_four_tools_said() -> None:
    runs = read(DATA / "xmem_runs.csv")
    assert len(runs) == 88
    first = runs[0]
    assert first.spec is not None
    assert (first.spec.model, first.spec.optim, first.spec.per_device_train_batch_size) == (
        "gpt-neo-125m", "adam", 11,
    )  # fmt: skip
    assert first.spec.zero_grad == "before_backward"
    assert first.measured == 5676 * MIB
    assert first.claims["xMem"] == Claim(
        5209325568, pytest.approx(22.155, abs=1e-3), True, 5175088906
    )
    assert sum(run.why_not is not None for run in runs) == 2  # ran out of memory


def test_fms_rows_by_flag_version_and_kernels() -> None:
    runs = read(DATA / "fms_acceleration_a100.csv")
    assert len(runs) == 352
    plain = [r for r in runs if r.spec is not None and r.spec.method == "full"]
    assert {r.spec.strategy for r in plain if r.spec} == {"none", "fsdp"}
    flagged = {r.spec.bf16 for r in plain if r.spec and "(4e81c64)" in r.name}
    assert flagged == {True}
    lora = next(r.spec for r in runs if r.spec is not None and r.spec.method == "lora")
    assert (lora.lora_r, lora.autocast_adapter_dtype, lora.as_transformers) == (16, False, "4.39")
    foak = [r for r in runs if "foak" in r.name and r.why_not != "the run did not finish"]
    assert len(foak) == 157
    assert {r.spec.kernels for r in foak if r.spec} == {"foak", "foak-liger"}


def test_every_public_row_has_a_spec_or_a_reason() -> None:
    runs = read(DATA / "public_runs.csv")
    assert len(runs) == 1417
    assert all((run.spec is None) == (run.why_not is not None) for run in runs)
    assert {"huggingface/peft", "pytorch/torchtitan"} <= {r.source for r in runs if r.spec}


def test_peft_rows_bring_their_own_config_and_version() -> None:
    runs = [r for r in read(DATA / "public_runs.csv") if r.source == "huggingface/peft"]
    specs = [r.spec for r in runs if r.spec is not None]
    assert (len(runs), len(specs)) == (192, 142)
    assert len({spec.method for spec in specs}) == 30
    (dropped,) = {spec.notes for spec in specs if spec.notes}
    assert "lora_a_is_blockdiagonal" in dropped[0]
    bone = next(r.spec for r in runs if "peft:BONE" in r.name and r.spec)
    assert (bone.method, bone.peft_config["r"], bone.as_peft) == ("miss", 64, "0.15")
    reasons = {r.why_not for r in runs if r.spec is None}
    assert "the optimizer LoRA-FA, which trains half of each adapter" in reasons


def test_rows_of_one_configuration_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs with a peft config, which is a dictionary, included."""
    made: list[RunSpec] = []
    table = Lifetimes.build([{"nbytes": 1, "birth": 0, "death": 1}])

    def estimated(spec: RunSpec) -> Callable[[str], Prediction]:
        made.append(spec)
        return lambda metric: Prediction(100, 100, 0, 0.0, "forward", table)

    monkeypatch.setattr(grading, "_estimated", estimated)
    config = {"peft_type": "IA3"}
    specs = [make_spec(model="gpt2", peft_config=dict(config), notes=(str(i),)) for i in range(3)]
    nf4 = make_spec(model="llama-3.2-1b", method="qlora", kernels="foak")
    runs = [Run("s", "n", "reserved", 100 + i, spec) for i, spec in enumerate([*specs, nf4])]
    graded, left = grading.grade([*runs, Run("s", "n", "reserved", 1, None, "why")])
    assert (len(graded), len(left), len(made)) == (4, 1, 2)
    report = grading.Report(graded, left, {})
    assert report.methods() == {
        ("s", "ia3", "reserved"): [0, 1, 2], ("s", "qlora foak", "reserved"): [3]
    }  # fmt: skip
    assert [row["rows"] for row in report.to_json()["by_method"]] == [3, 1]


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(LlmemError, match="none of the known sets of columns"):
        read(file)
    done = CliRunner().invoke(main, ["validate", str(file)])
    assert done.exit_code == 2
    with pytest.raises(LlmemError, match="cannot read"):
        read(tmp_path / "missing.csv")


def test_a_capped_run_gives_cached_blocks_back() -> None:
    """64 and 66 MiB one after the other: 130 are reserved, 66 are enough; a cap is grafted on truth."""
    table = Lifetimes.build([
        {"nbytes": 64 * MIB, "birth": 0, "death": 1}, {"nbytes": 66 * MIB, "birth": 2, "death": 3},
    ])  # fmt: skip
    prediction = Prediction(130 * MIB, 130 * MIB, 0, 0.0, "forward", table)
    item = Graded(Run("s", "n", "reserved", 130 * MIB, None), prediction)
    assert fits_capped(item, 66 * MIB)
    assert not fits_capped(item, 65 * MIB)
    more = replace(item, run=replace(item.run, measured=140 * MIB))  # 10 MiB that we do not see
    assert fits_capped(more, 76 * MIB)
    assert not fits_capped(more, 75 * MIB)
    recorded, model = second_of_tool([(item, Claim(1, 1.0, True, 65 * MIB))])
    assert (recorded.oom, model.oom, model.agree) == (1, 1, 1)


def test_caps_are_whole_percents() -> None:
    assert whole_percent(504, 1000) == 500
    assert whole_percent(506, 1000) == 510


def test_validate_prints_errors_baselines_and_reasons(tmp_path: Path) -> None:
    with (DATA / "xmem_runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    clean = next(r for r in lines if r["model"] == "distilbert/distilgpt2" and r["batch"] == "22")
    oom = next(r for r in lines if r["row_class"] == "ceiling(OOM)")
    few = tmp_path / "few.csv"
    with few.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(clean))
        writer.writeheader()
        writer.writerows([clean, oom])
    done = CliRunner().invoke(
        main, ["validate", str(few), "--baselines", "dnnmem,params-x4", "--json", "-"]
    )
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert abs(row["error"]) < 0.01
    assert row["baselines"]["params-x4"] == 4 * 81_912_576 * 4
    assert row["baselines"]["dnnmem"] > 2**30
    assert document["summary"][0]["baselines"]["dnnmem"]["ours"]["rows"] == 1
    assert document["not_expressed"] == [
        {
            "source": "xMem",
            "rows": 1,
            "why": "it ran out of memory: the figure is what it had reached",
        }
    ]
