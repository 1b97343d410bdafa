"""Real context parallelism on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.context_parallel measure|table [--only TEXT]

torch's ``context_parallel`` (``cp-allgather-``, ``cp-ring-``) and Ulysses (``cp-ulysses-``) on 2 and 4
processes, under DDP and FSDP2, for two families, checkpointing in turn. torch registers its loop for
the attention kernels of GPUs; here it runs around the CPU's (``llmem.trace.split.context_parallel``). Under
torch's loop runs are fp32: on CPU, adding a bf16 block to an fp32 sum makes a copy first, which no GPU
kernel does. Where a peak falls into attention's backward it also holds what the CPU kernel allocates
for itself (tiles of q x k, a contiguous gradient), which the CPU trace does not model: at most 0.3% of
these tiny models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import command, table
from tensor_parallel import FAMILIES, WIDTHS

from llmem.spec import RunSpec, make_spec

DEGREES = ((2, 2, "ddp"), (2, 4, "fsdp2"), (4, 4, "fsdp2"))
"""(cp, gpus, strategy)"""
COMMUNICATION = ("allgather", "ring", "ulysses")


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each of the 18."""
    cases = product(("llama", "qwen2"), COMMUNICATION, DEGREES)
    for number, (family, comm, (cp, gpus, strategy)) in enumerate(cases):
        checkpointing, bf16 = bool(number % 2), comm == "ulysses" and number % 4 > 1
        fields: dict[str, Any] = {"model_type": family, **WIDTHS, **FAMILIES[family]}
        spec = make_spec(
            model=fields,
            per_device_train_batch_size=3,
            seq_length=40,
            param_dtype="fp32",
            bf16=bf16,
            gradient_checkpointing=checkpointing,
            cp=cp,
            cp_comm=comm,
            gpus=gpus,
            strategy=strategy,
        )
        parts = ["cp", comm, strategy, family, f"{gpus}x{cp}", "bf16" if bf16 else "fp32"]
        yield "-".join(parts + (["ckpt"] if checkpointing else [])), spec


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
