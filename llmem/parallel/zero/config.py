"""The ds_config of a run: what the user's JSON says, DeepSpeed's defaults for the rest.

Names and defaults as in DeepSpeed 0.19 (deepspeed/runtime/config.py, runtime/zero/config.py,
runtime/zero/offload_config.py); "auto" means what transformers' Trainer fills in
(transformers/integrations/deepspeed.py, ``HfTrainerDeepSpeedConfig``).
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmem.errors import LlmemError
from llmem.spec import RunSpec

Auto = Literal["auto"]
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class Offload(_Section):
    """``offload_optimizer`` or ``offload_param``."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: int = Field(4, ge=0)
    buffer_size: int = Field(100_000_000, ge=0)
    max_in_cpu: int = Field(1_000_000_000, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8


class ZeroSection(_Section):
    """``zero_optimization``; sizes count elements, not bytes."""

    stage: Literal[0, 1, 2, 3] | None = None
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: Offload | None = None
    offload_optimizer: Offload | None = None
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = Field(50_000_000, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(100_000, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(
        sys.maxsize, alias="stage3_model_persistence_threshold"
    )
    max_live_parameters: int = Field(1_000_000_000, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(1_000_000_000, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(
        False, alias="stage3_gather_16bit_weights_on_model_save"
    )
    gather_fp16_weights_on_model_save: bool = Field(
        False, alias="stage3_gather_fp16_weights_on_model_save"
    )
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(
        False, alias="stage3_use_all_reduce_for_fetch_params"
    )
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False


class Precision(_Section):
    """``bf16`` or ``fp16``."""

    enabled: bool | Auto = False


class DataTypes(_Section):
    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None


class DsConfig(_Section):
    """The parts of a ds_config that memory depends on, or that another setting contradicts."""

    train_batch_size: int | Auto = "auto"
    train_micro_batch_size_per_gpu: int | Auto = "auto"
    gradient_accumulation_steps: int | Auto = "auto"
    gradient_clipping: float | Auto = "auto"
    zero_optimization: ZeroSection = Field(default_factory=ZeroSection)
    bf16: Precision = Field(default_factory=Precision)
    fp16: Precision = Field(default_factory=Precision)
    data_types: DataTypes = Field(default_factory=DataTypes)
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    optimizer: dict[str, Any] | None = None


HARMLESS = frozenset(
    {
        "scheduler", "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients",
        "gradient_predivide_factor", "aio", "tensorboard", "wandb", "csv_monitor", "comet",
        "comms_logger", "flops_profiler", "autotuning", "elasticity", "checkpoint", "seed",
        "disable_allgather", "sparse_gradients", "dataloader_drop_last", "bfloat16",
    }
)  # fmt: skip
"""Top-level keys that change no tensor of a step (or, as ``bfloat16``, are read elsewhere)."""


def read_ds_config(given: Any) -> tuple[dict[str, Any], list[str]]:
    """The JSON of ``RunSpec.deepspeed`` (a dict or a path; None is empty) and what was unknown."""
    raw = _load(given)
    if isinstance(raw.get("bfloat16"), Mapping) and "bf16" not in raw:
        raw["bf16"] = raw["bfloat16"]
    unknown = _unknown(raw, DsConfig, "")
    return raw, [f"ds_config: unknown key '{name}' has no effect here" for name in unknown]


def validated(raw: Mapping[str, Any]) -> DsConfig:
    """Raises LlmemError (one sentence) for a value that DeepSpeed would not take."""
    try:
        return DsConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"] if not str(p).startswith(("literal", "int")))
        message = str(first["msg"])
        raise LlmemError(
            f"ds_config: {where} = {first['input']!r}: {message[0].lower()}{message[1:]}"
        ) from None


def _load(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (str, os.PathLike)):
        raise LlmemError(
            f"deepspeed takes a ds_config as a dict or the path of its JSON, not {given!r}"
        )
    try:
        raw = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise LlmemError(
            f"the ds_config {given} cannot be read: {said}; give DeepSpeed's JSON file"
        ) from None
    if not isinstance(raw, dict):
        raise LlmemError(f"the ds_config {given} holds no JSON object; give DeepSpeed's file")
    return raw


def _unknown(raw: Mapping[str, Any], model: type[BaseModel], path: str) -> list[str]:
    """Dotted names of keys that no field of ``model`` (or of its sections) has."""
    names: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        names[name] = names[field.alias or name] = field
    found = []
    for key, value in raw.items():
        known = names.get(key)
        if known is None:
            if path or key not in HARMLESS:
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
                found.append(path + key + (f" (is {near[0]} meant?)" if near else ""))
        elif isinstance(value, Mapping):
            section = _section_of(known.annotation)
            if section not in (None, Precision, DataTypes):
                found += _unknown(value, section, f"{path}{key}.")
    return found


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, _Section):
            return kind
    return None


def check_against_spec(config: DsConfig, spec: RunSpec) -> None:
    """Raises LlmemError where the ds_config contradicts the RunSpec or itself."""
    zero = config.zero_optimization
    stage = STAGES[spec.strategy]
    if zero.stage is not None and zero.stage != stage:
        raise LlmemError(
            f"the ds_config has zero_optimization.stage {zero.stage} and --strategy is "
            f"{spec.strategy}; make them agree"
        )
    pairs: tuple[tuple[str, int | Auto, int], ...] = (
        (
            "train_micro_batch_size_per_gpu",
            config.train_micro_batch_size_per_gpu,
            spec.per_device_train_batch_size,
        ),
        (
            "gradient_accumulation_steps",
            config.gradient_accumulation_steps,
            spec.gradient_accumulation_steps,
        ),
        (
            "train_batch_size",
            config.train_batch_size,
            spec.per_device_train_batch_size * spec.gradient_accumulation_steps * spec.gpus,
        ),
    )
    for name, value, expected in pairs:
        if value != "auto" and value != expected:
            raise LlmemError(
                f"the ds_config has {name} {value}, the run {expected}; make them agree or write "
                '"auto"'
            )
    _check_precision(config, spec)
    _check_zero(zero, stage, config, spec)


def _check_precision(config: DsConfig, spec: RunSpec) -> None:
    on = {n: getattr(config, n).enabled for n in ("bf16", "fp16")}
    if on["bf16"] is True and on["fp16"] is True:
        raise LlmemError("the ds_config enables both bf16 and fp16; enable one of them")
    for name, value in on.items():
        asked = getattr(spec, name)
        if value != "auto" and name in config.model_fields_set and value != asked:
            raise LlmemError(
                f"the ds_config has {name}.enabled {str(value).lower()} and the run "
                f"{'has' if asked else 'lacks'} --{name}; make them agree or write \"auto\""
            )


def _check_zero(zero: ZeroSection, stage: int, config: DsConfig, spec: RunSpec) -> None:
    if zero.offload_param and zero.offload_param.device != "none" and stage != 3:
        raise LlmemError(
            f"offload_param works with ZeRO stage 3 only, not {stage}; leave it out or take zero3"
        )
    nvme = zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme"
    if nvme and stage != 3:
        raise LlmemError("offload_optimizer to nvme works with ZeRO stage 3 only; use cpu")
    if not zero.compute_grad_norm and (stage == 3 or spec.max_grad_norm):
        raise LlmemError(
            "compute_grad_norm false needs ZeRO stage 1 or 2 and no gradient clipping "
            "(--max-grad-norm 0)"
        )
    if zero.allgather_bucket_size % 2:
        raise LlmemError(
            f"allgather_bucket_size {zero.allgather_bucket_size} is odd; DeepSpeed takes even ones"
        )
    if zero.reduce_bucket_size < 1:
        raise LlmemError("reduce_bucket_size must be at least 1 element")
    if zero.zero_hpz_partition_size > 1:
        raise LlmemError("zero_hpz_partition_size (ZeRO++) is not supported yet; leave it out")
    if zero.use_all_reduce_for_fetch_params:
        raise LlmemError("stage3_use_all_reduce_for_fetch_params is not supported yet")
    for name in (
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "legacy_stage1",
        "module_granularity_threshold",
    ):
        if getattr(zero, name):
            raise LlmemError(f"zero_optimization.{name} is not supported yet; leave it out")
