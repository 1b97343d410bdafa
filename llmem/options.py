"""The options that say what is trained, shared by estimate, plan, compare and measure.

Each option maps to a RunSpec field; an option that is not given is left to RunSpec's default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from llmem.errors import LlmemError

Command = TypeVar("Command", bound=Callable[..., Any])

_WHAT = [
    click.option(
        "--config",
        metavar="FILE",
        multiple=True,
        type=click.Path(path_type=Path),
        help="TrainingArguments, accelerate config or ds_config (JSON or YAML); options win.",
    ),
    click.option("-b", "--per-device-train-batch-size", type=int, help="Sequences per GPU."),
    click.option("-s", "--seq-length", type=int, help="Tokens per sequence."),
    click.option("--gradient-accumulation-steps", type=int, metavar="N"),
    click.option(
        "--method", metavar="NAME",
        help="full (the default), lora, qlora, or another of peft's: ia3, loha, vera, adalora, "
        "prefix_tuning, …",
    ),
    click.option(
        "--param-dtype",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        help="What from_pretrained(dtype=...) loads; default: the config's own dtype.",
    ),
    click.option("--bf16", is_flag=True, default=None, help="bf16 mixed precision."),
    click.option("--fp16", is_flag=True, default=None, help="fp16 mixed precision."),
    click.option("--optim", metavar="NAME", help="As TrainingArguments.optim."),
    click.option("--max-grad-norm", type=float, help="Clip to this norm; 0 turns clipping off."),
    click.option(
        "--optimizer-in-backward",
        is_flag=True,
        default=None,
        help="Update each parameter and free its gradient in backward; needs --max-grad-norm 0.",
    ),
    click.option("--gradient-checkpointing", is_flag=True, default=None),
    click.option("--checkpoint-every", type=int, metavar="N", help="Only every N-th layer."),
    click.option(
        "--checkpoint-policy",
        type=click.Choice(["full", "op"]),
        help="op: keep the outputs of attention and of every second matmul.",
    ),
    click.option("--use-reentrant/--no-use-reentrant", default=None, help="Of the checkpoints."),
    click.option(
        "--activation-offload",
        is_flag=True,
        default=None,
        help="Keep the inputs of checkpointed layers on the host.",
    ),
    click.option(
        "--attn-implementation", type=click.Choice(["eager", "sdpa", "flash_attention_2"])
    ),
    click.option(
        "--sdpa-backend",
        type=click.Choice(["flash", "efficient", "cudnn", "math"]),
        help="Force SDPA's kernel instead of choosing as torch does.",
    ),
    click.option(
        "--liger", is_flag=True, default=None, help="Liger's kernels and its loss without logits."
    ),
    click.option(
        "--kernels",
        type=click.Choice(["model", "foak", "foak-liger"]),
        help="foak: fms-acceleration's fused loss, RMSNorm, RoPE and, on 4-bit weights, LoRA; "
        "foak-liger: the same with Liger's loss.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["full", "chunked", "liger"]),
        help="full: logits of all tokens; chunked: TRL's, 256 tokens at a time; liger: Liger's "
        "fused linear cross-entropy alone.",
    ),
    click.option("--compile", is_flag=True, default=None, help="torch.compile, by Inductor."),
    click.option(
        "--compile-scope",
        type=click.Choice(["model", "blocks", "regions"]),
        help="model: as TrainingArguments.torch_compile (default); blocks: each layer, as torchtitan; "
        "regions: each layer and what is around them, as accelerate's use_regional_compilation.",
    ),
    click.option(
        "--packed", is_flag=True, default=None,
        help="One row of all tokens and its position_ids, as DataCollatorWithFlattening makes it.",
    ),
    click.option("--packed-documents", type=int, metavar="N", help="Documents in each sequence."),
    click.option("--task", type=click.Choice(["train", "generate"]), help="Default: train."),
    click.option("--max-new-tokens", type=int, metavar="N", help="Of generate, after -s tokens."),
    click.option("--num-beams", type=int, metavar="K", help="Of generate; 1 is greedy search."),
    click.option(
        "--cache-implementation", type=click.Choice(["dynamic", "static"]),
        help="Of generate; a sliding window is used where the config has one.",
    ),
    click.option("--padding", is_flag=True, default=None, help="Attention masks hold zeros."),
    click.option(
        "--as-transformers", metavar="VERSION", help="Habits of that version, as far as known."
    ),
    click.option("--as-peft", metavar="VERSION", help="Habits of that version, as far as known."),
    click.option("--as-torch", metavar="VERSION", help="Scratch and choices of that version."),
    click.option(
        "--quantization",
        type=click.Choice(["none", "int8", "nf4", "fp4"]),
        help="bitsandbytes' weights; --method qlora alone means nf4.",
    ),
    click.option(
        "--double-quant/--no-double-quant", default=None, help="bnb_4bit_use_double_quant."
    ),
    click.option("--bnb-4bit-compute-dtype", type=click.Choice(["fp32", "bf16", "fp16"])),
    click.option("--bnb-4bit-quant-storage", type=click.Choice(["uint8", "fp32", "bf16", "fp16"])),
    click.option(
        "--prepare-kbit",
        type=click.Choice(["peft", "trl", "none"]),
        help="peft: prepare_model_for_kbit_training; trl: and TRL's casts to bf16; none: neither.",
    ),
    click.option("--as-bitsandbytes", metavar="VERSION", help="Habits of that version."),
    click.option("--lora-r", type=int, metavar="N"),
    click.option("--lora-alpha", type=int, metavar="N"),
    click.option("--lora-dropout", type=float, metavar="P"),
    click.option("--lora-target-modules", metavar="A,B|all-linear"),
    click.option("--lora-bias", type=click.Choice(["none", "all", "lora_only"])),
    click.option("--use-rslora", is_flag=True, default=None),
    click.option("--use-dora", is_flag=True, default=None),
    click.option("--modules-to-save", metavar="A,B", help="Modules trained whole beside adapters."),
    click.option("--num-virtual-tokens", type=int, metavar="N", help="Of prompt methods."),
    click.option(
        "--peft-config", metavar="FILE", help="adapter_config.json; the options above win over it."
    ),
]

_WHERE = [
    click.option("--gpus", type=int, metavar="N", help="Processes, one GPU each."),
    click.option(
        "--strategy",
        type=click.Choice(
            ["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp2", "gemini", "megatron"]
        ),
    ),
    click.option("--tp", type=int, metavar="N", help="Tensor-parallel degree."),
    click.option(
        "--tp-plan",
        type=click.Choice(["transformers", "torchtitan", "colossal", "megatron"]),
        help="transformers: the model's own tp_plan (default); torchtitan: parallelize_module; "
        "colossal: Colossal-AI's, every linear layer row-parallel, as LLMem ran it; megatron: "
        "Megatron-LM's layers and loss.",
    ),
    click.option("--sp", is_flag=True, default=None, help="Sequence parallelism, in that plan."),
    click.option(
        "--loss-parallel", is_flag=True, default=None, help="Logits stay sharded, in that plan."
    ),
    click.option("--cp", type=int, metavar="N", help="Context-parallel degree, a part of --gpus."),
    click.option(
        "--cp-comm",
        type=click.Choice(["allgather", "ring", "ulysses"]),
        help="torch's context_parallel with all-gather (default) or a ring; or DeepSpeed-Ulysses.",
    ),
    click.option(
        "--ep", type=int, metavar="N",
        help="Expert-parallel degree; with fsdp2 and ddp, what is no expert is shared by all.",
    ),
    click.option(
        "--ep-plan",
        type=click.Choice(["transformers", "alltoall"]),
        help="transformers: ranks share a batch and slice it (default); alltoall: each has its own, "
        "as torchtitan's and transformers' fsdp_size with ep_size.",
    ),
    click.option(
        "--routing-balance", type=float, metavar="X",
        help="Tokens of an average expert-parallel rank over the busiest one's; default 1: even.",
    ),
    click.option("--pp", type=int, metavar="N", help="Pipeline-parallel degree."),
    click.option(
        "--pp-schedule",
        type=click.Choice(
            ["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]
        ),
    ),
    click.option("--micro-batches", type=int, metavar="M", help="Parts of the batch under --pp."),
    click.option("--virtual-stages", type=int, metavar="N", help="Stages per rank, interleaved."),
    click.option("--gpu", metavar="NAME", help="See `llmem gpus`; 'cpu' assumes CPU kernels."),
    click.option("--reshard-after-forward", metavar="true|false|N", help="FSDP2's argument."),
    click.option(
        "--keep-last-block",
        is_flag=True,
        default=None,
        help="FSDP2: do not reshard the last block after forward, as torchtitan does.",
    ),
    click.option("--use-orig-params", is_flag=True, default=None, help="FSDP1's argument."),
    click.option(
        "--backward-prefetch", type=click.Choice(["pre", "post", "none"]), help="FSDP1's."
    ),
    click.option(
        "--reduce-dtype",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        help="In which FSDP2 reduces gradients under --bf16 or --fp16; default: fp32.",
    ),
    click.option("--bucket-cap-mb", type=float, help="DDP's argument."),
    click.option("--gradient-as-bucket-view", is_flag=True, default=None, help="DDP's argument."),
    click.option("--deepspeed", metavar="FILE", help="ds_config JSON, for zero1, zero2, zero3."),
    click.option(
        "--placement-policy", type=click.Choice(["cuda", "cpu", "auto"]),
        help="gemini: chunks rest on the GPU (default), on the host, or where room is.",
    ),
    click.option(
        "--zero-init", type=click.BOOL, metavar="true|false",
        help="zero3: false moves the whole model to every GPU before it is partitioned.",
    ),
    click.option("--offload", type=click.Choice(["none", "optimizer", "all"])),
    click.option(
        "--fsdp-transformer-layer-cls-to-wrap", metavar="A,B",
        help="Classes that FSDP wraps; default: the model's _no_split_modules.",
    ),
    click.option(
        "--fsdp-min-num-params", type=int, metavar="N", help="FSDP wraps by number of parameters."
    ),
    click.option(
        "--fsdp-units",
        type=click.Choice(["blocks", "accelerate"]),
        help="FSDP2's units: blocks and the root (default), or as accelerate 1.15 prepares a model, "
        "with the embedding and [final norm, head] apart; --config sets it for accelerate and Trainer.",
    ),
    click.option(
        "--hybrid-shard", "--dp-shard-size", "--data-parallel-shard-degree", "hybrid_shard",
        type=int, metavar="N", help="HSDP: GPUs that share one copy (accelerate's, torchtitan's).",
    ),
    click.option(
        "--dp-replicate-size", "--data-parallel-replicate-degree", "dp_replicate_size",
        type=int, metavar="N", help="HSDP: copies of the parameters (accelerate's, torchtitan's).",
    ),
    click.option(
        "--use-distributed-optimizer", is_flag=True, default=None, help="Of --strategy megatron."
    ),
    click.option(
        "--overlap-grad-reduce", is_flag=True, default=None,
        help="Of that optimizer: buckets. (Megatron's --overlap-param-gather changes no memory.)",
    ),
    click.option(
        "--record-streams", is_flag=True, default=None,
        help="Hold blocks that Tensor.record_stream was called on (FSDP1, ZeRO-3; collectives before "
        "torch 2.8, with TORCH_NCCL_AVOID_RECORD_STREAMS=0) until the CPU waits for the GPU.",
    ),
    click.option("--alloc-conf", metavar="CONF", help="What PYTORCH_ALLOC_CONF takes."),
]


def run_options(command: Command) -> Command:
    """Add the shared options to a click command."""
    for option in reversed(_WHAT + _WHERE):
        command = option(command)
    return command


def spec_fields(
    model: str, options: dict[str, Any], *, trying: Sequence[str] = ()
) -> dict[str, Any]:
    """Takes the shared options out of ``options`` and returns RunSpec fields.

    What config files say comes first, so that an option given beside them wins. ``trying``: the
    strategies that will be tried where none is given. Raises LlmemError for an option that would
    change nothing.
    """
    from llmem.gpu.devices import get_device
    from llmem.interop.config_files import read_configs
    from llmem.spec import RunSpec, make_spec
    from llmem.unused import refuse_unused

    given = {name: options.pop(name) for name in RunSpec.model_fields if name in options}
    fields = {name: value for name, value in given.items() if value is not None}
    targets = fields.get("lora_target_modules")
    if targets is not None and targets != "all-linear":
        fields["lora_target_modules"] = split_names(targets)
    if "fsdp_transformer_layer_cls_to_wrap" in fields:
        wrapped = split_names(fields["fsdp_transformer_layer_cls_to_wrap"])
        fields["fsdp_transformer_layer_cls_to_wrap"] = wrapped
    if "modules_to_save" in fields:
        names = fields["modules_to_save"].split(",")
        fields["modules_to_save"] = tuple(name.strip() for name in names)
    reshard = fields.get("reshard_after_forward")
    if reshard is not None:
        words = {"true": True, "false": False}
        if reshard.lower() not in words and not reshard.isdecimal():
            raise LlmemError(f"--reshard-after-forward {reshard}: write true, false or a number of GPUs")
        fields["reshard_after_forward"] = words.get(reshard.lower(), reshard)
    from_files, notes = read_configs(options.pop("config", ()))
    found = {"model": model, **from_files, **fields, "notes": notes}
    if "gpu" in found:
        get_device(found["gpu"])  # says which names are near
    if trying:
        found.setdefault("strategy", "fsdp2")  # which makes no sense of the fewest other options
    refuse_unused(make_spec(**found), fields, trying)
    return found


def split_names(text: str | None) -> tuple[str, ...] | None:
    """The names in an option's ``A,B``; None if it was not given."""
    return None if text is None else tuple(part.strip() for part in text.split(","))
