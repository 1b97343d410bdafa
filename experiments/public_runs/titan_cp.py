"""torchtitan's context-parallel runs of Llama 3 8B: predicted and published reserved peaks.

    python -m experiments.public_runs.titan_cp

Truth is of the third kind: benchmarks/llama3_h100_202412_torchtitan.md and the message of ce8a56fe7 of
github.com/pytorch/torchtitan (BSD-3), H100s of 96 GB, rows of ``data/public_runs.csv`` with a context-
parallel degree. None of them is a run that llmem knows in full, so errors say how far the assumptions
below carry, not how right the method is: the December 2024 runs were compiled and multiplied in
float8, and used what there was of the card (their four peaks are within 0.5 GiB of each other, and
what the allocator holds beyond need is in them); the others attended with FlexAttention. Predicted is
transformers' eager Llama with SDPA under torch's context_parallel, bf16 with fp32 reduction.
"""

from __future__ import annotations

from typing import NamedTuple

from llmem.estimate import Estimate, estimate


class Run(NamedTuple):
    """A run as published; ``reserved`` in GiB, of the first step or of all."""

    source: str
    gpus: int
    cp: int
    length: int
    step: str
    reserved: float


RUNS = (
    Run("202412 compiled float8", 8, 2, 65536, "all", 84.2),
    Run("202412 compiled float8", 8, 4, 131072, "all", 84.0),
    Run("202412 compiled float8", 8, 8, 262144, "all", 84.5),
    Run("ce8a56fe7 FlexAttention", 4, 2, 8192, "first", 33.21),
    Run("ce8a56fe7 FlexAttention", 4, 2, 8192, "all", 44.84),
)
"""One sequence per data-parallel group, AdamW fused, full activation checkpointing."""


def predict(run: Run) -> Estimate:
    return estimate(
        model="llama-3.1-8b",
        per_device_train_batch_size=1,
        seq_length=run.length,
        param_dtype="fp32",
        bf16=True,
        gradient_checkpointing=True,
        gpus=run.gpus,
        strategy="fsdp2",
        keep_last_block=True,
        cp=run.cp,
        gpu="h100-80gb",
    )


def main() -> None:
    print(f"{'source':24} {'gpus':>4} {'cp':>2} {'tokens':>6} {'step':5} {'published':>10} "
          f"{'predicted':>10} {'error':>7}  {'allocated':>10}")  # fmt: skip
    known: dict[tuple[int, int, int], Estimate] = {}
    for run in RUNS:
        key = run.gpus, run.cp, run.length
        worst = (known.get(key) or known.setdefault(key, predict(run))).worst
        peak = worst.first if run.step == "first" else worst.peak
        reserved = peak.reserved / 2**30
        print(f"{run.source:24} {run.gpus:4} {run.cp:2} {run.length:6} {run.step:5} "
              f"{run.reserved:6.2f} GiB {reserved:6.2f} GiB {reserved / run.reserved - 1:+7.1%}  "
              f"{peak.allocated / 2**30:6.2f} GiB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
