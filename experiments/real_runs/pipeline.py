"""Real pipelines on CPU over gloo, and the table of predictions' errors.

    python -m experiments.real_runs.pipeline measure|table [--only TEXT]

torch.distributed.pipelining's GPipe, 1F1B and interleaved 1F1B (two stages per rank) on 2, 3 and 4
processes, with fp32 and bf16 parameters, for three families each; LoRA and checkpointing rotate.
``pp-ddp-``: two replicas of two stages.

What is left of differences: scalars of 4 and 8 bytes that CPU kernels take their factors from (up
to 0.03 % of the small peaks under LoRA and checkpointing); int64 position ids of GPT-2's later
stages, thought to be kept for backward (232 bytes per micro-batch); and, up to 3.8 %, qwen2's bf16
LoRA on all linear layers: peft adds an fp32 adapter's output to a bf16 one, for which the CPU's
TensorIterator makes an fp32 copy of the latter (``aten::add`` > ``aten::_to_copy``, 61,712 bytes in
``up_proj``), and CUDA's does not.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import FAMILIES as SHALLOW
from matrix import LORA, command, record_of

from llmem.measure import validate
from llmem.spec import RunSpec, make_spec

LAYERS = 9  # eight stages of four ranks, and one layer more for the first
FAMILIES: dict[str, dict[str, Any]] = {
    name: {**model, "n_layer" if name == "gpt2" else "num_hidden_layers": LAYERS}
    for name, model in SHALLOW.items()
}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_checkpointing": True},
    {"method": "lora"},
    {"method": "lora", "gradient_checkpointing": True},
)


def configurations() -> Iterator[tuple[str, RunSpec]]:
    """Name and RunSpec of each: 54 pipelines, then 6 of two replicas each."""
    number = 0
    for schedule, ranks, family, dtype in product(SCHEDULES, (2, 3, 4), FAMILIES, ("fp32", "bf16")):
        variant = VARIANTS[(number + number // 6) % 4]
        number += 1
        yield _one(family, schedule, dtype, variant, pp=ranks, gpus=ranks, micro_batches=2 * ranks)
    for family, schedule in product(FAMILIES, ("gpipe", "1f1b")):
        variant = VARIANTS[number % 2]
        number += 1
        yield _one(
            family, schedule, "fp32", variant, pp=2, gpus=4, micro_batches=4, strategy="ddp",
            bucket_cap_mb=0.5,
        )  # fmt: skip


def _one(
    family: str, schedule: str, dtype: str, variant: dict[str, Any], **fields: Any
) -> tuple[str, RunSpec]:
    lora = variant.get("method") == "lora"
    spec = make_spec(
        model=FAMILIES[family],
        per_device_train_batch_size=2 * fields["micro_batches"],
        seq_length=29,
        param_dtype=dtype,
        pp_schedule=schedule,
        **variant,
        **(LORA[family] if lora else {}),
        **fields,
    )
    parts = ["pp", *(["ddp"] if spec.strategy == "ddp" else []), schedule, family]
    parts += [str(spec.gpus), dtype, *(["lora"] if lora else [])]
    return "-".join(parts + (["ckpt"] if spec.gradient_checkpointing else [])), spec


def table(names: Iterable[str]) -> None:
    """One line per configuration: each rank's peak and its error, and the worst of each step."""
    errors = []
    print(f"{'configuration':36} {'largest peak':>12} {'first':>9} {'steady':>9}  peak, by rank")
    for name in names:
        rows = validate(record_of(name))
        first, steady = (
            max((r.error for r in rows if r.metric == kind), key=abs)
            for kind in ("first", "steady")
        )
        peaks = [row for row in rows if row.metric == "peak"]
        top = max(row.measured for row in peaks)
        by_rank = " ".join(f"{row.error:+.3%}" for row in peaks)
        print(f"{name:36} {top:12,} {first:+9.3%} {steady:+9.3%}  {by_rank}", flush=True)
        errors.append(max(abs(row.error) for row in peaks))
    within = sum(error <= 0.001 for error in errors)
    print(
        f"{len(errors)} configurations, error of the worst rank's peak: median "
        f"{statistics.median(errors):.3%}, largest {max(errors):.3%}, {within} within 0.1%"
    )


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
