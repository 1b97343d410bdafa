"""litgpt's LoRA runs on one GPU: predicted and published peaks.

    python -m experiments.public_runs.litgpt

Kind of truth: 3. Lightning-AI/litgpt's table of resources (Apache-2.0; figures only, in
data/public_runs.csv): ``torch.cuda.max_memory_allocated`` in decimal GB with two digits, on an
A100-40GB with torch 2.1, whole runs in bf16. The first iteration takes the longest sample, whose
length the table gives, before the optimizer has states; so one step decides, and is traced.

Not here: rows on several GPUs (FSDP1 with parameters that are partly trained), adapters of the two
other kinds, quantised weights under Fabric, and inference.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from experiments.public_runs.litgpt_model import SIZES, builder
from experiments.public_runs.table import DATA, Row, show, summarise
from llmem.estimate import Estimate, estimate


def lines() -> Iterator[dict[str, str]]:
    """The rows of the table that are expressed."""
    with (DATA / "public_runs.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if (
                line["source"] == "Lightning-AI/litgpt" and line["grade"] == "A"
                and line["method"] == "lora" and line["world_size"] == "1"
                and line["model"] in SIZES and line["measured_bytes"]
            ):  # fmt: skip
                yield line


def predict(model: str, batch: int, length: int) -> Estimate:
    return estimate(
        model=builder(model, length), per_device_train_batch_size=batch, seq_length=length,
        optim="adamw_torch", max_grad_norm=0.0, hold_outputs=True, steps=1, as_torch="2.1",
        gpu="a100-40gb",
    )  # fmt: skip


def rows() -> Iterator[Row]:
    for line in lines():
        batch, length = int(line["batch_size_per_gpu"]), int(line["seq_len"])
        peak = predict(line["model"], batch, length).worst.peak
        name = f"{line['model']}, LoRA, batch {batch} x {length}"
        yield Row(name, int(line["measured_bytes"]), peak.allocated)


def main() -> None:
    found = list(rows())
    show(found)
    print(summarise(found, 0.01))


if __name__ == "__main__":
    main()
