"""Real torch.compile on CPU, Inductor's C++ kernels included, and the table of predictions' errors.

    python -m experiments.real_runs.compiled measure|table [--only TEXT]

The whole model (as TrainingArguments.torch_compile), its layers (torchtitan) or regions of it
(accelerate) of five families, in fp32, bf16 and under autocast, with dropout, checkpointing in both
forms, LoRA and accumulation; under DDP, whose buckets cut the model's graph, and FSDP2 on 2 processes;
layers with tensor, pipeline and context parallelism on 2 and 4.
Each configuration is measured in processes of its own, as Dynamo remembers shapes.

What is left of differences is of CPUs or of the first step. Attention that a checkpointed layer
computes again saves the state of the CPU's generator, 5,056 bytes a layer (a GPU's is 16 bytes on the
host). A frame that Dynamo gives up (GPT-2's loss, which logs a warning) lives in cycles and keeps
logits until Python collects them, which the first step of a record does not do. In
``fsdp2-mixed-ckpt`` the first layer's input lives through a peak of its backward (17,052 bytes); why
is not known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import FAMILIES as DENSE
from matrix import LORA, command, table
from tensor_parallel import FAMILIES as EVEN
from tensor_parallel import WIDTHS

from llmem.spec import RunSpec, make_spec

_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 54, "head_dim": 14,
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {**model, "n_layer" if name == "gpt2" else "num_hidden_layers": 2}
        for name, model in DENSE.items()
    },
    **{
        name: {**DENSE["llama"], "num_hidden_layers": 2, "model_type": name, **rest}
        for name, rest in _EXPERTS.items()
    },
}
_AUTOCAST = {"bf16": True, "param_dtype": "fp32"}
_CHECKPOINTS = {"gradient_checkpointing": True}
_BY_OP = {"gradient_checkpointing": True, "checkpoint_policy": "op"}
_TWICE = {"gradient_accumulation_steps": 2}
_DDP = {"strategy": "ddp", "gpus": 2, "bucket_cap_mb": 1.0}
_FSDP2 = {"strategy": "fsdp2", "gpus": 2}
_DIVIDES = {
    family: {"model": {**WIDTHS, **EVEN[family], "model_type": family, "num_hidden_layers": 2}}
    for family in ("llama", "qwen2")
}
_TENSOR = {"tp": 2, "gpus": 2, "seq_length": 40}
_SP = {"tp_plan": "torchtitan", "sp": True}
_PIPELINE = {"pp": 2, "gpus": 2, "per_device_train_batch_size": 4, "micro_batches": 4}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

_RUNS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("model", "llama", "fp32", {}),
    ("blocks", "llama", "fp32", {}),
    ("regions", "llama", "fp32", {}),
    ("model", "qwen2", "autocast", _AUTOCAST),
    ("blocks", "qwen2", "autocast", _AUTOCAST),
    ("regions", "qwen2", "autocast", _AUTOCAST),
    ("model", "gpt2", "dropout", {}),
    ("blocks", "gpt2", "dropout-autocast", _AUTOCAST),
    ("model", "gpt2", "autocast", {"model": {**FAMILIES["gpt2"], **_NO_DROPOUT}, **_AUTOCAST}),
    ("model", "qwen2", "bf16", {"param_dtype": "bf16"}),
    ("regions", "llama", "bf16", {"param_dtype": "bf16"}),
    ("model", "mixtral", "fp32", {}),
    ("blocks", "qwen3_moe", "fp32", {}),
    ("model", "llama", "ckpt", _CHECKPOINTS),
    ("blocks", "qwen2", "ckpt-autocast", {**_CHECKPOINTS, **_AUTOCAST}),
    ("blocks", "llama", "ckpt-op", _BY_OP),
    ("model", "qwen2", "ckpt-op-bf16", {**_BY_OP, "param_dtype": "bf16"}),
    ("model", "llama", "lora-autocast", {"method": "lora", **LORA["llama"], **_AUTOCAST}),
    ("blocks", "qwen2", "lora-ckpt", {"method": "lora", **LORA["qwen2"], **_CHECKPOINTS}),
    ("model", "llama", "accumulation", _TWICE),
    ("blocks", "gpt2", "accumulation", _TWICE),
    ("model", "llama", "ddp", _DDP),
    ("blocks", "qwen2", "ddp-autocast", {**_DDP, **_AUTOCAST}),
    ("blocks", "llama", "fsdp2", _FSDP2),
    ("blocks", "qwen2", "fsdp2-mixed-ckpt", {**_FSDP2, **_AUTOCAST, **_CHECKPOINTS}),
    ("blocks", "llama", "tp-sp-loss", {**_DIVIDES["llama"], **_TENSOR, **_SP, "loss_parallel": True}),
    ("blocks", "qwen2", "tp-hf", {**_DIVIDES["qwen2"], **_TENSOR}),
    ("blocks", "llama", "fsdp2-tp-sp-ckpt-op", {
        **_DIVIDES["llama"], **_FSDP2, **_TENSOR, **_SP, **_BY_OP, "gpus": 4}),
    ("blocks", "llama", "pp-1f1b", _PIPELINE),
    ("blocks", "qwen2", "pp-fsdp2-ckpt", {**_PIPELINE, **_CHECKPOINTS, **_FSDP2, "gpus": 4}),
    ("blocks", "llama", "pp-tp-sp", {
        **_DIVIDES["llama"], **_PIPELINE, **_TENSOR, **_SP, "gpus": 4}),
    ("blocks", "llama", "cp-fsdp2", {**_FSDP2, "cp": 2, "seq_length": 40}),
    ("blocks", "qwen2", "cp-ulysses-fsdp2", {
        **_DIVIDES["qwen2"], **_FSDP2, "cp": 2, "cp_comm": "ulysses", "seq_length": 40}),
)
"""(scope, family, what it is called, fields)"""


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each."""
    for scope, family, what, fields in _RUNS:
        yield f"compile-{scope}-{family}-{what}", make_spec(**{
            "model": FAMILIES[family], "per_device_train_batch_size": 3, "seq_length": 29,
            "param_dtype": "fp32", "compile": True, "compile_scope": scope, **fields,
        })  # fmt: skip


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
