"""FSDP1 fine-tuning runs on A100s: ``python -m experiments.public_runs.fms_fsdp``.

Kind of truth: 3, published measured runs (foundation-model-stack/fms-acceleration, Apache-2.0; figures
only, in data/fms_fsdp.csv): exact ``torch.cuda.max_memory_allocated`` of whole training runs.

How the runs were made: TRL's SFTTrainer under ``accelerate launch``, FSDP1 with FULL_SHARD, one unit per
decoder layer, BACKWARD_PRE; alpaca packed to 4,096 tokens; gradient checkpointing on (transformers 4:
reentrant, around the calls of layers); flash-attn 2; ``adamw_torch`` (foreach); clipping at 1.0; LoRA with
r 16 on q, k, v and o, dropout as recorded. Nothing here is fitted: version, dtype, flags and batch are the rows'.

Three snapshots have no list of versions; they are taken as the next one (transformers 4.39, peft 0.11).
Full fine-tuning with other kernels than transformers' (``foak-...``) is predicted with those of
transformers, which is right where the optimizer's step is the peak; the other rows are not compared.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from experiments.public_runs.table import DATA, Row, show, summarise
from llmem.estimate import estimate
from llmem.spec import DType, make_spec

PRESETS = {"mistralai/Mistral-7B-v0.1": "mistral-7b", "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b"}
"""Llama-3.1-8B has the shapes of Llama-3-8B."""
DTYPES: dict[str, DType] = {"float16": "fp16", "bfloat16": "bf16"}
UNRECORDED = ("4.39", "0.11")
"""transformers and peft of the first snapshot that lists versions."""


@dataclass(frozen=True)
class Run:
    """What was trained; ``adapters_autocast``: peft 0.12 and later keep adapters in fp32."""

    model: str
    gpus: int
    batch: int
    method: str
    dtype: DType
    bf16: bool
    transformers: str
    adapters_autocast: bool
    dropout: float


@dataclass(frozen=True)
class Measured:
    """A published row."""

    run: Run
    commit: str
    kernels: str
    recorded: bool
    peak: int

    @property
    def name(self) -> str:
        run = self.run
        flag = "bf16 mixed" if run.bf16 else run.dtype
        kernels = "" if self.kernels == "none" else " " + self.kernels.removeprefix("foak-")
        version = run.transformers if self.recorded else f"{run.transformers}?"
        return (
            f"{run.model} {run.method} {run.gpus} GPUs, batch {run.batch}, {flag}, "
            f"tf {version}{kernels} ({self.commit})"
        )


def rows() -> Iterator[Measured]:
    """The published rows, in the file's order."""
    with (DATA / "fms_fsdp.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            version = line["transformers"] or UNRECORDED[0]
            peft = line["peft"] or UNRECORDED[1]
            full = line["method"] == "full"
            run = Run(
                PRESETS[line["model"]],
                int(line["num_gpus"]),
                int(line["per_device_batch"]),
                "full" if full else "lora",
                DTYPES[line["torch_dtype"]],
                line["flag"] == "bf16",
                version,
                full or tuple(map(int, peft.split("."))) >= (0, 12),
                float(line["lora_dropout"] or 0),
            )
            yield Measured(
                run, line["commit"], line["kernels"], bool(line["transformers"]),
                int(line["peak_alloc_bytes"]),
            )  # fmt: skip


@cache
def predicted(run: Run) -> tuple[int, str]:
    """Allocated peak in bytes, and the phase it is in."""
    fields: dict[str, Any] = {}
    if run.method == "lora":
        fields = {
            "lora_r": 16, "lora_dropout": run.dropout, "autocast_adapter_dtype": run.adapters_autocast,
            "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
        }  # fmt: skip
    spec = make_spec(
        model=run.model,
        per_device_train_batch_size=run.batch,
        seq_length=4096,
        method=run.method,
        param_dtype=run.dtype,
        bf16=run.bf16,
        optim="adamw_torch",
        gradient_checkpointing=True,
        attn_implementation="flash_attention_2",
        as_transformers=run.transformers,
        gpus=run.gpus,
        strategy="fsdp",
        gpu="a100-80gb",
        **fields,
    )
    worst = estimate(spec).worst
    return worst.peak.allocated, worst.peak_at.phase


def predict(measured: Measured) -> Row | None:
    """The row, or None where its peak is in kernels that are not transformers'."""
    peak, phase = predicted(measured.run)
    if measured.kernels != "none" and phase != "optimizer":
        return None
    return Row(measured.name, measured.peak, peak, f"peak in {phase}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain this text")
    given = parser.parse_args(arguments)
    chosen = [measured for measured in rows() if given.only in measured.name]
    made = {measured: row for measured in chosen if (row := predict(measured)) is not None}
    show(list(made.values()))
    print(f"{len(chosen) - len(made)} rows not compared: their peak is in other kernels")
    groups: dict[str, Callable[[Measured], bool]] = {
        "full, transformers' kernels": lambda m: m.run.method == "full" and m.kernels == "none",
        "full, other kernels": lambda m: m.kernels != "none",
        "LoRA": lambda m: m.run.method == "lora",
        "all": lambda m: True,
    }
    for name, inside in groups.items():
        group = [row for measured, row in made.items() if inside(measured)]
        if group:
            largest = max(abs(row.error) for row in group)
            print(f"{name}: {summarise(group, 0.02)}, largest {largest:.3%}")


if __name__ == "__main__":
    main()
