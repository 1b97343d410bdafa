"""Real context parallelism in its products, on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.context_products measure|table [--only TEXT]

Under FSDP2 (which shards over dp x cp) with tensor parallelism (``tp-``: transformers' and torchtitan's
plan, sequence and loss parallel), in pipelines (``pp-``, also under DDP) and in both at once, on eight
processes (``tp-pp-``). Runs are fp32 and, where a peak falls into attention's backward, the CPU's kernel
allocates for itself what the trace does not model, as in ``context_parallel``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import command
from pipeline import table
from tensor_parallel import FAMILIES, WIDTHS

from llmem.spec import RunSpec, make_spec

SP = {"tp_plan": "torchtitan", "sp": True}
TENSOR = {"tp": 2, "gpus": 4, "strategy": "fsdp2"}
PIPELINE = {"pp": 2, "gpus": 4, "micro_batches": 4, "per_device_train_batch_size": 8}
AGAIN = {"gradient_checkpointing": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp-hf-llama-allgather": ("llama", {**TENSOR}),
    "tp-hf-qwen2-ring-ckpt": ("qwen2", {**TENSOR, **AGAIN, "cp_comm": "ring"}),
    "tp-titan-llama-ring": ("llama", {**TENSOR, "tp_plan": "torchtitan", "cp_comm": "ring"}),
    "tp-titan-qwen2-ulysses": ("qwen2", {**TENSOR, "tp_plan": "torchtitan", "cp_comm": "ulysses"}),
    "tp-titan-sp-llama-allgather-ckpt": ("llama", {**TENSOR, **SP, **AGAIN}),
    "tp-titan-sp-qwen2-ring": ("qwen2", {**TENSOR, **SP, "cp_comm": "ring"}),
    "tp-titan-sp-loss-llama-allgather": ("llama", {**TENSOR, **SP, "loss_parallel": True}),
    "pp-ddp-llama-1f1b-allgather": ("llama", {**PIPELINE, "strategy": "ddp"}),
    "pp-fsdp2-llama-1f1b-ring-ckpt": (
        "llama", {**PIPELINE, **AGAIN, "strategy": "fsdp2", "cp_comm": "ring"}),
    "pp-fsdp2-qwen2-gpipe-allgather": (
        "qwen2", {**PIPELINE, "strategy": "fsdp2", "pp_schedule": "gpipe"}),
    "pp-fsdp2-qwen2-interleaved-ulysses": (
        "qwen2", {**PIPELINE, "strategy": "fsdp2", "pp_schedule": "interleaved", "cp_comm": "ulysses"}),
    "tp-pp-titan-sp-llama-1f1b-allgather-ckpt": (
        "llama", {**PIPELINE, **SP, **AGAIN, "tp": 2, "gpus": 8, "strategy": "fsdp2"}),
    "tp-pp-titan-sp-loss-qwen2-1f1b-ring": (
        "qwen2", {**PIPELINE, **SP, "loss_parallel": True, "tp": 2, "gpus": 8, "strategy": "fsdp2",
                  "cp_comm": "ring"}),
    "tp-pp-hf-qwen2-1f1b-ring": (
        "qwen2", {**PIPELINE, "tp": 2, "gpus": 8, "strategy": "fsdp2", "cp_comm": "ring"}),
}  # fmt: skip


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each: the products' degrees are 2."""
    for name, (family, fields) in CASES.items():
        layers = {"num_hidden_layers": 5} if "pp" in fields else {}
        yield f"cp-{name}", make_spec(
            model={**WIDTHS, **FAMILIES[family], "model_type": family, **layers},
            **{"per_device_train_batch_size": 3, **fields},
            seq_length=40,
            param_dtype="fp32",
            cp=2,
        )


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
