"""Real expert parallelism on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.expert_parallel measure|table [--only TEXT]

transformers' ep_plan on 2 and 4 processes for two families: ranks that share a batch, with the rest of
the model whole (``ep-shared-``) and tensor-parallel (``ep-tp-``), and ranks with a batch each
(``ep-alltoall-``). Tokens are dealt out to the experts in turn, so that every rank receives as many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import command, table
from tensor_parallel import WIDTHS

from llmem.spec import RunSpec, make_spec

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 92, "head_dim": 14, "norm_topk_prob": True,
    },
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "shared": {},
    "tp": {"tp": True},
    "alltoall": {"ep_plan": "alltoall"},
}


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each of the 12; precision and checkpointing in turn."""
    cases = product(FAMILIES.items(), PLANS.items(), (2, 4))
    for number, ((family, rest), (plan, fields), degree) in enumerate(cases):
        bf16, checkpointing = bool(number % 2), bool(number // 2 % 2)
        spec = make_spec(
            model={**WIDTHS, **rest, "model_type": family, "tie_word_embeddings": False},
            per_device_train_batch_size=4,
            seq_length=28,
            param_dtype="fp32",
            bf16=bf16,
            gradient_checkpointing=checkpointing,
            gpus=degree,
            ep=degree,
            **{**fields, **({"tp": degree} if "tp" in fields else {})},
        )
        parts = ["ep", plan, family, str(degree), "bf16" if bf16 else "fp32"]
        yield "-".join(parts + (["ckpt"] if checkpointing else [])), spec


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
