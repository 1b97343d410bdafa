"""torchtitan's FSDP2 runs, eager and compiled: predicted and published peaks.

    python -m experiments.public_runs.titan

Truth is of the third kind: figures of torchtitan (github.com/pytorch/torchtitan, BSD-3) for H100s with
95.04 GiB. Of 83c879f18 and 9dc418a8b (March and July 2024) commit messages give the share of the card
that was reserved, and that was active; the allocator has its default settings, run_llama_train.sh of
neither commit sets any. Of 9dec370 (26 December 2024, a PyTorch nightly of the 23rd)
benchmarks/llama3_h100_202412_torchtitan.md gives what was reserved on the fullest of 8 and 128 GPUs,
with and without torch.compile; the allocator has expandable segments (a5e57e4a9, 22 October 2024). As
train.py of that commit has it, each block is compiled with its checkpoint and the loss is not, AdamW
is foreach, and the loop drops the logits before backward.

Left out: runs that multiply in float8, compiled runs of March 2024 (the commit message does not say
whether active or reserved), and those whose commit does not say what the model code was.
"""

from __future__ import annotations

from typing import NamedTuple

from experiments.public_runs.titan_llama import builder
from llmem.estimate import Estimate, estimate

CARD = 95.0396 * 2**30
"""Bytes of the card that percentages refer to (commit message of 83c879f18)."""
GPU = "h100-80gb"
"""Kernels of an H100; its capacity plays no part in what is compared."""
DECEMBER = "9dec370"


class Run(NamedTuple):
    """A run as published, bytes; ``active`` is None where only what was reserved is."""

    commit: str
    model: str
    gpus: int
    batch: int
    length: int
    checkpointing: str
    compiled: bool
    reserved: float
    active: float | None
    holds_logits: bool
    """Whether the loop keeps the logits until the next step's replace them, or deletes them."""


def _share(percent: float) -> float:
    return percent / 100 * CARD


RUNS = (
    Run("83c879f18", "Llama-2-7B", 8, 8, 2048, "full", False, _share(32.64), _share(23.92), True),
    Run("83c879f18", "Llama-2-7B", 8, 8, 2048, "selective", False, _share(62.51), _share(52.13), True),
    Run("9dc418a8b", "Llama-3-8B", 8, 1, 8192, "", False, _share(82.48), None, False),
    Run(DECEMBER, "Llama-3-8B", 8, 2, 8192, "selective", False, 82.4 * 2**30, None, False),
    Run(DECEMBER, "Llama-3-8B", 8, 2, 8192, "selective", True, 77.0 * 2**30, None, False),
    Run(DECEMBER, "Llama-3-8B", 128, 2, 8192, "selective", False, 67.0 * 2**30, None, False),
    Run(DECEMBER, "Llama-3-8B", 128, 2, 8192, "selective", True, 62.0 * 2**30, None, False),
)
"""AdamW foreach, bf16 with fp32 reduction, last block not resharded."""


def predict(run: Run) -> Estimate:
    december = run.commit == DECEMBER
    return estimate(
        model=builder(run.model, run.length, run.checkpointing, december=december),
        per_device_train_batch_size=run.batch,
        seq_length=run.length,
        param_dtype="fp32",
        bf16=True,
        optim="adamw_torch_foreach",
        gpus=run.gpus,
        strategy="fsdp2",
        keep_last_block=True,
        hold_outputs=run.holds_logits,
        alloc_conf="expandable_segments:True" if december else "",
        compile=run.compiled,
        compile_scope="blocks" if run.compiled else "model",
        gpu=GPU,
        as_torch="2.6" if december else "2.4",
    )


def main() -> None:
    print(f"{'commit':10} {'model':11} {'gpus':>4} {'batch':>5} {'tokens':>6} {'AC':9} {'':8} "
          f"{'level':8} {'published':>10} {'predicted':>10} {'error':>7}")  # fmt: skip
    for run in RUNS:
        peak = predict(run).worst.peak
        levels = {"active": (run.active, peak.allocated), "reserved": (run.reserved, peak.reserved)}
        for name, (published, predicted) in levels.items():
            if published is None:
                continue
            print(f"{run.commit:10} {run.model:11} {run.gpus:4} {run.batch:5} {run.length:6} "
                  f"{run.checkpointing or 'none':9} {'compiled' if run.compiled else 'eager':8} "
                  f"{name:8} {published / 2**30:6.2f} GiB {predicted / 2**30:6.2f} GiB "
                  f"{predicted / published - 1:+7.2%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
