"""Rows of ``public_runs.csv``, which holds many sources: one row per run and counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmem.measure.published.megatron import megatron_spec
from llmem.measure.published.peft import peft_spec
from llmem.measure.published.run import CannotExpress, Line, Run, model_of, run_of, whole
from llmem.spec import RunSpec, make_spec


def public(line: Line) -> Run:
    """A row, read as its source needs; kernels and habits that are not modelled are named."""
    metric = {"max_allocated": "allocated", "max_reserved": "reserved", "max_active": "active"}
    shape = f"batch {line['batch_size_per_gpu']} x {line['seq_len']}"
    name = f"{line['model']} {line['method']} {line['parallel_strategy']} {shape} {line['notes']}"
    measured = line["measured_bytes"]
    return run_of(
        lambda: _public_spec(line), source=line["source"], name=name[:110],
        metric=metric.get(line["metric"], line["metric"]),
        measured=whole(measured) if measured else 0, grade=line["grade"],
    )  # fmt: skip


def _public_spec(line: Line) -> RunSpec:
    if not line["measured_bytes"]:
        raise CannotExpress("it ran out of memory: no figure")
    if line["model"].startswith("op:") or line["method"].startswith("op-level"):
        where = " (experiments.public_runs.liger_ops)" if "Liger" in line["source"] else ""
        raise CannotExpress(f"one op, not a training run{where}")
    if line["grade"] == "C":
        raise CannotExpress("a rough figure: its configuration is incomplete")
    if line["metric"] not in ("max_allocated", "max_reserved", "max_active"):
        raise CannotExpress(f"the counter is {line['metric']}")
    make = _SOURCES.get(line["source"])
    if make is None:
        raise CannotExpress(f"model code and loop of {line['source']}")
    return make(line)


_TITAN_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"gradient_checkpointing": True},
    "full AC": {"gradient_checkpointing": True},
    "selective op": {"gradient_checkpointing": True, "checkpoint_policy": "op"},
    "selective op (SAC, every 2nd mm)": {"gradient_checkpointing": True, "checkpoint_policy": "op"},
}


_TITAN_2024 = {
    "83c879f18": "2024-03", "7a49674b8": "2024-06", "9dc418a8b": "2024-07", "6b2f67313": "2024-10",
    "9dec370": "2024-12",
}  # fmt: skip
"""Commits before AdamW was fused by default."""
_TITAN_EXPANDABLE = "2024-10-22"
"""Since when the run script sets expandable segments (a5e57e4a9)."""
_TITAN_LOSS_PARALLEL = "2024-05"
"""Since when its tensor-parallel plan leaves logits sharded (``enable_loss_parallel``)."""


def _torchtitan(line: Line) -> RunSpec:
    """torchtitan's own Llama, taken for transformers' of the same shapes: fp32 under FSDP2 in bf16.

    FSDP2 leaves the last block gathered, gradients are clipped, tensor parallelism comes with
    sequence parallelism, and blocks are compiled one by one. The rows of 2024 are older than fused
    AdamW, those before late October than expandable segments in the run script; until March 2024 the
    loop held the logits. The row that says "step 1" has no optimizer states yet.
    """
    if line["parallel_strategy"] not in ("FSDP2", "FSDP2 eager", "FSDP2+TP"):
        raise CannotExpress(f"{line['parallel_strategy'] or 'no strategy'} of torchtitan")
    if line["model"] != "Llama-2-7B" and line["grad_checkpointing"] == "full":
        raise CannotExpress(
            "less was reserved than states and full logits take: the loss is unknown"
        )
    if "step 1" in line["notes"]:
        raise CannotExpress("the first step alone, read before optimizer states exist")
    if not line["compute_dtype"].startswith("bf16 (") or "float8" in line["compute_dtype"]:
        raise CannotExpress(f"computes in {line['compute_dtype']}")
    checkpoints = _TITAN_CHECKPOINTS.get(line["grad_checkpointing"] or "none")
    if checkpoints is None:
        raise CannotExpress(f"checkpointing '{line['grad_checkpointing']}'")
    if not line["seq_len"].isdecimal() or not line["batch_size_per_gpu"].isdecimal():
        raise CannotExpress("batch or length is not a number")
    commit = "9dec370" if "titan 9dec370" in line["notes"] else line["commit"][:9]
    date = _TITAN_2024.get(commit, "later")
    tp = whole(line["tp"] or "1")
    plan: dict[str, Any] = {}
    if tp > 1 and date < _TITAN_LOSS_PARALLEL:
        raise CannotExpress("the tensor-parallel plan of torchtitan's first months")
    if tp > 1:
        plan = {"tp": tp, "tp_plan": "torchtitan", "sp": True, "loss_parallel": True}
    return make_spec(
        model=model_of(line["model"]), per_device_train_batch_size=int(line["batch_size_per_gpu"]),
        seq_length=int(line["seq_len"]), param_dtype="fp32", bf16=True,
        optim="adamw_torch_fused" if date == "later" else "adamw_torch",
        gpus=whole(line["world_size"]), strategy="fsdp2", keep_last_block=True,
        hold_outputs=date == "2024-03", gpu=_gpu(line["gpu"]), **checkpoints, **plan,
        alloc_conf="expandable_segments:True" if date > _TITAN_EXPANDABLE else "",
        **_compiled_blocks(line),
    )  # fmt: skip


def _compiled_blocks(line: Line) -> dict[str, Any]:
    """torchtitan and torchtune compile layer by layer; a checkpoint here lies inside, as torchtitan's."""
    return {"compile": True, "compile_scope": "blocks"} if line["compile"] == "True" else {}


