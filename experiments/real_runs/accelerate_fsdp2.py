"""Real runs of FSDP2 as accelerate prepares it, over gloo, and the predictions' errors.

    python -m experiments.real_runs.accelerate_fsdp2 measure|table [--only TEXT]

Every process shards its model with accelerate's own ``fsdp2_prepare_model``: blocks, the embedding,
[final norm, head] and the root, or with tied weights one unit of the ends. Families of ``matrix``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import FAMILIES, LORA, command, table

from llmem.spec import RunSpec, make_spec

BF16: dict[str, Any] = {"bf16": True, "reduce_dtype": "bf16"}
CKPT: dict[str, Any] = {"gradient_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16-ckpt": BF16 | CKPT,
    "bf16-accumulation": BF16 | {"gradient_accumulation_steps": 2, "gpus": 3},
    "bf16-keep": BF16 | {"reshard_after_forward": False, "gpus": 3},
    "bf16-lora": BF16 | {"method": "lora", "param_dtype": "bf16"},
    "bf16-lora-ckpt": BF16 | CKPT | {"method": "lora", "param_dtype": "bf16", "use_reentrant": True},
}
"""What differs from full fp32 training on two processes, tried in every family."""


def configurations() -> Iterator[tuple[str, RunSpec]]:
    for family, model in FAMILIES.items():
        for name, fields in CASES.items():
            common: dict[str, Any] = {
                "model": model, "per_device_train_batch_size": 3, "seq_length": 29, "gpus": 2,
                "param_dtype": "fp32", "strategy": "fsdp2", "fsdp_units": "accelerate",
            }  # fmt: skip
            adapters = LORA[family] if "method" in fields else {}
            yield f"accelerate-fsdp2-{family}-{name}", make_spec(**(common | adapters | fields))


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
