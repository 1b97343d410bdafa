"""Real torch.compile on CPU, Inductor's C++ kernels included, and the table of predictions' errors.

    python -m experiments.real_runs.compiled measure|table [--only TEXT]

The whole model (as TrainingArguments.torch_compile), its layers (torchtitan) or regions of it
(accelerate) of five families, in fp32, bf16 and under autocast, with dropout, checkpointing in both
forms, LoRA and accumulation; under DDP, whose buckets cut the model's graph, and FSDP2 on 2 processes.
Each configuration is measured in processes of its own, as Dynamo remembers shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import FAMILIES as DENSE
from matrix import LORA, command, table

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
