"""Generation: the real ``generate`` on meta, its cache, and what it asks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.generate import peaks, spec_of
from experiments.real_cpu.models import MODELS
from llmem.cli import main
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import Category, Phase, Trace
from llmem.spec import make_spec
from llmem.trace import generate
from llmem.trace.generate import forwards_traced
from llmem.trace.run import trace_spec

BATCH, PROMPT, NEW, LAYERS = 3, 23, 6, 3
PER_TOKEN = BATCH * 2 * 2 * 8 * 4
"""Bytes of keys and values of llama's one layer: batch x 2 x 2 heads x 8 x fp32."""


def traced(**fields: Any) -> Trace:
    given = {"model": MODELS["llama"], "per_device_train_batch_size": BATCH, "seq_length": PROMPT,
             "max_new_tokens": NEW, "gpu": "cpu", "task": "generate"}  # fmt: skip
    return trace_spec(make_spec(**{**given, **fields}))


def cached(trace: Trace) -> list[int]:
    """Bytes of keys and values alive at the end of each step."""
    table = trace.lifetimes
    keys_and_values = (table.category == Category.KV_CACHE) & (table.nbytes > 8)
    ends = trace.step_ticks[1:-1]
    return [int(table.nbytes[table.alive_at(end) & keys_and_values].sum()) for end in ends]


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen2"])
def test_dynamic_cache_is_that_of_a_real_run(model: str) -> None:
    spec = spec_of(model, "dynamic")
    assert peaks(spec, "meta") == peaks(spec, "cpu")
    found = against_recorder(spec)
    assert found.real == found.predicted
    # A list that indexes (input_ids[:, [-1, 0]]) is a tensor of 16 bytes on the host alone.
    assert found.difference == "" or "16 bytes (lift_fresh" in found.difference


@pytest.mark.parametrize(("model", "case"), [("mistral", "static"), ("llama", "3 beams"),
                                             ("t5", "dynamic"), ("mixtral", "dynamic")])  # fmt: skip
def test_other_caches_have_the_peak_of_a_real_run(model: str, case: str) -> None:
    spec = spec_of(model, case)
    assert max(peaks(spec, "meta")) == max(peaks(spec, "cpu"))


def test_dynamic_cache_grows_by_a_token_at_each_step() -> None:
    assert cached(traced()) == [LAYERS * PER_TOKEN * (PROMPT + new) for new in range(NEW - 1)]


def test_static_cache_has_its_whole_length_from_the_start() -> None:
    whole = LAYERS * PER_TOKEN * (PROMPT + NEW - 1)
    assert cached(traced(cache_implementation="static")) == [whole] * (NEW - 1)


def test_sliding_window_keeps_its_last_tokens() -> None:
    """mistral's window is 16: of 23 tokens joined 15 are seen, then the storage has 15 + 1."""
    prefill, *later = cached(traced(model=MODELS["mistral"]))
    assert prefill == LAYERS * PER_TOKEN * PROMPT
    assert later == [LAYERS * PER_TOKEN * 16] * (NEW - 2)


