"""What ZeRO does in this run: the ds_config and the RunSpec resolved against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmem.errors import LlmemError
from llmem.lifetimes import Parameter, Trace
from llmem.parallel.fsdp.fsdp2_shards import ITEMSIZE
from llmem.parallel.zero.config import (
    STAGES,
    DsConfig,
    Offload,
    ZeroSection,
    check_against_spec,
    read_ds_config,
    validated,
)
from llmem.spec import RunSpec

VERSION = "0.19.8"
"""The DeepSpeed whose source was read and measured."""

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_LOADED = {
    True: "parameters partitioned while they are loaded (zero.Init)",
    False: "the whole model loaded and cast on the host by every process, moved to its GPU and "
    "partitioned there (--zero-init false)",
}

AUTO = {
    "reduce_bucket_size": (1.0, 2),
    "stage3_prefetch_bucket_size": (0.9, 2),
    "stage3_param_persistence_threshold": (10.0, 1),
}
"""What Trainer writes for "auto": factor x hidden_size ** power elements."""


@dataclass(frozen=True)
class ZeroOptions:
    """Sizes in elements, dtypes as torch names.

    ``param_dtype`` is that of the trained parameters (``DeepSpeedZeroOptimizer.dtype``),
    ``accumulation_dtype`` and ``communication_dtype`` are those of the engine's config
    (``DeepSpeedEngine.get_data_types``, ``communication_data_type``); masters are fp32.
    """

    stage: int
    world: int
    zero: ZeroSection
    param_dtype: str
    accumulation_dtype: str
    communication_dtype: str
    reduce_bucket: int
    prefetch_bucket: int
    persistence: int
    overlap: bool
    offload_optimizer: str = "none"
    offload_param: str = "none"
    zero_init: bool = True
    notes: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.param_dtype]

    @property
    def accumulation_itemsize(self) -> int:
        return ITEMSIZE[self.accumulation_dtype]

    @property
    def communication_itemsize(self) -> int:
        return ITEMSIZE[self.communication_dtype]

    @property
    def separate(self) -> bool:
        """Gradients are accumulated in another dtype than they are made (stages 1 and 2)."""
        return self.param_dtype != self.accumulation_dtype


def options_of(trace: Trace, spec: RunSpec) -> ZeroOptions:
    """Raises LlmemError for contradictions, impossible values and what is not modelled."""
    raw, notes = read_ds_config(spec.deepspeed)
    raw, filled = fill_auto(raw, spec)
    notes += filled
    config = validated(raw)
    check_against_spec(config, spec)
    zero = config.zero_optimization
    stage = STAGES[spec.strategy]
    model_dtype = spec.autocast_dtype or "float32"
    accumulation = DTYPES.get(config.data_types.grad_accum_dtype or "", model_dtype)
    if stage == 1 and model_dtype == "bfloat16" and accumulation == "float32":
        raise LlmemError(
            "ZeRO-1 with bf16 and data_types.grad_accum_dtype fp32 runs DeepSpeed's "
            "BF16_Optimizer, which is not supported yet; use zero2 or leave grad_accum_dtype out"
        )
    trained = [p for p in trace.parameters if p.trainable]
    optimizer, param = _offloads(zero, spec)
    options = ZeroOptions(
        stage=stage,
        world=spec.gpus,
        zero=zero,
        param_dtype=trained[0].dtype,
        accumulation_dtype=accumulation,
        communication_dtype=DTYPES.get(config.communication_data_type or "", model_dtype),
        reduce_bucket=zero.reduce_bucket_size,
        prefetch_bucket=1 if zero.allgather_sequential else zero.prefetch_bucket_size,
        persistence=zero.param_persistence_threshold,
        overlap=zero.overlap_comm if zero.overlap_comm is not None else stage == 3,
        offload_optimizer=optimizer,
        offload_param=param,
        zero_init=spec.zero_init,
    )
    return _with_notes(options, config, notes, trained)


def _with_notes(
    options: ZeroOptions, config: DsConfig, notes: list[str], trained: list[Parameter]
) -> ZeroOptions:
    stage, zero = options.stage, options.zero
    told = [
        f"zero{stage}: DeepSpeed {VERSION}, {options.world} ranks, "
        f"{'ds_config given' if config.model_fields_set else 'no ds_config: its defaults'}, "
        f"reduce_bucket_size {options.reduce_bucket:,} elements, "
        f"overlap_comm {str(options.overlap).lower()}",
        f"zero{stage}: parameters {options.param_dtype}, gradients reduced in "
        f"{options.communication_dtype} and accumulated in {options.accumulation_dtype}, masters "
        "fp32; one parameter group (no split by weight decay)",
    ]
    if stage == 3:
        told.append(
            f"zero3: {_LOADED[options.zero_init]}, "
            f"prefetch {options.prefetch_bucket:,}, live {zero.max_live_parameters:,}, reuse "
            f"distance {zero.max_reuse_distance:,}, persistence {options.persistence:,} elements"
        )
    for what, device in (
        ("optimizer", options.offload_optimizer), ("parameters", options.offload_param)
    ):
        if device != "none":
            told.append(f"zero{stage}: {what} on {device}, staging buffers on the GPU")
    if stage == 3 and not zero.memory_efficient_linear:
        told.append(
            "zero3: memory_efficient_linear false: weights that torch's linear keeps gathered "
            "until backward are not counted"
        )
    if len({p.dtype for p in trained}) > 1:
        told.append(f"zero{stage}: trained parameters of several dtypes, taken as one buffer")
    if config.optimizer is not None:
        kind = config.optimizer.get("type", "?")
        told.append(f"zero{stage}: ds_config's optimizer {kind} taken as --optim says")
    return replace(options, notes=(*told, *notes))


def _offloads(zero: ZeroSection, spec: RunSpec) -> tuple[str, str]:
    """Where optimizer states and parameters live: none, cpu or nvme."""

    def device(section: Offload | None, old: bool | None, asked: bool) -> str:
        found = section.device if section else "cpu" if old else "none"
        return "cpu" if asked and found == "none" else found

    optimizer = device(zero.offload_optimizer, zero.cpu_offload, spec.offload != "none")
    param = device(zero.offload_param, zero.cpu_offload_param, spec.offload == "all")
    if param != "none" and STAGES[spec.strategy] != 3:
        raise LlmemError(
            f"only zero3 can offload parameters; use --offload optimizer with {spec.strategy}"
        )
    return optimizer, param


def fill_auto(raw: Mapping[str, Any], spec: RunSpec) -> tuple[dict[str, Any], list[str]]:
    """A copy of a ds_config with the sizes that are "auto" filled in as Trainer does, and notes.

    transformers/integrations/deepspeed.py, ``trainer_config_finalize``.
    """
    section = raw.get("zero_optimization") or {}
    if not isinstance(section, Mapping):
        raise LlmemError(f"ds_config: zero_optimization = {section!r} is no object; write one")
    zero, notes = dict(section), []
    for name, (factor, power) in AUTO.items():
        if zero.get(name) == "auto":
            hidden = _hidden_size(spec)
            zero[name] = int(factor * hidden**power)
            notes.append(
                f"ds_config: {name} auto is {zero[name]:,} (transformers, hidden_size {hidden:,})"
            )
    return {**raw, "zero_optimization": zero}, notes


def _hidden_size(spec: RunSpec) -> int:
    config: Any = getattr(spec.model, "config", None)
    if config is None and isinstance(spec.model, (str, Mapping)):
        from llmem import models

        config = models.resolve(spec.model).config
    for source in (config, _part(config, "text_config")):
        for name in ("hidden_size", "n_embd", "d_model"):
            found = _part(source, name)
            if isinstance(found, int):
                return found
    raise LlmemError('the model has no hidden_size for "auto" in the ds_config; write a number')


def _part(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
