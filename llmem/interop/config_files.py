"""Other tools' configuration files ─▶ fields of a RunSpec.

Three kinds are told apart by their keys: a DeepSpeed config (``zero_optimization``), accelerate's
(``distributed_type``), and files of training arguments: ``transformers.TrainingArguments``, TRL's
``SFTConfig`` and ``ModelConfig``, LLaMA-Factory, Axolotl. Files are data: JSON and safe YAML only,
nothing in them is imported or run. Keys that say nothing about memory, or that llmem does not know,
are named, never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError
from llmem.interop import compile_config
from llmem.interop.fsdp_config import accelerate_fsdp, trainer_fsdp, truth

LARGEST = 2**20
"""Bytes; a larger file is no configuration."""


@dataclass
class Config:
    """What one file says: RunSpec fields, and the keys that were not used."""

    path: Path
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def note(self) -> str:
        """A sentence for the assumptions."""
        said = (
            ", ".join(f"{k} {v}" for k, v in self.fields.items() if k != "deepspeed") or "nothing"
        )
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.path.name} ({self.kind}): {said}{unused}"


def read_config(path: Path) -> Config:
    """Raises LlmemError (one sentence) for a file that cannot be read or holds values of a wrong kind."""
    raw = _load(path)
    try:
        return _read(path, raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LlmemError(f"{path} has a value of a wrong kind, mend it there: {error}") from error


def _read(path: Path, raw: dict[str, Any]) -> Config:
    if "zero_optimization" in raw or "train_micro_batch_size_per_gpu" in raw:
        return _deepspeed(path, raw)
    if "distributed_type" in raw:
        return _accelerate(path, raw)
    return _arguments(path, raw)


def read_configs(paths: tuple[Path, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of all files, later ones winning, and a note about each.

    Raises LlmemError if nothing in a file says anything about memory.
    """
    fields: dict[str, Any] = {}
    notes = []
    for path in paths:
        config = read_config(path)
        if not config.fields:
            raise LlmemError(
                f"{path} says nothing that llmem uses; --config takes TrainingArguments, an "
                "accelerate config or a ds_config, as JSON or YAML"
            )
        fields |= config.fields
        notes.append(config.note())
    return fields, tuple(notes)


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.stat().st_size > LARGEST:
            raise LlmemError(f"{path} is larger than 1 MiB; --config takes a configuration file")
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise LlmemError(f"{path} cannot be read: {error.strerror}; check --config") from None
    except (UnicodeDecodeError, ValueError, yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise LlmemError(f"{path} cannot be read as JSON or YAML, mend it there: {said}") from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise LlmemError(f"{path} holds no mapping of names to values; check --config")
    return raw


# -- DeepSpeed ---------------------------------------------------------------------------------------


def _deepspeed(path: Path, raw: dict[str, Any]) -> Config:
    config = Config(path, "ds_config", {"deepspeed": raw})
    zero = raw.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    config.fields["strategy"] = f"zero{stage}" if stage else "ddp"
    if not stage:
        del config.fields["deepspeed"]
        config.unused.append("all but its stage 0")
    numbers = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
    }
    for theirs, ours in numbers.items():
        if isinstance(raw.get(theirs), (int, float)):
            config.fields[ours] = raw[theirs]
    for precision in ("bf16", "fp16"):
        section = raw.get(precision)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            config.fields[precision] = True
    return config


# -- accelerate --------------------------------------------------------------------------------------

def _accelerate(path: Path, raw: dict[str, Any]) -> Config:
    config = Config(path, "accelerate")
    left = dict(raw)
    kind = str(left.pop("distributed_type")).upper()
    gpus = left.pop("num_processes", None)
    if gpus is not None:
        config.fields["gpus"] = gpus
    precision = str(left.pop("mixed_precision", "no")).lower()
    if precision in ("bf16", "fp16"):
        config.fields[precision] = True
    elif precision != "no":
        raise LlmemError(f"{path}: mixed_precision {precision} is not supported; use bf16 or fp16")
    if kind == "FSDP":
        machines = left.pop("num_machines", None)
        dtype = precision if precision in ("bf16", "fp16") else None
        section = _section(path, left, "fsdp_config")
        found, unused = accelerate_fsdp(section, machines=machines, dtype=dtype, path=path)
        config.fields |= found
        config.unused += unused
    elif kind == "DEEPSPEED":
        _accelerate_deepspeed(config, _section(path, left, "deepspeed_config"))
    elif kind == "MULTI_GPU":
        config.fields["strategy"] = "ddp"
    elif kind != "NO":
        raise LlmemError(
            f"{path}: distributed_type {kind} is not supported; use NO, MULTI_GPU, FSDP or DEEPSPEED"
        )
    _parallelism(config, left)
    older = {key: left.pop(key) for key in ("dynamo_backend",) if key in left}
    section = (left.pop("dynamo_config", None) or {}) | older
    fields, unused = compile_config.accelerate_compile(section)
    config.fields |= fields
    config.unused += unused
    config.unused += sorted(left)
    return config


