"""torchtitan's eager FSDP2 runs: predicted and published peaks.

    python -m experiments.public_runs.titan

Truth is of the third kind: figures that torchtitan's commit messages (github.com/pytorch/torchtitan, BSD-3) give for 8
H100s with 95.04 GiB: the share of the card that was reserved, and that was active. Runs that were
compiled are left out (Inductor fuses what is recomputed), and so are those whose commit does not
say what the model code was. The allocator has its default settings: run_llama_train.sh of neither
commit sets any (March and July 2024; expandable segments came with a5e57e4a9, 22 October 2024).
"""

from __future__ import annotations

from typing import NamedTuple

from experiments.public_runs.titan_llama import builder
from llmem.estimate import Estimate, estimate

CARD = 95.0396 * 2**30
"""Bytes of the card that percentages refer to (commit message of 83c879f18)."""
GPU = "h100-80gb"
"""Kernels of an H100; its capacity plays no part in what is compared."""


class Run(NamedTuple):
    """A run as published; ``active`` is None where only the reserved share is."""

    commit: str
    model: str
    batch: int
    length: int
    checkpointing: str
    reserved: float
    active: float | None
    holds_logits: bool
    """Whether the loop keeps the logits until the next step's replace them, or deletes them."""


RUNS = (
    Run("83c879f18", "Llama-2-7B", 8, 2048, "full", 32.64, 23.92, True),
    Run("83c879f18", "Llama-2-7B", 8, 2048, "selective", 62.51, 52.13, True),
    Run("9dc418a8b", "Llama-3-8B", 1, 8192, "", 82.48, None, False),
)
"""Shares in percent, 8 ranks, AdamW foreach, bf16 with fp32 reduction, last block not resharded."""


def predict(run: Run, alloc_conf: str = "") -> Estimate:
    return estimate(
        model=builder(run.model, run.length, run.checkpointing),
        per_device_train_batch_size=run.batch,
        seq_length=run.length,
        param_dtype="fp32",
        bf16=True,
        optim="adamw_torch_foreach",
        gpus=8,
        strategy="fsdp2",
        keep_last_block=True,
        hold_outputs=run.holds_logits,
        alloc_conf=alloc_conf,
        gpu=GPU,
        as_torch="2.4",
    )


def main() -> None:
    print(f"{'commit':10} {'model':11} {'batch':>5} {'tokens':>6} {'AC':9} {'level':8} "
          f"{'published':>10} {'predicted':>10} {'error':>7}")  # fmt: skip
    for run in RUNS:
        peak = predict(run).worst.peak
        levels = {"active": (run.active, peak.allocated), "reserved": (run.reserved, peak.reserved)}
        for name, (share, predicted) in levels.items():
            if share is None:
                continue
            published = share / 100 * CARD
            print(f"{run.commit:10} {run.model:11} {run.batch:5} {run.length:6} "
                  f"{run.checkpointing or 'none':9} {name:8} {published / 2**30:6.2f} GiB "
                  f"{predicted / 2**30:6.2f} GiB {predicted / published - 1:+7.2%}")  # fmt: skip


if __name__ == "__main__":
    main()
