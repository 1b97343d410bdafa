"""torchtitan's DeepSeek-V3 16B on 8 H100s: predicted and published reserved peaks.

    python -m experiments.public_runs.titan_moe

Truth is of the third kind: reserved peaks that torchtitan's commit messages (github.com/pytorch/torchtitan,
BSD-3) give after the first step and later, rows of ``data/public_runs.csv``. The model is torchtitan's own
(``titan_deepseek.py``), fp32 parameters, bf16 compute, 8 sequences of 4096 tokens a rank, AdamW fused,
expandable segments (run_train.sh):

* f738a03bf: FSDP2 on 8 ranks, experts over the same 8 (so each rank's are its own unit, alone in it),
  selective checkpointing, loss compiled; attention by SDPA and by FlexAttention took as much;
* decfd3fef: FSDP2 on 4 x 2 ranks with context parallelism, full checkpointing, vocabulary 129280, eager loss;
* 8a749c618: rank 6 of 4 pipeline stages x FSDP2 on 2, interleaved 1F1B, 8 micro-batches, full
  checkpointing, attention by FlexAttention (predicted as SDPA).

Not in the prediction: that torchtitan gathers the next block of an expert-parallel model one block ahead
(its ``set_modules_to_forward_prefetch``, 60 MiB here), how unevenly the router sent tokens, and the
kernels of a PyTorch nightly of that summer. c4e229115's rows (A100) are left out: saving what was
exchanged would have cost 39 GiB at the batch in its config file, and 3 GiB are published.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from experiments.public_runs.titan_deepseek import builder
from llmem.estimate import estimate


class Run(NamedTuple):
    """A run as published: GiB reserved after the first step, and later, on ``rank``."""

    commit: str
    what: str
    rank: int
    first: float
    steady: float
    fields: dict[str, Any]


RUNS = (
    Run("f738a03bf", "FSDP2 + EP 8", 0, 63.55, 78.14, {
        "model": builder(4096, "selective"), "ep": 8, "ep_plan": "alltoall",
        "fsdp_units": "accelerate",
    }),
    Run("decfd3fef", "FSDP2 + CP 2", 0, 53.49, 71.08, {
        "model": builder(4096, "full", vocabulary=129280, compiled=False), "cp": 2,
        "fsdp_units": "accelerate",
    }),
    Run("8a749c618", "FSDP2 + PP 4", 6, 53.94, 67.11, {
        "model": builder(4096, "full"), "pp": 4, "pp_schedule": "interleaved", "micro_batches": 8,
    }),
)  # fmt: skip
"""``fsdp_units``: the embedding and [norm, output] are units in torchtitan as they are in accelerate."""


def main() -> None:
    print(f"{'commit':10} {'parallel':13} {'rank':>4} {'step':6} {'published':>10} {'predicted':>10} "
          f"{'error':>7}  {'allocated':>10}")  # fmt: skip
    for run in RUNS:
        made = estimate(
            per_device_train_batch_size=8,
            seq_length=4096,
            param_dtype="fp32",
            bf16=True,
            gpus=8,
            strategy="fsdp2",
            alloc_conf="expandable_segments:True",
            gpu="h100-80gb",
            as_torch="2.9",
            **run.fields,
        )
        [rank] = [rank for rank in made.ranks if run.rank in rank.table.ranks]
        for step, published in (("first", run.first), ("steady", run.steady)):
            peak = getattr(rank, step)
            reserved = peak.reserved / 2**30
            print(f"{run.commit:10} {run.what:13} {run.rank:4} {step:6} {published:6.2f} GiB "
                  f"{reserved:6.2f} GiB {reserved / published - 1:+7.1%}  "
                  f"{peak.allocated / 2**30:6.2f} GiB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