def _fsdp_qlora(line: Line) -> RunSpec:
    """AnswerDotAI/fsdp_qlora: LoRA of rank 64 on all linears in bf16, reentrant checkpoints.

    4-bit weights (nf4, absmax quantised too) are stored in bf16, so that FSDP1 can flatten them.
    By train.py's defaults dropout is 0.1, nothing is clipped, and outputs live until the next forward.
    """
    if line["parallel_strategy"].startswith("DDP"):
        raise CannotExpress("FSDP1's NO_SHARD")
    if line["seq_len"] == "24576":
        raise CannotExpress("packed documents of unknown lengths in 24,576 tokens")
    fields: dict[str, Any] = {"method": "lora"}
    if line["method"] == "qlora":
        fields = {
            "method": "qlora", "quantization": "nf4", "double_quant": True,
            "bnb_4bit_quant_storage": "bf16", "prepare_kbit": "none", "as_bitsandbytes": "0.43",
        }  # fmt: skip
    if "cpu_offload" in line["notes"]:
        fields["offload"] = "all"
    return make_spec(
        model=model_of(line["model"]), per_device_train_batch_size=int(line["batch_size_per_gpu"]),
        seq_length=int(line["seq_len"]), lora_r=64, lora_alpha=16, lora_dropout=0.1,
        hold_outputs=True, max_grad_norm=0.0,
        lora_target_modules="all-linear", autocast_adapter_dtype=False, param_dtype="bf16",
        optim="adamw_torch", gradient_checkpointing=True, as_transformers="4.39",
        gpus=whole(line["world_size"]), strategy="fsdp", gpu=_gpu(line["gpu"]), **fields,
    )  # fmt: skip


_AO_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"gradient_checkpointing": True},
    "selective every 2nd layer": {"gradient_checkpointing": True, "checkpoint_every": 2},
}


