"""Configuration files of other tools, as their own documentation shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmem.cli import main
from llmem.errors import LlmemError
from llmem.interop.config_files import read_config, read_configs
from llmem.spec import make_spec

ACCELERATE_FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_processes: 4
"""

ACCELERATE_FSDP1 = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_use_orig_params: "false"
  fsdp_activation_checkpointing: true
mixed_precision: "no"
num_processes: 2
"""

TRL = """
model_name_or_path: meta-llama/Llama-3.2-1B
per_device_train_batch_size: 2
max_length: 1024
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: true}
use_peft: true
load_in_4bit: true
lora_target_modules: [q_proj, v_proj]
learning_rate: 1.0e-4
"""

LLAMA_FACTORY = """
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
flash_attn: fa2
"""

AXOLOTL = """
micro_batch_size: 2
sequence_len: 4096
adapter: lora
lora_target_linear: true
optimizer: adamw_torch_fused
"""


def fields_of(tmp_path: Path, text: str, name: str = "config.yaml") -> dict[str, Any]:
    path = tmp_path / name
    path.write_text(text)
    fields = read_config(path).fields
    make_spec(model="gpt2", **fields)  # each is a RunSpec's
    return fields


def test_accelerate_fsdp2(tmp_path: Path) -> None:
    assert fields_of(tmp_path, ACCELERATE_FSDP2) == {
        "gpus": 4, "bf16": True, "strategy": "fsdp2", "fsdp_units": "accelerate",
        "reduce_dtype": "bf16", "reshard_after_forward": False,
    }  # fmt: skip


def test_accelerate_fsdp1(tmp_path: Path) -> None:
    assert fields_of(tmp_path, ACCELERATE_FSDP1) == {
        "gpus": 2, "strategy": "fsdp", "reshard_after_forward": False,
        "backward_prefetch": "none", "use_orig_params": False, "gradient_checkpointing": True,
    }  # fmt: skip


def test_accelerate_without_zero_init(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3, "
    fields = {"gpus": 4, "strategy": "zero3"}
    assert fields_of(tmp_path, text + "zero3_init_flag: true}\n") == fields
    assert fields_of(tmp_path, text + "zero3_init_flag: false}\n") == fields | {"zero_init": False}


def test_trl_and_what_it_does_not_say(tmp_path: Path) -> None:
    assert fields_of(tmp_path, TRL) == {
        "per_device_train_batch_size": 2, "seq_length": 1024, "bf16": True,
        "gradient_checkpointing": True, "use_reentrant": True, "method": "qlora",
        "lora_target_modules": ("q_proj", "v_proj"),
    }  # fmt: skip
    config = read_config(tmp_path / "config.yaml")
    assert config.unused == ["model_name_or_path", "learning_rate"]
    assert config.note().endswith("not used: model_name_or_path, learning_rate")


def test_llama_factory(tmp_path: Path) -> None:
    assert fields_of(tmp_path, LLAMA_FACTORY) == {
        "method": "lora", "lora_r": 8, "lora_target_modules": "all-linear", "seq_length": 2048,
        "attn_implementation": "flash_attention_2",
    }  # fmt: skip


def test_axolotl(tmp_path: Path) -> None:
    assert fields_of(tmp_path, AXOLOTL) == {
        "per_device_train_batch_size": 2, "seq_length": 4096, "method": "lora",
        "lora_target_modules": "all-linear", "optim": "adamw_torch_fused",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("torch_compile: true", {"compile": True}),
        ("torch_compile: auto", {"compile": True}),  # Axolotl's
        ("torch_compile: true\ntorch_compile_backend: inductor", {"compile": True}),
        ("torch_compile: false\ntorch_compile_mode: default", {"compile": True}),  # as Trainer has it
        ("torch_compile: false", {}),
    ],
)
def test_training_arguments_ask_for_torch_compile(
    tmp_path: Path, text: str, fields: dict[str, Any]
) -> None:
    assert fields_of(tmp_path, "max_length: 8\n" + text) == {"seq_length": 8} | fields
    assert not read_config(tmp_path / "config.yaml").unused


def test_accelerate_compiles(tmp_path: Path) -> None:
    start = "distributed_type: 'NO'\nnum_processes: 1\n"
    text = start + "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default, "
    compiled = {"gpus": 1, "compile": True}
    assert fields_of(tmp_path, text + "dynamo_use_dynamic: true}") == compiled
    assert read_config(tmp_path / "config.yaml").unused == ["dynamo_use_dynamic"]
    regions = fields_of(tmp_path, text + "dynamo_use_regional_compilation: true}")
    assert regions == compiled | {"compile_scope": "regions"}
    assert fields_of(tmp_path, start + "dynamo_config: {dynamo_backend: NO}") == {"gpus": 1}
    assert fields_of(tmp_path, start + "dynamo_backend: INDUCTOR") == compiled


def test_deepspeed_named_by_training_arguments(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\ndeepspeed: ds.json\nbf16: true\n")
    assert read_config(path).fields == {
        "per_device_train_batch_size": 4, "bf16": True, "strategy": "zero3", "deepspeed": zero,
    }  # fmt: skip


def test_later_files_win_and_each_leaves_a_note(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.json"
    first.write_text("bf16: true\nmax_length: 512\n")
    second.write_text('{"max_length": 64}')
    fields, notes = read_configs((first, second))
    assert fields == {"bf16": True, "seq_length": 64}
    assert notes == (
        "a.yaml (training arguments): bf16 True, seq_length 512",
        "b.json (training arguments): seq_length 64",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1", "says nothing that llmem uses"),
        ("- 1\n- 2", "holds no mapping"),
        ("a: [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("distributed_type: TPU", "distributed_type TPU is not supported"),
        ("distributed_type: FSDP", "no section fsdp_config"),
        ("mixed_precision: fp8\ndistributed_type: NO", "mixed_precision fp8"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", "num_machines"),
        ("torch_compile_backend: cudagraphs", "torch_compile_backend cudagraphs is not supported"),
        ("torch_compile_mode: reduce-overhead", "torch_compile_mode reduce-overhead is not supported"),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: EAGER}", "dynamo_backend EAGER"),
        ("distributed_type: 'NO'\ndynamo_config: [1]", "a value of a wrong kind"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(LlmemError, match=said):
        read_configs((path,))


def test_options_win_over_files_and_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("per_device_train_batch_size: 2\nmax_length: 32\noptim: sgd\nseed: 1\n")
    command = ["estimate", "gpt2", "--config", str(path), "-b", "1", "--json", "-"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["optimizer"]["name"] == "SGD"
    assert any("1 x 32 tokens" in line for line in document["assumptions"])
    assert any(line.endswith("not used: seed") for line in document["assumptions"])