def _parallelism(config: Config, left: dict[str, Any]) -> None:
    """accelerate's ``parallelism_config``: how many copies and how many parts of each.

    A copy's parts are its mesh dimension ``dp_shard_cp``: those of dp_shard_size and of cp_size.
    """
    section = dict(left.pop("parallelism_config", None) or {})
    names = {"dp_replicate_size": "dp_replicate_size", "tp_size": "tp", "cp_size": "cp"}
    for key, ours in names.items():
        size = int(section.pop(f"parallelism_config_{key}", None) or 1)
        if size > 1:
            config.fields[ours] = size
    shard = int(section.pop("parallelism_config_dp_shard_size", None) or 1)
    if shard > 1:
        config.fields["hybrid_shard"] = shard * config.fields.get("cp", 1)
    config.unused += sorted(section)


def _section(path: Path, raw: dict[str, Any], name: str) -> dict[str, Any]:
    section = raw.pop(name, None)
    if not isinstance(section, dict):
        raise LlmemError(f"{path} has no section {name}; run `accelerate config` again")
    return section


def _accelerate_deepspeed(config: Config, section: dict[str, Any]) -> None:
    if str(section.pop("zero3_init_flag", True)).lower() == "false":
        config.fields["zero_init"] = False
    named = section.pop("deepspeed_config_file", None)
    if named is not None:
        inner = config.path.parent / str(named)
        found = read_config(inner)
        if found.kind != "ds_config":
            raise LlmemError(f"{inner}, which {config.path} names, is no ds_config")
        config.fields |= found.fields
        config.unused += [*found.unused, *sorted(section)]
        return
    stage = section.pop("zero_stage", 2)
    config.fields["strategy"] = f"zero{stage}" if stage else "ddp"
    if "gradient_accumulation_steps" in section:
        config.fields["gradient_accumulation_steps"] = section.pop("gradient_accumulation_steps")
    if isinstance(section.get("gradient_clipping"), (int, float)):
        config.fields["max_grad_norm"] = section.pop("gradient_clipping")
    optimizer = section.pop("offload_optimizer_device", "none")
    parameters = section.pop("offload_param_device", "none")
    if parameters != "none":
        config.fields["offload"] = "all"
    elif optimizer != "none":
        config.fields["offload"] = "optimizer"
    config.unused += sorted(section)


# -- training arguments -------------------------------------------------------------------------------


def _dtype(value: Any) -> str | None:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": None}
    text = str(value).removeprefix("torch.")
    return names.get(text, text)


def _targets(value: Any) -> Any:
    if isinstance(value, str):
        value = "all-linear" if value in ("all", "all-linear") else value.split(",")
    return value if isinstance(value, str) else tuple(str(part).strip() for part in value)


def _attention(value: Any) -> str:
    return {"fa2": "flash_attention_2", "flash_attn_2": "flash_attention_2"}.get(value, value)


def _same(value: Any) -> Any:
    return value


