"""Real pipelines of tensor-parallel ranks on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.pipeline_tensor measure|table [--only TEXT]

Two stages of two tensor-parallel ranks each, with transformers' plan (``hf``), torchtitan's
(``titan``), that with sequence parallelism (``titan-sp``) and with loss parallelism too
(``titan-sp-loss``), in fp32 and bf16 parameters; the last four under schedules that part backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import command
from pipeline import table
from tensor_parallel import FAMILIES, WIDTHS

from llmem.spec import RunSpec, make_spec

PLANS: dict[str, dict[str, Any]] = {
    "hf": {"tp_plan": "transformers"},
    "titan": {"tp_plan": "torchtitan"},
    "titan-sp": {"tp_plan": "torchtitan", "sp": True},
    "titan-sp-loss": {"tp_plan": "torchtitan", "sp": True, "loss_parallel": True},
}
SCHEDULES = ("1f1b", "gpipe")
PARTED = (
    ("hf", "llama", "zbv"),
    ("titan", "qwen2", "interleaved-zero-bubble"),
    ("titan-sp", "llama", "interleaved-zero-bubble"),
    ("titan-sp", "qwen2", "zbv"),
)


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each; precision and checkpointing rotate."""
    whole = product(PLANS, ("llama", "qwen2"), SCHEDULES)
    for number, (plan, family, schedule) in enumerate(chain(whole, PARTED)):
        dtype, again = ("fp32", "bf16")[number % 2], number // 2 % 2 == 1
        name = f"pp-tp-{plan}-{family}-{schedule}-{dtype}{'-ckpt' if again else ''}"
        yield name, make_spec(
            model={**WIDTHS, **FAMILIES[family], "model_type": family, "num_hidden_layers": 5},
            gpus=4, tp=2, pp=2, micro_batches=4, pp_schedule=schedule, **PLANS[plan],
            per_device_train_batch_size=8, seq_length=28, param_dtype=dtype,
            gradient_checkpointing=again,
        )  # fmt: skip


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
