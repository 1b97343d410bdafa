"""Real tensor parallelism on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.tensor_parallel measure|table [--only TEXT]

transformers' tp_plan on 2 and 4 processes, alone (``tp-``) and under FSDP2 (``tp-fsdp2-``), and
torchtitan's plan (``tp-titan-``, ``tp-titan-fsdp2-``), plain, with sequence parallelism (``sp``) and
with loss parallelism too (``sp-loss``), for three families each, in fp32 and under bf16 mixed
precision, with and without checkpointing. The vocabulary divides by no degree, so that the last
rank differs from the others. Colossal-AI's plan (``tp-colossal-``) runs as ``llmem.trace.split.tp_colossal``
acts it out: that checks the trace, not Colossal-AI.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import command, table

from llmem.spec import RunSpec, make_spec

WIDTHS = {
    "vocab_size": 1021, "hidden_size": 112, "intermediate_size": 268, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "tie_word_embeddings": False},
}
TITAN_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": FAMILIES["llama"],
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False, "head_dim": 10,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], "tie_word_embeddings": True, "head_dim": 18},
}  # fmt: skip
TITAN: dict[str, dict[str, Any]] = {
    "plain": {},
    "sp": {"sp": True},
    "sp-loss": {"sp": True, "loss_parallel": True},
}
DEGREES = ((2, 2, "none"), (4, 4, "none"), (2, 4, "fsdp2"))
"""(tp, gpus, strategy)"""


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each: transformers' 36, torchtitan's 27, Colossal-AI's 4."""
    yield from _transformers()
    yield from _torchtitan()
    yield from _colossal()


def _transformers() -> Iterator[tuple[str, RunSpec]]:
    """24 of tensor parallelism alone, 12 of its product with FSDP2."""
    cases = product(FAMILIES.items(), DEGREES, (False, True), (False, True))
    for (family, rest), degree, bf16, checkpointing in cases:
        yield _one(family, rest, degree, bf16, checkpointing, seq_length=29)


def _torchtitan() -> Iterator[tuple[str, RunSpec]]:
    """Every option in every family at every degree; precision and checkpointing rotate."""
    cases = product(TITAN_FAMILIES.items(), DEGREES, TITAN.items())
    for number, ((family, rest), degree, (option, fields)) in enumerate(cases):
        bf16, checkpointing = bool(number % 2), bool(number // 2 % 2)
        yield _one(
            family, rest, degree, bf16, checkpointing, plan="titan", option=option,
            seq_length=28, tp_plan="torchtitan", **fields,
        )  # fmt: skip


def _colossal() -> Iterator[tuple[str, RunSpec]]:
    """Untied and tied embeddings on 2 and 4 ranks; precision and checkpointing rotate."""
    cases = product(("llama", "qwen2"), DEGREES[:2])
    for number, (family, degree) in enumerate(cases):
        yield _one(
            family, FAMILIES[family], degree, bool(number % 2), bool(number // 2), plan="colossal",
            seq_length=29, tp_plan="colossal",
        )  # fmt: skip


def _one(
    family: str,
    rest: dict[str, Any],
    degree: tuple[int, int, str],
    bf16: bool,
    checkpointing: bool,
    *,
    plan: str = "",
    option: str = "",
    **fields: Any,
) -> tuple[str, RunSpec]:
    tp, gpus, strategy = degree
    spec = make_spec(
        model={**WIDTHS, **rest, "model_type": family},
        per_device_train_batch_size=3,
        param_dtype="fp32",
        bf16=bf16,
        gradient_checkpointing=checkpointing,
        tp=tp,
        gpus=gpus,
        strategy=strategy,
        **fields,
    )
    engine = "" if strategy == "none" else strategy
    precision, recomputed = "bf16" if bf16 else "fp32", "ckpt" if checkpointing else ""
    parts = ["tp", plan, engine, family, str(gpus), option, precision, recomputed]
    return "-".join(part for part in parts if part), spec


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
