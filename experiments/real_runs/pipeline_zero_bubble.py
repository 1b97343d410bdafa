"""Real pipelines whose backward is parted, on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.pipeline_zero_bubble measure|table [--only TEXT]

torch.distributed.pipelining's interleaved zero bubble (``izb``), ZB-V (``zbv``) and DualPipeV
(``dpv``), two stages per rank, on 2 and 4 processes, with fp32 and bf16 parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import LORA, command
from pipeline import FAMILIES, table

from llmem.spec import RunSpec, make_spec

SCHEDULES = {"izb": "interleaved-zero-bubble", "zbv": "zbv", "dpv": "dualpipev"}
LAYOUTS: tuple[tuple[str, int, str, str, str], ...] = (
    ("izb", 2, "llama", "fp32", ""),
    ("izb", 2, "qwen2", "bf16", ""),
    ("izb", 2, "gpt2", "fp32", "lora"),
    ("izb", 4, "llama", "bf16", ""),
    ("izb", 4, "gpt2", "fp32", ""),
    ("izb", 2, "llama", "fp32", "ckpt"),
    ("zbv", 2, "llama", "bf16", ""),
    ("zbv", 2, "qwen2", "fp32", ""),
    ("zbv", 2, "llama", "fp32", "lora"),
    ("zbv", 4, "qwen2", "bf16", ""),
    ("zbv", 4, "gpt2", "fp32", ""),
    ("zbv", 2, "gpt2", "bf16", "ckpt"),
    ("dpv", 2, "llama", "fp32", ""),
    ("dpv", 2, "gpt2", "bf16", ""),
    ("dpv", 4, "qwen2", "fp32", ""),
    ("dpv", 4, "llama", "bf16", ""),
)
"""(schedule, ranks, family, dtype, variant)"""
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "lora": {"method": "lora"},
    "ckpt": {"gradient_checkpointing": True},
}


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each: twice as many micro-batches as ranks, as stages under DualPipeV."""
    for schedule, ranks, family, dtype, variant in LAYOUTS:
        fields = VARIANTS[variant] | (LORA[family] if variant == "lora" else {})
        name = "-".join(part for part in ("pp", schedule, family, str(ranks), dtype, variant) if part)
        yield name, make_spec(
            model=FAMILIES[family], per_device_train_batch_size=4 * ranks, seq_length=29,
            param_dtype=dtype, pp=ranks, gpus=ranks, micro_batches=2 * ranks,
            pp_schedule=SCHEDULES[schedule], **fields,
        )  # fmt: skip


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
