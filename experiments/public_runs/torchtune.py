"""torchtune's runs, eager and compiled: predicted and published peaks of active memory.

    python -m experiments.public_runs.torchtune

Kind of truth: 3. The tables in the README of meta-pytorch/torchtune (BSD-3; figures only, rows of
data/public_runs.csv): the peak of torch's active_bytes in GiB with one decimal, of whole steps in bf16.
The optimisation table came with 1814feb17 (18 November 2024): full_finetune_single_device, Llama 3.2 3B,
batch 2 of 4,096 packed tokens on an A100, each row one option more than the row before. The other came
with 30b8519e8 (September 2024), full_finetune_distributed with 70B_full.yaml: CPU offload, embedding and
head units of their own.

What the tables leave open: AdamW is taken for fused, as in torchtune's other recipes (the step of
foreach's makes 6 GiB, more than three of the rows have room for).

Beside it what ``llmem validate`` says of the rows that it reads, with transformers' class.

Not here: the row before packing and those of alpaca (lengths are open), AdamW8bit (torchao's, whose step
is compiled code of its own), QLoRA (torchao's NF4), and figures whose counter is not told.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from experiments.public_runs.table import DATA, Row, show, summarise
from experiments.public_runs.torchtune_model import SIZES, Options, builder
from llmem.estimate import Estimate, estimate
from llmem.measure.published.many import public

Line = dict[str, str]
UNITS = ("Checkpointed", "Embedding", "Head")
"""What 70B_full.yaml has FSDP2 shard by itself: layers and ``custom_sharded_layers``."""


def lines() -> Iterator[Line]:
    """The rows of the tables that are expressed."""
    with (DATA / "public_runs.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if (
                line["source"] == "pytorch/torchtune" and line["metric"] == "max_active"
                and line["grade"] in "AB" and line["model"] in SIZES and line["method"] == "full"
                and line["seq_len"].endswith(" packed") and "8bit" not in line["optimizer"]
            ):  # fmt: skip
                yield line


def predict(line: Line) -> Estimate:
    """What llmem says of a row, with torchtune's own model."""
    options = Options(
        chunked="chunked" in line["loss_impl"],
        compiled=line["compile"] == "True",
        checkpointed=line["grad_checkpointing"] == "full",
        offloaded="activation offloading" in line["notes"],
    )
    fields: dict[str, Any] = {}
    if options.compiled:
        fields |= {"compile": True, "compile_scope": "blocks"}
    if line["parallel_strategy"] == "FSDP2":
        fields |= {
            "strategy": "fsdp2", "gpus": int(line["world_size"]), "offload": "all",
            "fsdp_transformer_layer_cls_to_wrap": UNITS,
        }  # fmt: skip
    return estimate(
        model=builder(line["model"], options),
        per_device_train_batch_size=int(line["batch_size_per_gpu"]),
        seq_length=int(line["seq_len"].split()[0]), optim="adamw_torch_fused", max_grad_norm=0.0,
        zero_grad="after_step", optimizer_in_backward="in-backward" in line["optimizer"],
        gpu="a100-80gb", as_torch="2.5", **fields,
    )  # fmt: skip


def name_of(line: Line) -> str:
    options = {
        "compiled": line["compile"] == "True",
        "loss in chunks": "chunked" in line["loss_impl"],
        "checkpoints": line["grad_checkpointing"] == "full",
        "optimizer in backward": "in-backward" in line["optimizer"],
        "activation offload": "activation offloading" in line["notes"],
        "FSDP2 offloaded": line["parallel_strategy"] == "FSDP2",
    }
    said = ", ".join(name for name, given in options.items() if given)
    return f"{line['model']} [{line['grade']}] {said or 'eager'}"


def rows() -> Iterator[Row]:
    for line in lines():
        peak = predict(line).worst.peak
        yield Row(name_of(line), int(line["measured_bytes"]), peak.allocated)


def with_transformers() -> Iterator[Row]:
    """The rows that ``llmem validate`` reads."""
    for line in lines():
        run = public(line)
        if run.spec is not None:
            peak = estimate(run.spec).worst.peak
            yield Row(name_of(line), run.measured, peak.allocated)


def main() -> None:
    found = list(rows())
    show(found)
    print(summarise(found, 0.01))
    print("\nllmem validate, transformers' class:")
    show(list(with_transformers()))


if __name__ == "__main__":
    main()
