"""Real runs on CPU over gloo, one record per configuration, and the table of predictions' errors.

    python -m experiments.real_runs.matrix measure [--strategy NAME ...] [--only TEXT]
    python -m experiments.real_runs.matrix table [--strategy NAME ...]

``measure`` trains every configuration for three steps with the real framework and writes
``records/<name>.json``; ``table`` compares the committed records with ``llmem.estimate``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llmem.measure import measure_all, validate
from llmem.measure.launch import read_record, write_record
from llmem.spec import RunSpec, make_spec

RECORDS = Path(__file__).parent / "records"
STRATEGIES = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
RANKS = (2, 3, 4)

# Widths that neither 3 nor 4 ranks divide, and a bucket size that makes several buckets.
_GROUPED = {
    "vocab_size": 1021, "hidden_size": 98, "intermediate_size": 266, "num_hidden_layers": 4,
    "num_attention_heads": 7, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_GROUPED, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
    },
    "qwen2": {
        **_GROUPED, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 1021,
        "n_embd": 98, "n_layer": 4, "n_head": 7, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    },
}  # fmt: skip
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"bucket_cap_mb": 0.5},
    "qwen2": {"bucket_cap_mb": 0.5, "gradient_as_bucket_view": True},
    "gpt2": {},
}
# ds_configs by family: small buckets of every kind, a middle way, and DeepSpeed's defaults.
DEEPSPEED: dict[str, dict[str, Any]] = {
    "llama": {
        "reduce_bucket_size": 60_000, "sub_group_size": 50_000,
        "stage3_prefetch_bucket_size": 40_000, "stage3_param_persistence_threshold": 300,
        "stage3_max_reuse_distance": 100_000, "stage3_max_live_parameters": 200_000,
    },
    "qwen2": {
        "overlap_comm": True, "reduce_bucket_size": 150_000,
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_reuse_distance": 0,
    },
    "gpt2": {},
}  # fmt: skip
LORA: dict[str, dict[str, Any]] = {
    "llama": {"lora_r": 5},
    "qwen2": {"lora_r": 3, "lora_target_modules": "all-linear"},
    "gpt2": {"lora_r": 4},
}


def configurations(strategies: Iterable[str] = STRATEGIES) -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each: every precision, method and checkpointing in every family.

    The number of ranks rotates, so that each appears equally often with each of the others.
    """
    for strategy in strategies:
        number = 0
        for family, model in FAMILIES.items():
            for bf16 in (False, True):
                for method in ("full", "lora"):
                    for checkpointing in (False, True):
                        ranks = RANKS[(number + number // 8) % 3]
                        number += 1
                        fields: dict[str, Any] = {
                            "model": model,
                            "per_device_train_batch_size": 3,
                            "seq_length": 29,
                            "param_dtype": "fp32",
                            "bf16": bf16,
                            "method": method,
                            "gradient_checkpointing": checkpointing,
                            "gpus": ranks,
                            "strategy": strategy,
                            **(LORA[family] if method == "lora" else {}),
                            **(DDP_OPTIONS[family] if strategy == "ddp" else {}),
                            **_deepspeed(strategy, family),
                        }
                        parts = [strategy, family, str(ranks), "bf16" if bf16 else "fp32", method]
                        name = "-".join(parts + (["ckpt"] if checkpointing else []))
                        yield name, make_spec(**fields)


def _deepspeed(strategy: str, family: str) -> dict[str, Any]:
    zero = DEEPSPEED[family] if strategy.startswith("zero") else None
    return {"deepspeed": {"zero_optimization": zero}} if zero else {}


def measure_matrix(chosen: dict[str, RunSpec]) -> None:
    """Measure all of ``chosen``, started once per strategy and number of ranks.

    Compiled ones alone: Dynamo remembers what it has met in a process.
    """
    batches: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for name, spec in chosen.items():
        batches[spec.strategy, spec.gpus, name if spec.compile else ""].append(name)
    for (strategy, ranks, _), names in batches.items():
        print(f"{strategy}, {ranks} ranks: {len(names)} configurations", flush=True)
        records = measure_all([chosen[name] for name in names])
        for name, record in zip(names, records, strict=True):
            write_record(record, RECORDS / f"{name}.json")


def table(names: Iterable[str]) -> None:
    """One line per configuration: worst rank's error of the peak, of each step, of boundaries."""
    errors: dict[str, list[float]] = defaultdict(list)
    print(f"{'configuration':32} {'peak, bytes':>11} {'peak':>9} {'first':>9} {'steady':>9} "
          f"{'boundary':>9}")  # fmt: skip
    for name in names:
        rows = validate(record_of(name), boundaries=True)
        worst = {
            kind: max((r.error for r in rows if r.metric.split(".")[0] == kind), key=abs, default=0)
            for kind in ("peak", "first", "boundary")
        }
        steady = max((r.error for r in rows if r.metric == "steady"), key=abs)
        top = max(r.measured for r in rows if r.metric == "peak")
        print(f"{name:32} {top:11,} {worst['peak']:+9.3%} {worst['first']:+9.3%} {steady:+9.3%} "
              f"{worst['boundary']:+9.3%}", flush=True)  # fmt: skip
        errors[name.split("-")[0]].append(abs(worst["peak"]))
    for strategy, found in errors.items():
        within = sum(error <= 0.001 for error in found)
        print(
            f"{strategy}: {len(found)} configurations, error of the peak: median "
            f"{statistics.median(found):.3%}, largest {max(found):.3%}, {within} within 0.1%"
        )


def record_of(name: str) -> dict[str, Any]:
    """The committed record of a configuration. Ends the program with a sentence if there is none."""
    paths = sorted(RECORDS.glob(f"{name}.json*"))
    if not paths:
        raise SystemExit(f"{name} has no record in {RECORDS}; run `measure --only {name}` first")
    return read_record(paths[0])


def chosen_of(every: Iterable[tuple[str, RunSpec]], text: str) -> dict[str, RunSpec]:
    """Those whose name contains ``text``. Ends the program with a sentence if there are none."""
    specs = dict(every)
    chosen = {name: spec for name, spec in specs.items() if text in name}
    if not chosen:
        raise SystemExit(
            f"no configuration has {text!r} in its name; try --only with a part of one like "
            f"{next(iter(specs), 'none')}"
        )
    return chosen


def command(
    arguments: list[str],
    description: str,
    every: Iterable[tuple[str, RunSpec]],
    show: Callable[[Iterable[str]], None],
) -> None:
    """``measure`` or ``table`` of those of ``every`` whose name contains ``--only``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("action", choices=["measure", "table"])
    parser.add_argument("--only", default="", help="names that contain this text")
    given = parser.parse_args(arguments)
    chosen = chosen_of(every, given.only)
    if given.action == "measure":
        measure_matrix(chosen)
    else:
        show(chosen)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["measure", "table"])
    parser.add_argument("--strategy", nargs="*", default=STRATEGIES)
    parser.add_argument("--only", default="", help="names that contain this text")
    given = parser.parse_args(arguments)
    chosen = chosen_of(configurations(given.strategy), given.only)
    if given.action == "measure":
        measure_matrix(chosen)
    else:
        table(chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
