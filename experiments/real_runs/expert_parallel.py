"""Real expert parallelism on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.expert_parallel measure|table [--only TEXT]

transformers' ep_plan on 2 and 4 processes. Without an engine: ranks that share a batch, with the rest of
the model whole (``ep-shared-``) and tensor-parallel (``ep-tp-``), and ranks with a batch each
(``ep-alltoall-``). Under FSDP2 (``ep-fsdp2-``), whose shards of the experts are among the ranks that hold
the same ones, and DDP (``ep-ddp-``), with a batch each or, ``-shared``, one for the ranks of a group;
``4x2`` is 4 processes with experts over 2. Tokens are dealt out to the experts in turn, so that every
rank receives as many. ``-lora``: adapters on attention, experts frozen.
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

# Grouped matmuls in bf16 want rows of whole 16 bytes.
ALIGNED = {
    **WIDTHS, "hidden_size": 120, "intermediate_size": 104, "head_dim": 24, "tie_word_embeddings": False,
}  # fmt: skip
ENGINE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": {**FAMILIES["qwen3_moe"], "moe_intermediate_size": 88, "head_dim": 24},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
}  # fmt: skip
LORA = {"method": "lora", "lora_target_modules": ("q_proj", "o_proj")}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2-2x2": {"strategy": "fsdp2", "gpus": 2, "ep": 2},
    "fsdp2-4x2": {"strategy": "fsdp2", "gpus": 4, "ep": 2},
    "fsdp2-4x4": {"strategy": "fsdp2", "gpus": 4, "ep": 4},
    "fsdp2-shared-4x2": {"strategy": "fsdp2", "gpus": 4, "ep": 2, "ep_plan": "transformers"},
    "fsdp2-hybrid-4x2": {"strategy": "fsdp2", "gpus": 4, "ep": 2, "hybrid_shard": 2},
    "fsdp2-keep-4x2": {
        "strategy": "fsdp2", "gpus": 4, "ep": 2, "reshard_after_forward": False,
        "gradient_accumulation_steps": 2,
    },
    "ddp-2x2": {"strategy": "ddp", "gpus": 2, "ep": 2, "bucket_cap_mb": 0.5},
    "ddp-4x2": {"strategy": "ddp", "gpus": 4, "ep": 2, "bucket_cap_mb": 0.5},
    "ddp-views-4x2": {"strategy": "ddp", "gpus": 4, "ep": 2, "gradient_as_bucket_view": True},
    "ddp-shared-4x2": {"strategy": "ddp", "gpus": 4, "ep": 2, "ep_plan": "transformers"},
    "fsdp2-lora-4x2": {"strategy": "fsdp2", "gpus": 4, "ep": 2, **LORA},
    "ddp-lora-4x2": {"strategy": "ddp", "gpus": 4, "ep": 2, **LORA},
}  # fmt: skip


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each of the 48; precision and checkpointing in turn."""
    cases = product(FAMILIES.items(), PLANS.items(), (2, 4))
    for number, ((family, rest), (plan, fields), degree) in enumerate(cases):
        model = {**WIDTHS, **rest, "tie_word_embeddings": False}
        tp = {"tp": degree} if "tp" in fields else {}
        yield _run(f"ep-{plan}-{family}-{degree}", family, model, number, {
            "gpus": degree, "ep": degree, **fields, **tp,
        })  # fmt: skip
    for family_number, (family, rest) in enumerate(ENGINE_FAMILIES.items()):
        for number, (engine, fields) in enumerate(ENGINES.items(), family_number):
            name, _, shape = engine.rpartition("-")
            yield _run(
                f"ep-{name}-{family}-{shape}", family, {**ALIGNED, **rest}, number,
                {"ep_plan": "alltoall", **fields},
            )  # fmt: skip


def _run(
    name: str, family: str, model: dict[str, Any], number: int, fields: dict[str, Any]
) -> tuple[str, RunSpec]:
    bf16, checkpointing = bool(number % 2), bool(number // 2 % 2)
    spec = make_spec(
        model={**model, "model_type": family},
        per_device_train_batch_size=4,
        seq_length=28,
        param_dtype="fp32",
        bf16=bf16,
        gradient_checkpointing=checkpointing,
        **fields,
    )
    parts = [name, "bf16" if bf16 else "fp32"]
    return "-".join(parts + (["ckpt"] if checkpointing else [])), spec


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
