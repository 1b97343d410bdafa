"""Real tensor parallelism on CPU over gloo, and the table of predictions' errors.

    python experiments/real_runs/tensor_parallel.py measure|table [--only TEXT]

transformers' tp_plan on 2 and 4 processes, alone (``tp-``) and under FSDP2 (``tp-fsdp2-``), and
torchtitan's plan (``tp-titan-``, ``tp-titan-fsdp2-``), plain, with sequence parallelism (``sp``) and
with loss parallelism too (``sp-loss``), for three families each, in fp32 and under bf16 mixed
precision, with and without checkpointing. The vocabulary divides by no degree, so that the last
rank differs from the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import measure_matrix, table

from llmem.spec import RunSpec, make_spec

_WIDTHS = {
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
    """Name and RunSpec of each: transformers' 36, torchtitan's 27."""
    yield from _transformers()
    yield from _torchtitan()


def _torchtitan() -> Iterator[tuple[str, RunSpec]]:
    """Every option in every family at every degree; precision and checkpointing rotate."""
    number = 0
    for family, rest in TITAN_FAMILIES.items():
        for tp, gpus, strategy in DEGREES:
            for option, fields in TITAN.items():
                bf16, checkpointing = bool(number % 2), bool(number // 2 % 2)
                number += 1
                spec = make_spec(
                    model={**_WIDTHS, **rest, "model_type": family},
                    per_device_train_batch_size=3,
                    seq_length=28,
                    param_dtype="fp32",
                    bf16=bf16,
                    gradient_checkpointing=checkpointing,
                    tp=tp,
                    gpus=gpus,
                    strategy=strategy,
                    tp_plan="torchtitan",
                    **fields,
                )
                parts = ["tp", "titan"] if strategy == "none" else ["tp", "titan", strategy]
                parts += [family, str(gpus), option, "bf16" if bf16 else "fp32"]
                yield "-".join(parts + (["ckpt"] if checkpointing else [])), spec


def _transformers() -> Iterator[tuple[str, RunSpec]]:
    """24 of tensor parallelism alone, 12 of its product with FSDP2."""
    for family, rest in FAMILIES.items():
        for tp, gpus, strategy in DEGREES:
            for bf16 in (False, True):
                for checkpointing in (False, True):
                    spec = make_spec(
                        model={**_WIDTHS, **rest, "model_type": family},
                        per_device_train_batch_size=3,
                        seq_length=29,
                        param_dtype="fp32",
                        bf16=bf16,
                        gradient_checkpointing=checkpointing,
                        tp=tp,
                        gpus=gpus,
                        strategy=strategy,
                    )
                    parts = ["tp"] if strategy == "none" else ["tp", strategy]
                    parts += [family, str(gpus), "bf16" if bf16 else "fp32"]
                    yield "-".join(parts + (["ckpt"] if checkpointing else [])), spec


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["measure", "table"])
    parser.add_argument("--only", default="", help="names that contain this text")
    given = parser.parse_args(arguments)
    chosen = {name: spec for name, spec in configurations() if given.only in name}
    if given.action == "measure":
        measure_matrix(chosen)
    else:
        table(chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
