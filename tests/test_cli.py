"""The command line as a newcomer meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmem.cli import main

from .conftest import TINY


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_help_and_models_import_nothing_heavy() -> None:
    code = (
        "import sys; from llmem.cli import main\n"
        "for command in (['--help'], ['models'], ['estimate', '--help']):\n"
        "    try: main(command, standalone_mode=False)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'networkx', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_json_to_standard_output_is_all_there_is(config: str) -> None:
    code, out, _ = run("estimate", config, "-b", "2", "-s", "16", "--json", "-")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "llmem.estimate/1"
    assert set(document["peak"]) == {"requested", "allocated", "reserved", "device"}
    rank = document["ranks"][0]
    assert sum(rank["breakdown"].values()) == rank["peak"]["allocated"]
    assert document["fits"] is None
    assert document["steps"]["first"]["allocated"] <= document["peak"]["allocated"]


def test_optimizer_state_is_two_copies_and_a_step(config: str) -> None:
    _, out, _ = run("estimate", config, "-b", "1", "-s", "8", "--json", "-")
    document = json.loads(out)
    # 2 layers of 4 attention (32x32 + 32x16 twice + 32x32), 3 MLP (32x48), 2 norms; norm, embed, head
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
    parameters = 2 * layer + 32 + 2 * 99 * 32
    tensors = 2 * 9 + 3
    assert document["optimizer"]["state_elements"] == 2 * parameters + tensors
    assert document["optimizer"]["state_bytes"] == 4 * (2 * parameters + tensors)


def test_report_names_every_level_and_assumption(config: str) -> None:
    code, out, _ = run("estimate", config, "-b", "1", "-s", "8", "--gpu", "t4", "--explain")
    assert code == 0
    for word in ("requested", "allocated", "reserved", "nvidia-smi", "Assumed", "SDPA kernel",
                 "fits t4", "Largest storages"):  # fmt: skip
        assert word in out


def test_report_says_whose_figures_it_shows(config: str) -> None:
    alone = ["estimate", config, "-b", "2", "-s", "8"]
    assert "rank" not in run(*alone)[1]
    _, out, _ = run(*alone, "--strategy", "ddp", "--gpus", "8")
    assert out.splitlines()[1].endswith("rank 0 of 8 (all alike)")
    _, out, _ = run(*alone, "--pp", "2", "--gpus", "2", "--micro-batches", "2", "--json", "-")
    document = json.loads(out)
    levels = {rank["rank"]: rank["peak"]["device"] for rank in document["ranks"]}
    assert document["worst_rank"] == max(levels, key=levels.__getitem__)
    _, out, _ = run(*alone, "--pp", "2", "--gpus", "2", "--micro-batches", "2")
    assert out.splitlines()[1].endswith(f"worst rank {document['worst_rank']} of 2")


def test_clipping_by_default_is_among_the_assumptions(config: str) -> None:
    _, out, _ = run("estimate", config, "-b", "1", "-s", "8", "--json", "-")
    note = "gradients: clipped to norm 1 (TrainingArguments' default; --max-grad-norm 0 turns it off)"
    assert json.loads(out)["assumptions"].count(note) == 1
    _, out, _ = run("estimate", config, "-b", "1", "-s", "8", "--max-grad-norm", "0", "--json", "-")
    assert "clipped" not in out


def test_too_small_a_gpu_says_which_request_fails() -> None:
    code, out, _ = run("estimate", "gpt2", "-b", "256", "-s", "1024", "--gpu", "t4", "--json", "-")
    assert code == 0
    document = json.loads(out)
    assert document["fits"] is False
    assert "out of memory on t4" in document["fit"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["estimate", "lama-3.1-8b"], "llama-3.1-8b"),
        (["estimate", "gpt2", "-b", "0"], "per_device_train_batch_size"),
        (["estimate", "gpt2", "-s", "4096"], "1024"),
        (["estimate", "gpt2", "--optim", "adamw_torhc"], "adamw_torch"),
        (["estimate", "gpt2", "--gpu", "h10"], "h100"),
        (["estimate", "gpt2", "--bf16", "--fp16"], "exclude"),
        (["estimate", "gpt2", "--gpus", "8"], "--strategy"),
        (["estimate", "gpt2", "--alloc-conf", "expandable:True"], "expandable"),
        (["estimate", "gpt2", "--method", "lora", "--lora-target-modules", "nothing"], "peft"),
        (["estimate"], "missing argument 'MODEL'; see `llmem estimate --help`"),
        (["estimate", "gpt2", "--optimizer", "x"], "see `llmem estimate --help`"),
        (["estimate", "gpt2", "--gradient-checkpoint"], "(did you mean --gradient-checkpointing?)"),
        (["estimate", "gpt2", "-b", "two"], "'two' is not a valid integer"),
        (["estimate", "gpt2", "-b"], "option '-b' requires an argument; see `llmem estimate --help`"),
        (["estimate", "gpt2", "--gpu", ""], "--gpu is empty"),
        (["estimat", "gpt2"], "see `llmem --help`"),
        (["--verbos", "gpus"], "no such option"),
        (["plan", "gpt2", "--strategies", "ddp"], "--gpu NAME"),
        (["plan", "gpt2", "--gpu", "t4", "--strategies", "zero4"], "zero4"),
        (["compare", "gpt2", "--gpu", "h10"], "h100"),
        (["measure", "gpt2", "--gpu", "h10"], "h100"),
        (["measure", "gpt2", "--fake-world", "2", "--strategy", "ddp"], "--gpus"),
        (["replay", "nowhere.csv"], "does not exist"),
        (["validate"], "missing argument"),
        (["validate", "nowhere.json"], "No such file"),
        (["validate", "nowhere.csv", "--boundaries"], "--boundaries"),
        (["validate", "nowhere.json", "--baselines", "dnnmem"], "llmem compare"),
        (["models", "gpt2"], "unexpected extra argument"),
        (["gpus", "--json"], "requires an argument"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_config_without_a_model_class(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 3}))
    code, _, err = run("estimate", str(path))
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_page_escapes_what_comes_from_a_config(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    page = tmp_path / "page.html"
    code, _, err = run("estimate", str(folder), "-b", "1", "-s", "8", "--html", str(page))
    assert code == 0, err
    text = page.read_text()
    assert "<script>alert(1)" not in text
    assert "At the peak" in text


def test_page_of_a_pipeline_has_its_ranks_and_what_frees(config: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    code, out, err = run(
        "estimate", config, "-b", "2", "-s", "8", "--pp", "2", "--gpus", "2", "--micro-batches", "2",
        "--html", str(page), "--explain", "--json", "-",
    )  # fmt: skip
    assert code == 0, err
    text = page.read_text()
    worst = json.loads(out)["worst_rank"]
    assert f"figures of <b>worst rank {worst} of 2</b>" in text
    assert "<h2>Ranks</h2>" in text
    freed = {held["freed_by"] for held in json.loads(out)["explain"] if held["kind"] == "activations"}
    assert "not in these steps" not in freed  # a pipeline's activations die in its backward


def test_snapshot_is_read_by_our_own_replay(config: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "memory.pickle"
    code, out, err = run(
        "estimate", config, "-b", "1", "-s", "8", "--snapshot", str(snapshot), "--json", "-"
    )
    assert code == 0, err
    code, replayed, err = run("replay", str(snapshot), "--json", "-")
    assert code == 0, err
    document = json.loads(replayed)
    assert document["first_difference"] is None
    assert document["allocated_peak_replayed"] == json.loads(out)["peak"]["allocated"]
