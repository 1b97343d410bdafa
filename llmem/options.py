"""The options that say what is trained, shared by estimate, plan, compare and measure.

Each option maps to a RunSpec field; an option that is not given is left to RunSpec's default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_WHAT = [
    click.option("-b", "--per-device-train-batch-size", type=int, help="Sequences per GPU."),
    click.option("-s", "--seq-length", type=int, help="Tokens per sequence."),
    click.option("--gradient-accumulation-steps", type=int, metavar="N"),
    click.option("--method", type=click.Choice(["full", "lora", "qlora"]), help="Default: full."),
    click.option(
        "--param-dtype",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        help="What from_pretrained(dtype=...) loads; default: the config's own dtype.",
    ),
    click.option("--bf16", is_flag=True, default=None, help="bf16 mixed precision."),
    click.option("--fp16", is_flag=True, default=None, help="fp16 mixed precision."),
    click.option("--optim", metavar="NAME", help="As TrainingArguments.optim."),
    click.option("--max-grad-norm", type=float, help="Clip to this norm; 0 turns clipping off."),
    click.option("--gradient-checkpointing", is_flag=True, default=None),
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
        "--loss",
        type=click.Choice(["full", "chunked", "liger"]),
        help="full: logits of all tokens; liger: Liger's fused linear cross-entropy alone.",
    ),
    click.option("--padding", is_flag=True, default=None, help="Attention masks hold zeros."),
    click.option(
        "--as-transformers", metavar="VERSION", help="Habits of that version, as far as known."
    ),
    click.option("--as-torch", metavar="VERSION", help="Scratch and choices of that version."),
    click.option("--lora-r", type=int, metavar="N"),
    click.option("--lora-alpha", type=int, metavar="N"),
    click.option("--lora-dropout", type=float, metavar="P"),
    click.option("--lora-target-modules", metavar="A,B|all-linear"),
]

_WHERE = [
    click.option("--gpus", type=int, metavar="N", help="Processes, one GPU each."),
    click.option(
        "--strategy",
        type=click.Choice(["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp2", "gemini"]),
    ),
    click.option("--tp", type=int, metavar="N", help="Tensor-parallel degree."),
    click.option("--pp", type=int, metavar="N", help="Pipeline-parallel degree."),
    click.option("--pp-schedule", type=click.Choice(["gpipe", "1f1b", "interleaved"])),
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
    click.option("--backward-prefetch", type=click.Choice(["pre", "post", "none"]), help="FSDP1's."),
    click.option(
        "--reduce-dtype",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        help="In which FSDP2 reduces gradients under --bf16 or --fp16; default: fp32.",
    ),
    click.option("--bucket-cap-mb", type=float, help="DDP's argument."),
    click.option("--gradient-as-bucket-view", is_flag=True, default=None, help="DDP's argument."),
    click.option("--deepspeed", metavar="FILE", help="ds_config JSON, for zero1, zero2, zero3."),
    click.option("--offload", type=click.Choice(["none", "optimizer", "all"])),
    click.option("--hybrid-shard", type=int, metavar="N", help="HSDP: GPUs that share one copy."),
    click.option("--alloc-conf", metavar="CONF", help="What PYTORCH_ALLOC_CONF takes."),
]

FIELDS = (
    "per_device_train_batch_size", "seq_length", "gradient_accumulation_steps", "method",
    "param_dtype", "bf16", "fp16", "optim", "max_grad_norm", "gradient_checkpointing",
    "attn_implementation", "sdpa_backend", "liger", "loss", "padding", "as_transformers",
    "as_torch",
    "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "gpus", "strategy", "tp", "pp", "pp_schedule",
    "micro_batches", "virtual_stages", "gpu", "reshard_after_forward",
    "use_orig_params", "backward_prefetch", "reduce_dtype",
    "bucket_cap_mb", "gradient_as_bucket_view", "deepspeed", "offload", "hybrid_shard",
    "alloc_conf",
)  # fmt: skip
"""The RunSpec fields that have an option."""


def run_options(command: Command) -> Command:
    """Add the shared options to a click command."""
    for option in reversed(_WHAT + _WHERE):
        command = option(command)
    return command


def spec_fields(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Takes the shared options out of ``options`` and returns RunSpec fields."""
    given = {name: options.pop(name) for name in FIELDS}
    fields = {name: value for name, value in given.items() if value is not None}
    targets = fields.get("lora_target_modules")
    if targets is not None and targets != "all-linear":
        fields["lora_target_modules"] = tuple(part.strip() for part in targets.split(","))
    reshard = fields.get("reshard_after_forward")
    if reshard is not None:
        words = {"true": True, "false": False}
        fields["reshard_after_forward"] = words.get(reshard.lower(), reshard)
    return {"model": model, **fields}
