"""Published runs as RunSpecs: what a row of a measured CSV trained, and what it reached.

``read`` knows three shapes of file by their columns. Each has a reader that turns a row into a
`RunSpec` and a metric, or says in one clause why it cannot. What a file leaves open (versions,
padded lengths) is taken from how its authors ran, which each reader states.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError
from llmem.measure.published.many import public
from llmem.measure.published.run import (
    METRICS,
    CannotExpress,
    Claim,
    Line,
    Run,
    minor,
    model_of,
    run_of,
    whole,
)
from llmem.spec import RunSpec, make_spec

__all__ = ["METRICS", "CannotExpress", "Claim", "Run", "read"]


def read(path: Path) -> list[Run]:
    """The rows of a measured CSV in the file's order.

    Raises LlmemError if the file cannot be read or none of the three shapes has its columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file)
            columns = set(lines.fieldnames or ())
            reader = next((make for need, make in _SHAPES.items() if need <= columns), None)
            if reader is None:
                raise LlmemError(
                    f"{path} has none of the known sets of columns; see the readers in "
                    "llmem.measure.published.files, or give a record of `llmem measure`"
                )
            return [reader(line) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise LlmemError(f"cannot read {path}: {error}; give a measured CSV file") from None


# -- xMem: whole training runs under NVML ------------------------------------------------------------

_XMEM_OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam", "Adafactor": "adafactor_torch"}
"""Adam and AdamW ask for the same bytes: decay is done in place."""
_XMEM_TOOLS = ("xMem", "DNNMem", "SchedTune", "LLMem")
_ZERO_GRAD = ("before_forward", "before_backward", "after_step")
_FIXED = ("pythia", "R1-Distill", "Qwen3")
"""Padded to 128 tokens always; all other models to the longest row of each batch."""


def _xmem(line: Line) -> Run:
    """Stone-ResearchLife/xMem: torch 2.6, transformers 4.51, fp32, four steps of foreach optimizers.

    Nothing is clipped or checkpointed, outputs live until the next forward, texts are cut at 128
    tokens, which the longest of a batch is taken to have (grade C where the batch is small).
    """
    mode = line.get("zero_grad_mode_effective") or line["zero_grad"]
    measured = line.get("ground_truth_bytes") or str(int(line["ground_mib"]) << 20)
    fixed = any(name in line["model"] for name in _FIXED)
    grade = "A" if fixed else "B" if int(line["batch"]) >= 10 else "C"

    def spec() -> RunSpec:
        if line["row_class"].startswith("ceiling"):
            raise CannotExpress("it ran out of memory: the figure is what it had reached")
        if line["optimizer"] not in _XMEM_OPTIMIZERS:
            raise CannotExpress(f"no optimizer {line['optimizer']}")
        model = model_of(line["model"])
        return make_spec(
            model=model, per_device_train_batch_size=int(line["batch"]), seq_length=128,
            padding=True, optim=_XMEM_OPTIMIZERS[line["optimizer"]], gpu=line["gpu"],
            zero_grad=_ZERO_GRAD[int(mode)], param_dtype="fp32", max_grad_norm=0.0, use_cache=True,
            hold_outputs=True, steps=4, as_torch="2.6", as_transformers="4.51",
            attn_implementation="eager" if model.startswith("t5") else None,
        )  # fmt: skip

    return run_of(
        spec, source="xMem", metric="growth", measured=whole(measured), grade=grade,
        name=f"{line['model']} {line['optimizer']} batch {line['batch']}, {line['gpu']}",
        claims=dict(_claims(line)),
        total=whole(line["gpu_total_bytes"]) if line.get("gpu_total_bytes") else None,
    )  # fmt: skip


def _claims(line: Line) -> Iterator[tuple[str, Claim]]:
    for tool in _XMEM_TOOLS:
        said = line.get(f"{tool}_bytes", "")
        if said in ("", "null"):
            continue
        nbytes = float(said)
        capped = {"true": True, "false": False}.get(line.get(f"{tool}_2nd_oom", ""))
        cap = line.get(f"{tool}_2nd_cap_bytes_derived") or ""
        yield (
            tool,
            Claim(
                round(nbytes) if nbytes > 0 else None,
                float(line[f"{tool}_runtime_ns"] or 0) / 1e9,
                capped,
                whole(cap) if cap not in ("", "null") else None,
            ),
        )


# -- fms-acceleration: fine-tuning on A100s ----------------------------------------------------------

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "": "fp16"}
_FIRST_VERSIONS = {"transformers": "4.39", "peft": "0.11", "torch": "2.2"}
"""Of the first snapshot that lists versions; taken for those before it."""