def _ao(line: Line) -> RunSpec:
    """torchao's float8 tables, made with torchtitan: the rows in bf16, eager, FSDP2.

    As torchtitan's: fp32 parameters, fused AdamW, expandable segments, one block of which every
    second is checkpointed where the row says so.
    """
    if line["method"] != "full":
        raise CannotExpress("decoding by a model of gpt-fast's kind, with caches of its own")
    if line["compute_dtype"] != "bf16":
        raise CannotExpress("float8 products")
    return make_spec(
        model=model_of(line["model"]), per_device_train_batch_size=int(line["batch_size_per_gpu"]),
        seq_length=int(line["seq_len"]), param_dtype="fp32", bf16=True,
        optim="adamw_torch_fused", gpus=whole(line["world_size"]), strategy="fsdp2",
        keep_last_block=True, gpu=_gpu(line["gpu"]), alloc_conf="expandable_segments:True",
        **_AO_CHECKPOINTS[line["grad_checkpointing"]],
    )  # fmt: skip


def _litgpt(line: Line) -> RunSpec:
    """litgpt's GPT is not transformers' model: fused QKV, rotary tables in fp32, a chunked head."""
    if line["method"].startswith("inference"):
        raise CannotExpress("decoding by litgpt's own model and caches")
    if line["param_dtype"].startswith("bnb") or line["method"].startswith("q"):
        raise CannotExpress("litgpt's own model with 4-bit weights under Fabric")
    if line["method"].startswith("adapter"):
        raise CannotExpress("adapters (LLaMA-Adapter, v2) of litgpt's own model")
    if line["parallel_strategy"] == "FSDP":
        raise CannotExpress("litgpt's own model under FSDP1, units of which are partly trained")
    if not line["seq_len"].isdecimal():
        raise CannotExpress("litgpt's own model, and lengths that the row leaves open")
    raise CannotExpress("litgpt's own model (experiments.public_runs.litgpt has it)")


def _accelerate(line: Line) -> RunSpec:
    """accelerate's FSDP2 benchmark; figures were read off a plot (within 40 MiB)."""
    if "before FSDP without fix" in line["notes"] or ", no fix" in line["notes"]:
        raise CannotExpress("an optimizer made before FSDP2 shards, without accelerate's fix")
    if line["metric"] == "max_allocated":
        raise CannotExpress("allocated bytes were sampled every 10 ms, which misses peaks")
    return make_spec(
        model=model_of(line["model"]), per_device_train_batch_size=int(line["batch_size_per_gpu"]),
        seq_length=int(line["seq_len"]), param_dtype="fp32", bf16=True, optim="adamw_torch",
        gpus=whole(line["world_size"]), strategy="fsdp2", gpu="h100-80gb",
    )  # fmt: skip


def _torchtune(line: Line) -> RunSpec:
    """torchtune's own Llama, taken for transformers', all in bf16, on one GPU.

    The table's AdamW is fused: what foreach's step makes is more than three of its rows have room for.
    """
    if not line["seq_len"].endswith(" packed"):
        raise CannotExpress("lengths of torchtune's batches that the row leaves open")
    if line["method"] == "qlora":
        raise CannotExpress("torchao's NF4 weights, in torchtune's own model")
    if line["loss_impl"] != "CE (full logits)":
        raise CannotExpress("torchtune's loss in chunks (experiments.public_runs.torchtune has it)")
    return make_spec(
        model=model_of(line["model"]), per_device_train_batch_size=int(line["batch_size_per_gpu"]),
        seq_length=int(line["seq_len"].split()[0]), param_dtype="bf16", optim="adamw_torch_fused",
        max_grad_norm=0.0, zero_grad="after_step", gpu="a100-80gb", **_compiled_blocks(line),
    )  # fmt: skip


_GPUS = {
    "H100 96GB": "h100-80gb",
    "H100": "h100-80gb",
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
}
"""Cards under the name of the profile whose kernels they have."""


def _gpu(name: str) -> str:
    return _GPUS.get(name, name)


_SOURCES: dict[str, Callable[[Line], RunSpec]] = {
    "huggingface/peft": peft_spec,
    "pytorch/torchtitan": _torchtitan,
    "pytorch/ao": _ao,
    "Lightning-AI/litgpt": _litgpt,
    "AnswerDotAI/fsdp_qlora": _fsdp_qlora,
    "huggingface/accelerate": _accelerate,
    "pytorch/torchtune": _torchtune,
    "megatron-logs": megatron_spec,
}