Reader = tuple[str, Callable[[Any], Any]]
ARGUMENTS: dict[str, Reader] = {
    # transformers.TrainingArguments
    "per_device_train_batch_size": ("per_device_train_batch_size", _same),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", _same),
    "gradient_checkpointing": ("gradient_checkpointing", truth),
    "bf16": ("bf16", truth),
    "fp16": ("fp16", truth),
    "optim": ("optim", _same),
    "max_grad_norm": ("max_grad_norm", _same),
    "use_liger_kernel": ("liger", truth),
    "deepspeed": ("deepspeed", _same),
    # TRL: SFTConfig, ModelConfig
    "max_length": ("seq_length", _same),
    "max_seq_length": ("seq_length", _same),
    "dtype": ("param_dtype", _dtype),
    "torch_dtype": ("param_dtype", _dtype),
    "attn_implementation": ("attn_implementation", _attention),
    "lora_r": ("lora_r", _same),
    "lora_alpha": ("lora_alpha", _same),
    "lora_dropout": ("lora_dropout", _same),
    "lora_target_modules": ("lora_target_modules", _targets),
    # LLaMA-Factory
    "cutoff_len": ("seq_length", _same),
    "lora_rank": ("lora_r", _same),
    "lora_target": ("lora_target_modules", _targets),
    "flash_attn": ("attn_implementation", _attention),
    "enable_liger_kernel": ("liger", truth),
    # Axolotl
    "micro_batch_size": ("per_device_train_batch_size", _same),
    "sequence_len": ("seq_length", _same),
    "optimizer": ("optim", _same),
}
"""Key -> RunSpec field and how its value reads."""

METHODS = {
    "use_peft": ("lora", True),
    "finetuning_type": ("lora", "lora"),
    "adapter": ("lora", "lora"),
}
"""Keys that ask for LoRA, and the value with which they do."""

FOUR_BITS = {"load_in_4bit": True, "quantization_bit": 4, "adapter": "qlora"}
EIGHT_BITS = {"load_in_8bit": True, "quantization_bit": 8}


def _arguments(path: Path, raw: dict[str, Any]) -> Config:
    config = Config(path, "training arguments")
    for key, value in raw.items():
        if value is None:
            continue
        known = ARGUMENTS.get(key)
        if known is not None:
            ours, read = known
            if (found := read(value)) is not None:
                config.fields[ours] = found
        elif key == "lora_target_linear" and truth(value):
            config.fields["lora_target_modules"] = "all-linear"
        elif key == "gradient_checkpointing_kwargs" and isinstance(value, Mapping):
            if "use_reentrant" in value:
                config.fields["use_reentrant"] = truth(value["use_reentrant"])
        elif not any(key in others for others in ELSEWHERE):
            config.unused.append(key)
    config.fields |= compile_config.trainer_compile(raw)
    _method(config, raw)
    _fsdp(config, raw)
    if isinstance(config.fields.get("deepspeed"), (str, Mapping)):
        _inner_deepspeed(config)
    return config


FSDP = ("fsdp", "fsdp_config")

ELSEWHERE = (FSDP, METHODS, FOUR_BITS, EIGHT_BITS, compile_config.TRAINER)
"""Keys that are read together."""


def _fsdp(config: Config, raw: dict[str, Any]) -> None:
    """``fsdp_config`` is a mapping, or names a file beside this one."""
    said, inner = raw.get("fsdp"), raw.get("fsdp_config") or {}
    if not said:
        config.unused += ["fsdp_config"] if inner else []
        return
    if isinstance(inner, str):
        inner = _load(config.path.parent / inner)
    precisions = {name: truth(raw.get(name, False)) for name in ("bf16", "fp16")}
    fields, unused = trainer_fsdp(said, inner, **precisions)
    config.fields |= fields
    config.unused += [f"fsdp_config.{key}" for key in unused]


def _method(config: Config, raw: dict[str, Any]) -> None:
    for key, (method, value) in METHODS.items():
        if raw.get(key) == value:
            config.fields["method"] = method
    if any(raw.get(key) == value for key, value in FOUR_BITS.items()):
        config.fields["method"] = "qlora"
    elif any(raw.get(key) == value for key, value in EIGHT_BITS.items()):
        config.fields["quantization"] = "int8"


def _inner_deepspeed(config: Config) -> None:
    """``deepspeed: ds.json`` names a file beside this one; its own numbers may be "auto"."""
    given = config.fields.pop("deepspeed")
    path = config.path.parent / given if isinstance(given, str) else config.path
    inner = _deepspeed(path, _load(path) if isinstance(given, str) else dict(given))
    config.fields = inner.fields | config.fields
    config.unused += inner.unused


def deepspeed_fields(given: Any) -> dict[str, Any]:
    """What ``TrainingArguments.deepspeed``, a path or a dict, says."""
    path = Path(str(given)) if isinstance(given, (str, Path)) else Path("deepspeed")
    return _deepspeed(path, dict(given) if isinstance(given, Mapping) else _load(path)).fields
