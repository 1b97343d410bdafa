"""Real hybrid sharding (HSDP) in its products, on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.hybrid_products measure|table [--only TEXT]

Eight processes: two copies of the parameters, each shared by two ranks, times tensor parallelism
(``tp-``), pipelines (``pp-``) or context parallelism (``cp-``) of degree 2. fp32 and FSDP2's bf16.
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

SP = {"tp": 2, "tp_plan": "torchtitan", "sp": True}
PIPELINE = {"pp": 2, "micro_batches": 4, "per_device_train_batch_size": 8, "num_hidden_layers": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp-titan-sp-llama": ("llama", SP),
    "tp-titan-sp-loss-qwen2-bf16": ("qwen2", {**SP, "loss_parallel": True, "bf16": True}),
    "tp-hf-qwen2-ckpt": ("qwen2", {"tp": 2, "gradient_checkpointing": True}),
    "pp-llama-1f1b": ("llama", PIPELINE),
    "pp-qwen2-interleaved-bf16": ("qwen2", {**PIPELINE, "pp_schedule": "interleaved", "bf16": True}),
    "pp-llama-gpipe-kept": (
        "llama", {**PIPELINE, "pp_schedule": "gpipe", "reshard_after_forward": False}),
    "cp-llama-ring": ("llama", {"cp": 2, "cp_comm": "ring", "gpus": 4}),
    "cp-qwen2-ulysses-ckpt": (
        "qwen2", {"cp": 2, "cp_comm": "ulysses", "gradient_checkpointing": True}),
}  # fmt: skip


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each."""
    for name, (family, case) in CASES.items():
        fields = dict(case)
        layers = fields.pop("num_hidden_layers", None)
        model = {**WIDTHS, **FAMILIES[family], "model_type": family}
        yield f"hybrid-{name}", make_spec(
            model=model if layers is None else {**model, "num_hidden_layers": layers},
            **{"per_device_train_batch_size": 3, "gpus": 8, **fields},
            seq_length=40,
            param_dtype="fp32",
            strategy="fsdp2",
            dp_replicate_size=2,
        )


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
