"""Rows of huggingface/peft's own method comparison: MetaMathQA on Llama-3.2-3B.

Base in bf16, adapters in fp32 unless the row says bf16, no autocast, batch 4, foreach AdamW,
clipping at 1.0; outputs live until the next forward. The counter is ``max_memory_reserved`` of the
whole script, evaluation included. The padded length of the longest batch is not recorded (768 is
the limit): it is the one number that is set, from the run with LoRA of rank 32, which is therefore
not graded.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from llmem.errors import LlmemError
from llmem.measure.published.run import CannotExpress, Line, minor, model_of, whole
from llmem.spec import RunSpec, make_spec

LENGTH = 650
"""Tokens of the longest batch: with them LoRA of rank 32 reserves 21,254 MiB, as was measured."""

RENAMED = {"bone": "miss", "bdlora": "lora"}
"""Methods under the name that peft gave them later (0.16: MiSS; BD-LoRA became a flag of LoRA)."""

_GPUS = {
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
}


def peft_spec(line: Line) -> RunSpec:
    """The row as a RunSpec with the row's own adapter_config.json; raises CannotExpress."""
    _check(line)
    settings, dropped = _settings(line)
    adapters: dict[str, Any] = {}
    if settings is not None:
        adapters = {
            "peft_config": settings, "method": settings["peft_type"].lower(),
            "autocast_adapter_dtype": "fp32" in line["param_dtype"],
            "notes": (f"settings that peft has no more: {', '.join(dropped)}",) if dropped else (),
        }  # fmt: skip
    return make_spec(
        model=model_of(line["model"].removesuffix(" (local path)")),
        per_device_train_batch_size=whole(line["batch_size_per_gpu"]), seq_length=LENGTH,
        padding=True, param_dtype="bf16", optim="adamw_torch", hold_outputs=True,
        gpu=_GPUS.get(line["gpu"], "l40s"),
        as_torch=minor(line["torch_version"]),
        as_transformers=minor(line["transformers_version"]), as_peft=_peft_version(line),
        **adapters,
    )  # fmt: skip


def _check(line: Line) -> None:
    if "Llama" not in line["model"]:
        raise CannotExpress("no language model: the transformer of an image generator (diffusers)")
    if "MetaMathQA:lora/llama-3.2-3B-rank32;" in line["notes"]:
        raise CannotExpress("the padded length of the whole benchmark was set from this run")
    if "steps1000" in line["notes"]:
        raise CannotExpress("another number of steps, so another longest batch")
    if not line["seq_len"].startswith("<=768") or line["batch_size_per_gpu"] != "4":
        raise CannotExpress("another batch or limit of length, so another longest batch")
    if line["optimizer"].startswith("lora-fa"):
        raise CannotExpress("the optimizer LoRA-FA, which trains half of each adapter")
    if line["grad_checkpointing"].lower().startswith("true"):
        raise CannotExpress("with checkpointing, evaluation (generation) sets the maximum")


def _peft_version(line: Line) -> str:
    """``0.19`` of the row's notes; the suite is older than 0.21 where they name none."""
    said = [part for part in line["notes"].split("; ") if part.startswith("peft=")]
    version = said[0].removeprefix("peft=") if said else ""
    return minor(version) if version[:1].isdecimal() else "0.20"


def _settings(line: Line) -> tuple[dict[str, Any] | None, list[str]]:
    """What the row's config says that the installed peft knows, and what it does not know any more."""
    from llmem.trace.adapters import NOT_ON_META, OF_THE_FILE, config_class

    kind = line["method"].removeprefix("peft:").lower()
    if kind.startswith("full"):
        return None, []
    method = RENAMED.get(kind, kind)
    if method in NOT_ON_META:
        raise CannotExpress(f"{method}: {NOT_ON_META[method]}")
    if method == "osf":  # the suite ran 0.20 and older
        raise CannotExpress(
            "OSF rebuilt each weight from its factors in every forward until peft 0.20; the installed "
            "peft does not"
        )
    raw = json.loads(line["adapter_config_json"] or "{}")
    try:
        known = {field.name for field in fields(config_class(method))} | set(OF_THE_FILE)
    except LlmemError:
        raise CannotExpress(f"the installed peft has no method {method}") from None
    dropped = sorted(name for name, value in raw.items() if name not in known and value)
    kept = {name: value for name, value in raw.items() if name in known}
    return {**kept, "peft_type": method.upper()}, dropped
