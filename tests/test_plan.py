"""Every batch size from two traces, and the strategies that fit."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import llmem
from llmem.cli import main
from llmem.errors import LlmemError
from llmem.gpu.alloc_conf import AllocConf
from llmem.lifetimes import Lifetimes
from llmem.scaling import scaled
from llmem.spec import make_spec
from llmem.trace.run import trace_spec
from tests.conftest import TINY


def trace_at(batch: int):  # type: ignore[no-untyped-def]
    return trace_spec(
        make_spec(model=TINY, per_device_train_batch_size=batch, seq_length=32, gpu="cpu")
    )


def test_a_third_batch_size_lies_on_the_line() -> None:
    lines = scaled(trace_at(2), trace_at(4), 2, 4)
    assert lines is not None
    real = trace_at(7)
    assert np.array_equal(lines.at(7).lifetimes.nbytes, real.lifetimes.nbytes)


def test_different_steps_have_no_line() -> None:
    other = trace_spec(
        make_spec(
            model=TINY, per_device_train_batch_size=4, seq_length=32, gpu="cpu",
            gradient_checkpointing=True,
        )
    )
    assert scaled(trace_at(2), other, 2, 4) is None


def test_the_batch_that_is_reported_is_the_largest_that_fits() -> None:
    spec = make_spec(model="gpt2", seq_length=1024, gpu="t4", param_dtype="fp32")
    option = llmem.plan(spec).options[0]
    assert option.strategy == "none"
    for batch, fits in ((option.batch, True), (option.batch + 1, False)):
        chosen = spec.model_copy(update={"per_device_train_batch_size": batch})
        found = llmem.estimate(chosen).fit
        assert found is not None
        assert found.fits is fits


def test_the_pick_has_the_largest_batch() -> None:
    spec = make_spec(model="gpt2", seq_length=512, gpus=4, strategy="ddp", gpu="t4")
    result = llmem.plan(spec, strategies=["ddp", "fsdp2"])
    by_name = {option.strategy: option.batch for option in result.options}
    assert by_name["fsdp2"] >= by_name["ddp"] > 0
    assert result.pick is not None
    assert result.pick.batch == max(by_name.values())


def test_every_rank_must_fit_not_only_that_of_the_highest_peak() -> None:
    module = import_module("llmem.estimate")
    result = llmem.estimate(make_spec(model=TINY, per_device_train_batch_size=1, seq_length=8, gpu="t4"))
    gib = 2**30

    def rank(number: int, *rows: dict[str, int]) -> Any:
        table = replace(result.worst.table, lifetimes=Lifetimes.build(rows))
        return replace(result.worst, rank=number, table=table)

    # Of a T4's 14.56 GiB: 9 freed before 10 are asked for (19 reserved without a limit), and 15 at once.
    first = rank(0, {"nbytes": 9 * gib, "birth": 0, "death": 1}, {"nbytes": 10 * gib, "birth": 2})
    second = rank(1, {"nbytes": 15 * gib, "birth": 0})
    alone = module._fit([first], result.device, AllocConf(), {})
    assert (alone.fits, alone.retries, alone.device) == (True, 1, 10 * gib)
    both = module._fit([first, second], result.device, AllocConf(), {})
    assert not both.fits
    assert "on rank 1: " in both.sentence


def test_a_toy_on_a_large_card_ends_at_the_limit() -> None:
    result = llmem.plan(make_spec(model=TINY, seq_length=32, gpu="t4"), max_batch=6)
    option = result.options[0]
    assert (option.batch, option.limited, option.fits_beyond) == (6, True, ())
    assert "no more than 6 (192 tokens per GPU) were tried" in option.sentence
    assert result.assumptions[0].startswith("largest batch: it fits, and so do those below it")


def test_the_limit_is_one_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(import_module("llmem.plan")), "MAX_TOKENS", 100)
    option = llmem.plan(make_spec(model=TINY, seq_length=32, gpu="t4")).options[0]
    assert (option.batch, option.limited) == (3, True)


def test_batches_share_one_trace_of_the_optimizer() -> None:
    from llmem.parallel import sharded_step

    sharded_step._known.cache_clear()
    spec = make_spec(model=TINY, seq_length=32, gpus=2, strategy="fsdp2", gpu="t4")
    llmem.plan(spec, strategies=["fsdp2"], max_batch=8)
    assert sharded_step._known.cache_info().misses <= 2  # one for each kind of rank


def test_plan_needs_a_gpu() -> None:
    with pytest.raises(LlmemError, match="--gpu"):
        llmem.plan(make_spec(model="gpt2"))


def test_compare_has_every_baseline_or_its_reason() -> None:
    from llmem.baselines.base import NAMES

    done = CliRunner().invoke(
        main,
        ["compare", "opt-125m", "-b", "10", "-s", "512", "--gradient-checkpointing",
         "--param-dtype", "fp16", "--measured", "3000000000", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["measured"] == 3_000_000_000
    assert set(document["estimates"]) == {"llmem", *NAMES}
    for entry in document["estimates"].values():
        assert (entry["bytes"] is None) == (entry["why_not"] is not None)
    parts = document["estimates"]["llmem-code"]["parts"]
    assert parts["chunk_elements"] == 44_101_632
    assert parts["estimate_without_base"] == 3124 * 2**20


def test_algorithm_1_by_the_equations_and_by_trace() -> None:
    from llmem.plan_llmem import plan_llmem

    spec = make_spec(model="opt-125m", seq_length=2048, gpus=4, strategy="gemini", gpu="v100-16gb")
    paper = plan_llmem(spec, by="paper", base_bytes=600 * 2**20)
    assert [m.method for m in paper.methods] == ["CDP", "ADP", "TP", "DP+TP"]
    assert paper.pick == "CDP"  # 1.5 times as good as sharding, where it fits
    assert paper.methods[0].score == 1.5 * 4 * paper.methods[0].batch
    traced = plan_llmem(spec, by="trace")
    assert traced.pick == "CDP"
    assert traced.methods[1].batch >= traced.methods[0].batch > 0  # sharding leaves more room
    assert all(m.why_not is None for m in traced.methods)
    # A GPU of TP holds a quarter of the split weights and sees the whole batch; scores count it once.
    assert traced.methods[2].batch >= traced.methods[1].batch
    assert traced.methods[2].score == traced.methods[2].batch
    assert all(
        m.device_bytes is not None and m.device_bytes <= traced.capacity
        for m in traced.methods
        if m.batch
    )


def test_algorithm_1_on_the_command_line() -> None:
    done = CliRunner().invoke(
        main,
        ["plan", "llama-7b", "-s", "512", "--gpus", "4", "--gpu", "v100-16gb",
         "--algorithm", "llmem", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["pick"] == "CPU offload"
    assert [m["batch"] for m in document["methods"]] == [0, 0, 0, 0]
