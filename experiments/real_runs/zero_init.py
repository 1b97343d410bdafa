"""Real ZeRO-3 runs that start from whole models in memory, over gloo, and the predictions' errors.

    python -m experiments.real_runs.zero_init measure|table [--only TEXT]

DeepSpeed gets a whole model in every process and partitions it (``--zero-init false``), so that its
setup counts: under LoRA with checkpointing it is the peak. Families of ``matrix``, in bf16 from the
start, as a cast in host memory would be counted here. ``setup`` is the peak of the setup alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import DEEPSPEED, FAMILIES, LORA, RECORDS, command

from llmem.measure import validate
from llmem.measure.launch import read_record
from llmem.spec import RunSpec, make_spec

CASES: dict[str, dict[str, Any]] = {
    "full": {"bf16": True, "gradient_checkpointing": True, "gpus": 4},
    "lora": {"bf16": True, "gradient_checkpointing": True, "method": "lora", "gpus": 4},
    "lora-3": {"bf16": True, "gradient_checkpointing": True, "method": "lora", "gpus": 3},
}


def configurations() -> Iterator[tuple[str, RunSpec]]:
    for family, model in FAMILIES.items():
        for name, fields in CASES.items():
            common: dict[str, Any] = {
                "model": model, "per_device_train_batch_size": 1, "seq_length": 29,
                "param_dtype": "bf16", "strategy": "zero3", "zero_init": False,
                "deepspeed": {"zero_optimization": DEEPSPEED[family] or DEEPSPEED["llama"]},
            }  # fmt: skip
            adapters = LORA[family] if "method" in fields else {}
            yield f"zero-init-{family}-{name}", make_spec(**(common | adapters | fields))


def table(names: Iterable[str]) -> None:
    """One line per configuration: worst rank's errors of the peak, of the setup and of the steps."""
    print(f"{'configuration':28} {'setup':>11} {'peak, bytes':>11} {'peak':>9} {'setup':>9} "
          f"{'steady':>9}")  # fmt: skip
    for name in names:
        rows = validate(read_record(RECORDS / f"{name}.json"))
        errors = {
            metric: max((row.error for row in rows if row.metric == metric), key=abs)
            for metric in ("peak", "setup", "steady")
        }
        top = {m: max(row.measured for row in rows if row.metric == m) for m in ("setup", "peak")}
        print(f"{name:28} {top['setup']:11,} {top['peak']:11,} {errors['peak']:+9.3%} "
              f"{errors['setup']:+9.3%} {errors['steady']:+9.3%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    command(sys.argv[1:], (__doc__ or "").splitlines()[0], configurations(), table)
