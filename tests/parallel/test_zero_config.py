"""ds_configs: defaults, "auto", unknown keys, contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.parallel.zero.options import ZeroOptions, fill_auto, options_of
from llmem.spec import make_spec
from tests.parallel.toy import toy_trace

MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 40}


def options(config: Any = None, strategy: str = "zero2", **fields: Any) -> ZeroOptions:
    spec = make_spec(model=MODEL, strategy=strategy, gpus=2, deepspeed=config, **fields)
    return options_of(toy_trace(), spec)


def test_deepspeeds_defaults() -> None:
    two, three = options(), options(strategy="zero3")
    assert two.reduce_bucket == three.reduce_bucket == 500_000_000
    assert (two.overlap, three.overlap) == (False, True)
    assert three.prefetch_bucket == 50_000_000
    assert three.persistence == 100_000
    assert three.zero.sub_group_size == three.zero.max_live_parameters == 10**9


def test_auto_is_what_trainer_fills_in() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    auto = {**dict.fromkeys(names, "auto"), "stage3_param_persistence_threshold": "auto"}
    found = options({"zero_optimization": auto}, "zero3")
    assert (found.reduce_bucket, found.prefetch_bucket, found.persistence) == (1600, 1440, 400)
    filled, notes = fill_auto({"zero_optimization": auto}, make_spec(model=MODEL))
    assert filled["zero_optimization"]["reduce_bucket_size"] == 1600
    assert len(notes) == 3


def test_a_file_and_its_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_sise": 5, "overlap_comm": True}
    path.write_text(json.dumps({"zero_optimization": zero, "steps_per_print": 3, "foo": 1}))
    found = options(str(path))
    assert found.overlap
    told = [note for note in found.notes if "unknown key" in note]
    assert told == [
        "ds_config: unknown key 'zero_optimization.reduce_bucket_sise (is reduce_bucket_size "
        "meant?)' has no effect here",
        "ds_config: unknown key 'foo' has no effect here",
    ]


def test_dtypes() -> None:
    bf16 = options({"data_types": {"grad_accum_dtype": "fp32"}}, bf16=True)
    assert (bf16.communication_dtype, bf16.accumulation_dtype) == ("bfloat16", "float32")
    assert options({"communication_data_type": "fp32"}, bf16=True).communication_dtype == "float32"


def test_offload_from_config_or_option() -> None:
    assert options(offload="optimizer").offload_optimizer == "cpu"
    nvme = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x"}}}
    assert options(nvme, "zero3").offload_param == "nvme"
    assert options({"zero_optimization": {"cpu_offload": True}}).offload_optimizer == "cpu"


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, {}, "stage 3 and --strategy is zero2"),
        ({"zero_optimization": {"stage": 7}}, {}, "zero_optimization.stage = 7"),
        ({"train_micro_batch_size_per_gpu": 3}, {}, "the run 8"),
        ({"train_batch_size": 3}, {}, "the run 16"),
        ({"bf16": {"enabled": True}}, {}, "lacks --bf16"),
        ({"fp16": {"enabled": False}}, {"fp16": True}, "has --fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "both bf16 and fp16"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, {}, "stage 3 only"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, "stage 3 only"),
        ({"zero_optimization": {"allgather_bucket_size": 3}}, {}, "odd"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, {}, "at least 1"),
        ({"zero_optimization": {"compute_grad_norm": False}}, {}, "compute_grad_norm"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, {}, "not supported yet"),
        ({}, {"offload": "all"}, "only zero3"),
        (3, {}, "dict or the path"),
        ("/nowhere/ds.json", {}, "cannot be read"),
    ],
)
def test_contradictions_are_one_sentence(config: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LlmemError, match=words) as caught:
        options(config, **fields)
    assert "\n" not in str(caught.value)


def test_bf16_optimizer_is_not_modelled() -> None:
    with pytest.raises(LlmemError, match="BF16_Optimizer"):
        options({"data_types": {"grad_accum_dtype": "fp32"}}, "zero1", bf16=True)
