"""Real runs of hybrid sharding and of ``reshard_after_forward=N`` over gloo, and their errors.

    python -m experiments.real_runs.hybrid measure|table [--only TEXT]

Four processes: FSDP2 on meshes of 2 replicas x 2 shards (``hsdp``) and of 4 replicas (``alone``),
FSDP2 that keeps half of each gathered block after forward (``half``), and FSDP1's HYBRID_SHARD and
its ZERO2 form; FSDP2 on one process; and other modules wrapped than the blocks (``wrap``), by class,
one inside another, by size, or none. Precisions, reduction dtypes, adapters and accumulation
rotate over the families of ``matrix``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import FAMILIES, LORA, command, table

from llmem.spec import RunSpec, make_spec

HSDP: dict[str, Any] = {"dp_replicate_size": 2}
BF16: dict[str, Any] = {"bf16": True}
LOW: dict[str, Any] = {"bf16": True, "reduce_dtype": "bf16"}


def wrap(*classes: str) -> dict[str, Any]:
    return {"gpus": 2, "fsdp_transformer_layer_cls_to_wrap": classes}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hsdp": ("fsdp2", "llama", HSDP),
    "hsdp-bf16": ("fsdp2", "qwen2", HSDP | BF16),
    "hsdp-bf16-reduced": ("fsdp2", "gpt2", HSDP | LOW),
    "hsdp-bf16-reduced-ckpt": ("fsdp2", "llama", HSDP | LOW | {"gradient_checkpointing": True}),
    "hsdp-accumulation": (
        "fsdp2", "qwen2", HSDP | LOW | {"gradient_accumulation_steps": 2},
    ),
    "hsdp-lora": ("fsdp2", "llama", HSDP | BF16 | {"method": "lora", "param_dtype": "bf16"}),
    "hsdp-keep": ("fsdp2", "gpt2", HSDP | {"reshard_after_forward": False}),
    "half": ("fsdp2", "llama", {"reshard_after_forward": 2}),
    "half-bf16": ("fsdp2", "qwen2", BF16 | {"reshard_after_forward": 2}),
    "half-bf16-ckpt": (
        "fsdp2", "gpt2", BF16 | {"reshard_after_forward": 2, "gradient_checkpointing": True},
    ),
    "half-lora": (
        "fsdp2", "llama", LOW | {"reshard_after_forward": 2, "method": "lora"},
    ),
    "alone": ("fsdp2", "llama", {"dp_replicate_size": 4}),
    "alone-bf16": ("fsdp2", "gpt2", LOW | {"dp_replicate_size": 4}),
    "one": ("fsdp2", "llama", {"gpus": 1}),
    "one-bf16": ("fsdp2", "qwen2", BF16 | {"gpus": 1}),
    "hybrid": ("fsdp", "llama", HSDP),
    "hybrid-bf16": ("fsdp", "qwen2", HSDP | BF16 | {"use_orig_params": True}),
    "hybrid-bf16-ckpt": ("fsdp", "gpt2", HSDP | BF16 | {"gradient_checkpointing": True}),
    "hybrid-zero2": ("fsdp", "gpt2", HSDP | {"reshard_after_forward": False}),
    "hybrid-lora": ("fsdp", "llama", HSDP | BF16 | {"method": "lora"}),
    "wrap-mlp": ("fsdp2", "llama", wrap("LlamaMLP")),
    "wrap-nested-bf16": ("fsdp2", "llama", BF16 | wrap("LlamaDecoderLayer", "LlamaMLP")),
    "wrap-nested-ckpt": (
        "fsdp2", "gpt2", wrap("GPT2Block", "GPT2Attention") | {"gradient_checkpointing": True},
    ),
    "wrap-nothing": ("fsdp2", "qwen2", BF16 | wrap()),
    "wrap-nested": ("fsdp", "llama", wrap("LlamaDecoderLayer", "LlamaMLP")),
    "wrap-size": ("fsdp", "llama", {"gpus": 2, "fsdp_min_num_params": 50_000}),
    "wrap-size-bf16": ("fsdp", "llama", BF16 | {"gpus": 2, "fsdp_min_num_params": 20_000}),
}  # fmt: skip
"""Name -> strategy, family, and what differs from full fp32 training on 4 processes."""


def configurations() -> Iterator[tuple[str, RunSpec]]:
    for name, (strategy, family, fields) in CASES.items():
        common: dict[str, Any] = {
            "model": FAMILIES[family], "per_device_train_batch_size": 3, "seq_length": 29,
            "param_dtype": "fp32", "gpus": 4, "strategy": strategy,
        }  # fmt: skip
        adapters = LORA[family] if "method" in fields else {}
        yield f"hybrid-{strategy}-{family}-{name}", make_spec(**(common | adapters | fields))


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
