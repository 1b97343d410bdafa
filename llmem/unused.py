"""Fields of a RunSpec that belong to something the run does not do: named, never dropped in silence.

An option of the command line that would change nothing is refused (`refuse_unused`); a field that a
config file or a caller of the API sets is named among the assumptions (`notes_on_unused`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from llmem.errors import LlmemError
from llmem.parallel.pipeline.schedule import LOOPED
from llmem.parallel.record_streams import records_streams
from llmem.spec import RunSpec


@dataclass(frozen=True)
class _Rule:
    """``fields`` count where ``holds``; they are ``of`` something, and ``step`` asks for it."""

    fields: tuple[str, ...]
    holds: Callable[[RunSpec], bool]
    of: str
    step: str


def _strategy(*names: str) -> Callable[[RunSpec], bool]:
    return lambda spec: spec.strategy in names


def _four_bit(spec: RunSpec) -> bool:
    return spec.quantization in ("nf4", "fp4") or (
        spec.quantization == "none" and spec.method == "qlora"
    )


def _quantised(spec: RunSpec) -> bool:
    return spec.quantization != "none" or spec.method == "qlora"


RULES = (
    _Rule(
        ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_bias", "use_rslora",
         "use_dora", "modules_to_save", "num_virtual_tokens", "as_peft"),
        lambda spec: spec.method != "full",
        "adapters", "add --method lora or another of peft's",
    ),
    _Rule(
        ("double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"), _four_bit,
        "4-bit weights", "add --method qlora or --quantization nf4",
    ),
    _Rule(
        ("as_bitsandbytes",), _quantised,
        "quantised weights", "add --method qlora or --quantization int8",
    ),
    _Rule(
        ("prepare_kbit",), lambda spec: _quantised(spec) and spec.method != "full",
        "adapters on quantised weights", "add --method qlora",
    ),
    _Rule(
        ("sdpa_backend",), lambda spec: spec.attn_implementation in (None, "sdpa"),
        "SDPA", "leave --attn-implementation out",
    ),
    _Rule(
        ("alloc_conf", "record_streams"), lambda spec: spec.gpu != "cpu",
        "the CUDA allocator", "name another --gpu than cpu",
    ),
    _Rule(
        ("record_streams",), records_streams,
        "FSDP1, ZeRO-3, and before torch 2.8 of collectives, whose tensors are freed in a step",
        "use --strategy fsdp or zero3, or add --as-torch 2.7 to tensor parallelism",
    ),
    _Rule(("compile_scope",), lambda spec: spec.compile, "torch.compile", "add --compile"),
    _Rule(("packed_documents",), lambda spec: spec.packed, "packed batches", "add --packed"),
    _Rule(
        ("max_new_tokens", "num_beams", "cache_implementation"),
        lambda spec: spec.task == "generate",
        "generation", "add --task generate",
    ),
    _Rule(
        ("gradient_accumulation_steps", "optim", "max_grad_norm", "optimizer_in_backward",
         "gradient_checkpointing", "checkpoint_every", "checkpoint_policy", "use_reentrant",
         "activation_offload", "loss", "packed",
         "record_streams"),
        lambda spec: spec.task != "generate",
        "training", "leave it or --task generate out",
    ),
    _Rule(("tp_plan",), lambda spec: spec.tp > 1, "tensor parallelism", "add --tp N"),
    _Rule(("cp_comm",), lambda spec: spec.cp > 1, "context parallelism", "add --cp N"),
    _Rule(("ep_plan",), lambda spec: spec.ep > 1, "expert parallelism", "add --ep N"),
    _Rule(
        ("pp_schedule", "micro_batches", "virtual_stages"), lambda spec: spec.pp > 1,
        "pipeline parallelism", "add --pp N",
    ),
    _Rule(
        ("virtual_stages",), lambda spec: spec.pp_schedule in LOOPED,
        "the interleaved schedule", "add --pp-schedule interleaved",
    ),
    _Rule(
        ("reshard_after_forward", "hybrid_shard"), _strategy("fsdp", "fsdp2"),
        "FSDP", "use --strategy fsdp2 or fsdp",
    ),
    _Rule(
        ("keep_last_block", "fsdp_units", "reduce_dtype"), _strategy("fsdp2"),
        "FSDP2", "use --strategy fsdp2",
    ),
    _Rule(
        ("reduce_dtype",), lambda spec: spec.bf16 or spec.fp16,
        "mixed precision", "add --bf16 or --fp16",
    ),
    _Rule(
        ("use_orig_params", "backward_prefetch"), _strategy("fsdp"),
        "FSDP1", "use --strategy fsdp",
    ),
    _Rule(
        ("bucket_cap_mb", "gradient_as_bucket_view"), _strategy("ddp"),
        "DDP", "use --strategy ddp",
    ),
    _Rule(
        ("use_distributed_optimizer", "overlap_grad_reduce"), _strategy("megatron"),
        "Megatron-LM", "use --strategy megatron",
    ),
    _Rule(
        ("overlap_grad_reduce",), lambda spec: spec.use_distributed_optimizer,
        "the distributed optimizer, whose buckets are padded", "add --use-distributed-optimizer",
    ),
    _Rule(
        ("deepspeed",), _strategy("zero1", "zero2", "zero3"),
        "DeepSpeed", "use --strategy zero1, zero2 or zero3",
    ),
    _Rule(
        ("offload",), lambda spec: spec.strategy != "none",
        "engines that shard", "use --strategy zero2, zero3, fsdp or fsdp2",
    ),
)  # fmt: skip

OFF = (None, False, 0, 1, "", "none", "blocks")
"""Defaults that ask for nothing: to say them where they change nothing is no mistake."""


def refuse_unused(spec: RunSpec, given: Iterable[str], strategies: Iterable[str] = ()) -> None:
    """Raises LlmemError if an option in ``given`` (RunSpec's names) would change nothing.

    ``strategies``: those that will be tried in place of the spec's own; one that uses it is enough.
    """
    tried = [spec.model_copy(update={"strategy": name}) for name in strategies] or [spec]
    for name in given:
        default = RunSpec.model_fields[name].default
        if getattr(spec, name) == default and default in OFF:
            continue
        broken = [_broken(trial, name) for trial in tried]
        if (rule := broken[0]) is not None and all(broken):
            raise LlmemError(f"--{name.replace('_', '-')} is of {rule.of}; {rule.step}")


def notes_on_unused(spec: RunSpec) -> Iterator[str]:
    """A sentence about each field that is set, and not to its default, but changes nothing.

    >>> from llmem.spec import make_spec
    >>> list(notes_on_unused(make_spec(model="gpt2", lora_r=4)))
    ['lora_r 4: not used, it is of adapters']
    """
    for name in RunSpec.model_fields:
        rule = _broken(spec, name)
        if rule is None or name not in spec.model_fields_set:
            continue
        value = getattr(spec, name)
        if value != RunSpec.model_fields[name].default:
            said = "" if isinstance(value, dict) else f" {value}"
            yield f"{name}{said}: not used, it is of {rule.of}"


def _broken(spec: RunSpec, name: str) -> _Rule | None:
    return next((rule for rule in RULES if name in rule.fields and not rule.holds(spec)), None)
