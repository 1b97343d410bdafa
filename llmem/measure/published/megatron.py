"""Rows of Megatron-LM's own logs (``megatron-logs`` in ``public_runs.csv`` and files like it)."""

from __future__ import annotations

import re

from llmem.measure.published.run import CannotExpress, Line, whole
from llmem.spec import RunSpec, make_spec


def rank_of(line: Line) -> int:
    """The rank that a row is about, as its notes say; 0 where they do not."""
    found = re.match(r"rank (\d+)", line["notes"])
    return int(found[1]) if found else 0


def megatron_spec(line: Line) -> RunSpec:
    """GPT-345M of July 2023 in fp16, every argument of which the log prints.

    Model, loss and optimizer are Megatron-LM's (``llmem.measure.published.megatron_gpt``,
    ``llmem.parallel.megatron``): gradients in one fp16 buffer, fp32 main gradients, masters and states,
    no distributed optimizer; its pipeline is 1F1B (``llmem.parallel.pipeline.ranks``), of which the rows of
    the first stage are read, the fullest. The A800 has an A100's kernels; the container's torch is a
    preview of 2.1.
    """
    if "GPT-345M" not in line["model"]:
        raise CannotExpress("Megatron-LM's code of another model, with experts or of unknown size")
    tp, pp, dp = (whole(line[key] or "1") for key in ("tp", "pp", "dp"))
    if rank_of(line) >= tp * dp:
        raise CannotExpress("a later stage than the first, whose ranks are the fullest")
    batch = whole(line["batch_size_per_gpu"])
    found = re.search(r"GBS (\d+)", line["notes"])
    if found is None:
        raise CannotExpress("the global batch is not in the notes")
    import torch

    from llmem.measure.published.megatron_gpt import GPT_345M, builder

    steps = int(found[1]) // (batch * dp)
    return make_spec(
        model=builder(GPT_345M, torch.float16),
        per_device_train_batch_size=batch * (steps if pp > 1 else 1),
        seq_length=whole(line["seq_len"]), pp=pp, micro_batches=steps if pp > 1 else None,
        gradient_accumulation_steps=1 if pp > 1 else steps, gpus=tp * pp * dp,
        strategy="megatron", tp=tp, tp_plan="megatron", sp="SP" in line["parallel_strategy"],
        gpu="a100-80gb", as_torch="2.1",
    )  # fmt: skip
