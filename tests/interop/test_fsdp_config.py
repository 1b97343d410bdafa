"""FSDP's settings as accelerate's files and TrainingArguments write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.interop.config_files import read_config
from llmem.interop.fsdp_config import trainer_fsdp
from llmem.spec import make_spec


def fields_of(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    fields = read_config(path).fields
    make_spec(model="gpt2", **{"gpus": 4, **fields})  # each is a RunSpec's
    return fields


def test_hybrid_sharding_makes_a_copy_on_each_machine(tmp_path: Path) -> None:
    text = (
        "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\n"
        "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD_ZERO2, fsdp_offload_params: true}\n"
    )
    assert fields_of(tmp_path, text) == {
        "gpus": 16, "strategy": "fsdp", "dp_replicate_size": 2, "reshard_after_forward": False,
        "use_orig_params": True, "offload": "all",
    }  # fmt: skip


def test_copies_and_parts_of_fsdp2(tmp_path: Path) -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 2,\n"
        "  parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 1}\n"
    )
    assert fields_of(tmp_path, text) == {
        "gpus": 8, "strategy": "fsdp2", "fsdp_units": "accelerate", "reduce_dtype": "fp32",
        "dp_replicate_size": 2, "hybrid_shard": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "wrapped"),
    [
        ("fsdp_transformer_layer_cls_to_wrap: 'A, B'", {"fsdp_transformer_layer_cls_to_wrap": ("A", "B")}),
        (
            "fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 7",
            {"fsdp_min_num_params": 7},
        ),
        ("fsdp_auto_wrap_policy: NO_WRAP", {"fsdp_transformer_layer_cls_to_wrap": ()}),
        ("fsdp_min_num_params: 7", {}),  # says nothing without its policy
    ],
)
def test_what_is_wrapped(tmp_path: Path, section: str, wrapped: dict[str, Any]) -> None:
    text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, {section}}}\n"
    fields = fields_of(tmp_path, text)
    said = {k: v for k, v in fields.items() if k.startswith("fsdp_")}
    assert said == {"fsdp_units": "accelerate", **wrapped}


def test_training_arguments(tmp_path: Path) -> None:
    text = (
        "bf16: true\nfsdp: true\n"
        "fsdp_config: {transformer_layer_cls_to_wrap: [A], cpu_offload: true, xla: false}\n"
    )
    assert fields_of(tmp_path, text) == {
        "bf16": True, "strategy": "fsdp2", "fsdp_units": "accelerate", "reduce_dtype": "bf16",
        "offload": "all",
        "fsdp_transformer_layer_cls_to_wrap": ("A",),
    }  # fmt: skip
    assert read_config(tmp_path / "config.yaml").unused == ["fsdp_config.xla"]


def test_older_words() -> None:
    fields, unused = trainer_fsdp("shard_grad_op auto_wrap offload", {"fsdp_version": 1})
    assert unused == []
    assert fields == {
        "strategy": "fsdp", "reshard_after_forward": False, "backward_prefetch": "none",
        "use_orig_params": True, "offload": "all",
    }  # fmt: skip
    with pytest.raises(LlmemError, match="copy on each node"):
        trainer_fsdp("hybrid_shard", {"version": 1})
    with pytest.raises(LlmemError, match="tpu is not known"):
        trainer_fsdp(["tpu"], {})


def test_a_real_trainers_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(
        output_dir=str(tmp_path), fsdp=True, report_to=[], use_cpu=True, bf16=False,
        fsdp_config={"reshard_after_forward": False},
    )  # fmt: skip
    fields, _ = trainer_fsdp(args.fsdp, args.fsdp_config)
    assert fields == {
        "strategy": "fsdp2", "fsdp_units": "accelerate", "reduce_dtype": "fp32",
        "reshard_after_forward": False,
    }  # fmt: skip
