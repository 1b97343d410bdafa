"""torchtitan's 3-D and 4-D runs of Llama 3.1 405B on 512 H100s: predicted and published reserved peaks.

    python -m experiments.public_runs.titan_4d [--only TEXT]

Truth is of the third kind: tables 5 and 6 of benchmarks/llama3_h100_202412_torchtitan.md of
github.com/pytorch/torchtitan (BSD-3, read at b5bcd76c; the four rows of ``data/public_runs.csv`` and two that
it leaves out), H100s of 96 GB, the maximum over all GPUs. No row is a run that llmem knows in full, so errors
say how far the assumptions carry, not how right the method is. Published are compiled runs with asynchronous
tensor parallelism that multiply in float8 and gather parameters in float8. Predicted is transformers'
eager Llama in bf16. What is set as in train_configs/llama3_405b.toml and train.py of 9dec370 (26 December 2024):
fp32 parameters and reduction, AdamW foreach, full checkpointing, sequence and loss parallel, stages that stay
gathered, as many micro-batches as stages (the default; the tables name none), blocks of keys gathered.
torchtitan gave the first and the last of 8 stages 15 layers, here the first six have 16. Which settings the
allocator had is not said: run_llama_train.sh has expandable segments, multinode_trainer.slurm none, so both
are predicted.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

from llmem.estimate import Estimate, estimate
from llmem.gpu.alloc_conf import AllocConf
from llmem.timeline import replay


class Run(NamedTuple):
    """A run as published: sequences of a data-parallel rank, tokens of each, ``reserved`` in GiB."""

    name: str
    cp: int
    batch: int
    length: int
    schedule: str
    reserved: float


RUNS = (
    Run("3-D", 1, 32, 8192, "1f1b", 82.5),
    Run("3-D interleaved", 1, 32, 8192, "interleaved", 72.7),
    Run("4-D, CP 1", 1, 8, 32768, "1f1b", 75.3),
    Run("4-D, CP 2", 2, 8, 65536, "1f1b", 75.9),
    Run("4-D, CP 4", 4, 8, 131072, "1f1b", 77.1),
    Run("4-D, CP 8", 8, 8, 262144, "1f1b", 84.9),
)
"""TP 8 x PP 8 x (FSDP x CP = 8)."""


def fields(run: Run) -> dict[str, Any]:
    """Of the RunSpec."""
    return {
        "model": "llama-3.1-405b", "param_dtype": "fp32", "bf16": True, "gradient_checkpointing": True,
        "per_device_train_batch_size": run.batch, "seq_length": run.length,
        "optim": "adamw_torch_foreach", "strategy": "fsdp2", "gpus": 512,
        "tp": 8, "tp_plan": "torchtitan", "sp": True, "loss_parallel": True,
        "pp": 8, "pp_schedule": run.schedule, "cp": run.cp, "gpu": "h100-80gb",
    }  # fmt: skip


def predict(run: Run) -> Estimate:
    return estimate(**fields(run))


def reserved(found: Estimate, conf: str) -> float:
    """GiB of the rank that reserves most under the allocator's settings ``conf``."""
    settings = AllocConf.parse(conf)
    curves = (replay(rank.table.lifetimes, conf=settings).reserved for rank in found.ranks)
    return max(int(curve.max()) for curve in curves) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain this text")
    only = parser.parse_args().only
    print(f"{'run':16} {'sequences':>9} {'tokens':>6} {'published':>10} {'default':>10} {'error':>7} "
          f"{'expandable':>10} {'error':>7} {'allocated':>10} {'rank':>4} {'CPU':>6}")  # fmt: skip
    for run in RUNS:
        if only not in run.name:
            continue
        start = time.process_time()
        found = predict(run)
        default, expandable = reserved(found, ""), reserved(found, "expandable_segments:True")
        worst = max(found.ranks, key=lambda rank: rank.peak.allocated)
        print(f"{run.name:16} {run.batch:9} {run.length:6} {run.reserved:6.2f} GiB {default:6.2f} GiB "
              f"{default / run.reserved - 1:+7.1%} {expandable:6.2f} GiB "
              f"{expandable / run.reserved - 1:+7.1%} {worst.peak.allocated / 2**30:6.2f} GiB {worst.rank:4} "
              f"{time.process_time() - start:4.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
