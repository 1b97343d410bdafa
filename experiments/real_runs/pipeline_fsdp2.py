"""Real pipelines of FSDP2 stages on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.pipeline_fsdp2 measure|table [--only TEXT]

Two stages (or two ranks of two) of two replicas each: torch.distributed.pipelining's schedules
around ``fully_shard``-ed stages. ``keep``: reshard_after_forward is false, torchtitan's habit under
pipelines; ``free``: it is true; ``mixed``: bf16 compute, fp32 shards and reduction.

What is left of differences: CPU kernels' scalars, as in ``pipeline``, and up to 2.5 % where
micro-batches' bf16 gradients are added to one in fp32 at the peak: the CPU's TensorIterator makes an
fp32 copy of the former (400,232 bytes for the embedding's), and CUDA's does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import LORA, command
from pipeline import FAMILIES, table

from llmem.spec import RunSpec, make_spec

KEPT: dict[str, Any] = {}
FREED = {"reshard_after_forward": True}
MIXED = {"bf16": True}
CHECKPOINTED = {"gradient_checkpointing": True}
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1f1b-keep": ("llama", "1f1b", KEPT),
    "llama-1f1b-free-mixed-ckpt": ("llama", "1f1b", FREED | MIXED | CHECKPOINTED),
    "llama-gpipe-keep-mixed": ("llama", "gpipe", KEPT | MIXED),
    "llama-interleaved-keep-ckpt": ("llama", "interleaved", KEPT | CHECKPOINTED),
    "llama-interleaved-free-mixed": ("llama", "interleaved", FREED | MIXED),
    "qwen2-1f1b-keep-mixed": ("qwen2", "1f1b", KEPT | MIXED),
    "qwen2-gpipe-free": ("qwen2", "gpipe", FREED),
    "qwen2-interleaved-keep": ("qwen2", "interleaved", KEPT),
    "gpt2-1f1b-keep-ckpt": ("gpt2", "1f1b", KEPT | CHECKPOINTED),
    "gpt2-gpipe-keep-mixed-ckpt": ("gpt2", "gpipe", KEPT | MIXED | CHECKPOINTED),
    "gpt2-1f1b-free-lora": ("gpt2", "1f1b", FREED | {"method": "lora"} | LORA["gpt2"]),
    "llama-1f1b-keep-lora": ("llama", "1f1b", KEPT | {"method": "lora"} | LORA["llama"]),
}


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each."""
    for name, (family, schedule, fields) in LAYOUTS.items():
        yield f"pp-fsdp2-{name}", make_spec(
            model=FAMILIES[family], per_device_train_batch_size=8, seq_length=29, param_dtype="fp32",
            gpus=4, pp=2, micro_batches=4, pp_schedule=schedule, strategy="fsdp2", **fields,
        )  # fmt: skip


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