def _fms(line: Line) -> Run:
    """foundation-model-stack/fms-acceleration: TRL's SFTTrainer under accelerate.

    Packed alpaca of 4,096 tokens, gradient checkpointing, flash-attn 2, foreach AdamW, clipping;
    FSDP1 on several GPUs; ``Trainer``'s flags as recorded, none where their column is absent.
    """
    name = (
        f"{line['model']} {line['method']} {line['framework_config']} {line['num_gpus']} GPUs, "
        f"batch {line['per_device_batch']} ({line['commit']})"
    )
    peak = line["peak_alloc_bytes"]
    measured = whole(peak) if peak else 0
    grade = "B" if "no version" in line["versions"] else "A"
    return run_of(
        lambda: _fms_spec(line), source="fms-acceleration", name=name, metric="allocated",
        measured=measured, grade=grade,
    )  # fmt: skip


def _fms_spec(line: Line) -> RunSpec:
    if line["finished"] != "yes" or not line["peak_alloc_bytes"]:
        raise CannotExpress("the run did not finish")
    kernels = line["framework_config"]
    versions = dict(_FIRST_VERSIONS)
    for part in line["versions"].split():
        package, _, version = part.partition("==")
        versions |= {package: version} if version else {}
    gpus = int(line["num_gpus"])
    fields: dict[str, Any] = {}
    if "foak" in kernels:
        fields["kernels"] = "foak-liger" if kernels.endswith("liger") else "foak"
    if line["method"] == "lora":
        autocast = tuple(map(int, versions["peft"].split(".")[:2])) >= (0, 12)
        fields |= {
            "method": "lora", "lora_r": whole(line["r"]), "lora_alpha": whole(line["lora_alpha"]),
            "lora_dropout": float(line["lora_dropout"] or 0), "autocast_adapter_dtype": autocast,
            "lora_target_modules": tuple(line["target_modules"].split()),
        }  # fmt: skip
    if "bnb" in kernels:
        prepared = "baseline" in kernels and gpus == 1
        fields |= _nf4(prepared=prepared, storage=_DTYPES[line["torch_dtype"]])
    flag = {name: True for name in ("bf16", "fp16") if line[name] == "True"}
    if "bnb" in kernels and not flag:  # these ran with the flag even where it is not recorded
        flag = {_DTYPES[line["torch_dtype"]]: True}
    return make_spec(
        model=model_of(line["model"]), per_device_train_batch_size=int(line["per_device_batch"]),
        seq_length=4096, param_dtype=_DTYPES[line["torch_dtype"]], optim="adamw_torch",
        gradient_checkpointing=True, attn_implementation="flash_attention_2",
        as_transformers=minor(versions["transformers"]), as_torch=minor(versions["torch"]),
        gpus=gpus, strategy="fsdp" if gpus > 1 else "none", gpu="a100-80gb",
        gradient_accumulation_steps=int(line["grad_accum"]), **flag, **fields,
    )  # fmt: skip


def _nf4(*, prepared: bool, storage: str) -> dict[str, Any]:
    """Fields of QLoRA in nf4.

    Adapters of quantised layers are fp32 in every version of peft; what peft upcasts, TRL casts back
    under bf16. Under FSDP the 4-bit weights are stored in the dtype of the other parameters and lie on
    the host when the trainer is made, for which SFTTrainer leaves ``prepare_model_for_kbit_training``
    out (``is_sharded_qlora``).
    """
    return {
        "method": "qlora", "quantization": "nf4", "prepare_kbit": "trl" if prepared else "none",
        "bnb_4bit_quant_storage": storage, "autocast_adapter_dtype": True,
    }  # fmt: skip


_SHAPES: dict[frozenset[str], Callable[[Line], Run]] = {
    frozenset({"model", "optimizer", "batch", "gpu", "row_class"}): _xmem,
    frozenset({"framework_config", "peak_alloc_bytes", "num_gpus", "versions"}): _fms,
    frozenset({"source", "metric", "measured_bytes", "grade"}): public,
}
"""Columns by which a file is known, and the reader of its rows."""