def test_old_keys_live_until_the_new_are_joined() -> None:
    """At the peak of a decode step the last layer's keys are there twice."""
    trace = traced()
    table = trace.lifetimes
    born = np.isin(table.birth_op, [i for i in range(len(trace.ops)) if trace.op_name(i) == "cat"])
    last = [r for r in np.flatnonzero(born & (table.category == Category.KV_CACHE))
            if trace.ops.step[table.birth_op[r]] == NEW - 1]  # fmt: skip
    size = PER_TOKEN // 2 * (PROMPT + NEW - 1)
    assert [int(table.nbytes[row]) for row in last] == [size] * 2 * LAYERS
    for row in last:
        old = table.alive_at(int(table.birth[row])) & (table.nbytes == size - PER_TOKEN // 2)
        assert (old & (table.category == Category.KV_CACHE)).any()


def test_prefill_keeps_the_logits_of_the_last_token() -> None:
    trace = traced()
    logits = trace.lifetimes.nbytes[trace.lifetimes.category == Category.LOGITS_AND_LOSS]
    assert logits.max() == BATCH * 331 * 4


def test_phases_and_steps() -> None:
    trace = traced()
    phases = {(Phase(int(p)), int(s)) for p, s in zip(trace.ops.phase, trace.ops.step, strict=True)}
    decode = {(Phase.DECODE, step) for step in range(1, NEW)}
    assert phases == {(Phase.BATCH, 0), (Phase.PREFILL, 0)} | decode
    assert len(trace.step_ticks) == NEW + 1


@pytest.mark.parametrize("model", ["llama", "gemma2", "t5"])
def test_long_generation_skips_to_its_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the one traced whole but for ids and positions of the tokens in between."""
    def of_each() -> list[int]:
        spec = make_spec(model=MODELS[model], per_device_train_batch_size=BATCH, seq_length=PROMPT,
                         gpu="cpu", task="generate", max_new_tokens=20)  # fmt: skip
        return peaks(spec, "meta")

    whole = of_each()
    monkeypatch.setattr(generate, "WHOLE", 10)
    part = of_each()
    kept = forwards_traced(20, whole=False)
    assert len(part) == len(kept) == 9
    left_out = (20 - len(kept)) * BATCH * 8 * (1 if model == "t5" else 2)  # T5 has no positions
    expected = [whole[forward] for forward in kept]
    assert part == [n - left_out * (k >= 16) for n, k in zip(expected, kept, strict=True)]


def test_unknown_cache_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "WHOLE", 4)
    monkeypatch.setattr(generate, "growing_layers", lambda cache: None)
    assert len(traced(max_new_tokens=12).step_ticks) == 12 + 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"strategy": "ddp", "gpus": 2}, "one GPU"),
        ({"strategy": "fsdp2", "gpus": 2}, "one GPU"),
        ({"bf16": True}, "--param-dtype bf16"),
        ({"model": MODELS["distilbert"]}, "no generate|cannot generate"),
        ({"model": MODELS["opt"], "seq_length": 126, "max_new_tokens": 9}, "126 tokens and 9 new"),
        ({"packed": True}, "leave out --packed"),
    ],
)
def test_what_cannot_be_generated(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(LlmemError, match=named):
        traced(**fields)


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama"]))
    arguments = ["estimate", str(path), "--task", "generate", "-b", "3", "-s", "23",
                 "--max-new-tokens", "6", "--gpu", "cpu", "--param-dtype", "fp32", "--json", "-"]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rank = document["ranks"][0]
    assert sum(rank["breakdown"].values()) == rank["peak"]["allocated"]
    assert 0 < rank["kv_cache"] <= rank["breakdown"]["activations"]
    assert rank["peak_at"]["phase"] in ("prefill", "decode")
    assert document["optimizer"]["state_bytes"] == 0
    total = LAYERS * PER_TOKEN * (PROMPT + NEW - 1)
    assert f"KV cache (DynamicCache): {total:,} bytes at the last token" in document["assumptions"]


@pytest.mark.parametrize("command", ["plan", "compare", "measure"])
def test_other_commands_are_about_training(command: str) -> None:
    result = CliRunner().invoke(main, [command, "gpt2", "--task", "generate"])
    assert result.exit_code == 2
    assert "known to llmem estimate alone" in result.stderr


FIGURES = [
    ({"param_dtype": "bf16"}, 29.026, 0.001),
    ({"param_dtype": "fp16", "quantization": "int8"}, 15.219, 0.025),
    ({"param_dtype": "fp16", "quantization": "nf4", "bnb_4bit_compute_dtype": "fp32",
      "as_bitsandbytes": "0.43"}, 9.544, 0.003),
]  # fmt: skip
"""GiB by ``torch.cuda.max_memory_allocated`` that "Optimizing LLMs for Speed and Memory" (a guide in
transformers' documentation) prints for OctoCoder, 60 new tokens after a short question; and the
largest relative error. The int8 figure is of a bitsandbytes (2023) whose int8 layers kept a second
layout of a weight while they changed to it."""


@pytest.mark.parametrize(("fields", "printed", "within"), FIGURES)
def test_octocoder_generating_sixty_tokens(
    fields: dict[str, Any], printed: float, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "WHOLE", 8)  # forty layers: nine forwards of the sixty
    monkeypatch.setattr(generate, "EDGE", 1)
    run = estimate(model="octocoder", task="generate", per_device_train_batch_size=1,
                   seq_length=20, max_new_tokens=60, **fields)  # fmt: skip
    assert run.worst.peak.allocated / 2**30 == pytest.approx(printed, rel=within)
    assert run.worst.peak_at.phase == "prefill"


def test_adapters_and_a_module_of_ones_own() -> None:
    trace = traced(method="lora", lora_target_modules="all-linear")
    assert cached(trace) == cached(traced())
    assert {p.name.split(".")[-2] for p in trace.parameters if p.trainable} == {"default"}
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(**MODELS["llama"]))
    assert cached(traced(model=module)) == cached(traced())
    assert module.training
    steps = trace.step_ticks
    assert all(start < stop for start, stop in pairwise(steps))
