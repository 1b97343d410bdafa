"""Quantised weights: which layers, kept how, and how peft and TRL prepare such a model.

transformers puts bitsandbytes' layers in place of linear ones when it loads a model with a
``BitsAndBytesConfig`` (transformers/integrations/bitsandbytes.py, ``replace_with_bnb_linear``);
which stay as they are is asked of transformers itself. On meta the layers are
``llmem.trace.standins.bitsandbytes``, whether or not the library is installed; a real run on a CPU
has the library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.standins import bitsandbytes
from llmem.trace.standins.bitsandbytes import (
    OUTLIER_THRESHOLD,
    FourBit,
    Linear4bit,
    Linear8bitLt,
)
from llmem.trace.standins.bitsandbytes_ops import OUTLIER_COLUMNS, Habits

_DTYPES = {
    "uint8": torch.uint8, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16
}  # fmt: skip
_WORDS = {"nf4": "4-bit NormalFloat", "fp4": "4-bit float", "int8": "LLM.int8()"}


def quantization_of(spec: RunSpec) -> str:
    """``none``, ``int8``, ``nf4`` or ``fp4``: what ``spec`` asks for; QLoRA alone means nf4."""
    if spec.quantization == "none" and spec.method == "qlora":
        return "nf4"
    return spec.quantization


def quantize(model: torch.nn.Module, spec: RunSpec, notes: list[str], *, cuda: bool) -> None:
    """Quantise ``model`` in place as ``spec`` says, and prepare it for training adapters.

    Before the adapters are added. Raises LlmemError for what cannot be trained or is not modelled.
    """
    kind = quantization_of(spec)
    if kind == "none":
        return
    _check(model, spec, kind)
    bits = _four_bit(model, spec, kind, notes) if kind != "int8" else None
    habits = Habits.of(spec.as_bitsandbytes, int8=bits is None, cuda=cuda)
    replaced = _replace_layers(model, bits, habits)
    setattr(model, f"is_loaded_in_{'8bit' if kind == 'int8' else '4bit'}", True)
    if kind == "int8":
        notes.append(
            f"LLM.int8(): {OUTLIER_COLUMNS} outlier columns in every product "
            "(arXiv 2208.07339 for models up to 13 B; the data decide)"
        )
    _note_the_rest(model, replaced, notes)
    if spec.prepare_kbit != "none" and spec.method != "full":
        _prepare(model, spec, notes)


def finish(model: torch.nn.Module, spec: RunSpec, notes: list[str]) -> None:
    """After the adapters: what TRL casts back (``peft_module_casting_to_bf16``, TRL 0.8 to 0.23).

    With ``TrainingArguments.bf16`` and 4-bit weights, modules named norm become fp32, fp32
    embeddings and heads bf16.
    """
    four_bit = quantization_of(spec) in ("nf4", "fp4")
    if not (four_bit and spec.prepare_kbit == "trl" and spec.bf16):
        return
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif (
            any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe"))
            and isinstance(weight, torch.Tensor)
            and weight.dtype == torch.float32
        ):
            module.to(torch.bfloat16)
    notes.append("TRL: norms fp32, embeddings and head back to bf16 (peft_module_casting_to_bf16)")


@contextmanager
def layers_known(spec: RunSpec, device: str) -> Iterator[None]:
    """peft takes the layers of a quantised model on meta for bitsandbytes'."""
    on_meta = device == "meta" and quantization_of(spec) != "none"
    with bitsandbytes.known_to_peft() if on_meta else nullcontext():
        yield


def statistics(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What quantised layers keep beside parameters and buffers, with the layer's name."""
    for name, module in model.named_modules():
        for tensor in bitsandbytes.statistics(module):
            yield name, tensor


def _on_cpu(
    weight: torch.Tensor, bias: torch.nn.Parameter | None, bits: FourBit | None
) -> torch.nn.Module:
    """The library's own layer over ``weight`` [N, K], quantised there and then.

    Raises LlmemError where bitsandbytes is not installed.
    """
    try:
        bnb: Any = import_module("bitsandbytes")
    except ImportError as error:
        raise LlmemError(
            "a real run with quantised weights needs bitsandbytes; pip install 'llmem[quantization]'"
        ) from error
    features = weight.shape[1], weight.shape[0], bias is not None
    new: Any
    if bits is None:
        new = bnb.nn.Linear8bitLt(*features, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
        new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        new = bnb.nn.Linear4bit(*features, bits.compute_dtype, bits.double, bits.quant_type)
        new.weight = bnb.nn.Params4bit(
            weight, False, None, None, bits.double, bits.quant_type, bits.storage, new
        )
    new.weight = new.weight.to("cpu")
    new.bias = bias
    return new  # type: ignore[no-any-return]


def _check(model: torch.nn.Module, spec: RunSpec, kind: str) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise LlmemError(
            f"--quantization needs a transformers model, not {type(model).__name__}; quantise the "
            "module yourself before you hand it over"
        )
    if spec.method == "full" and getattr(spec, "task", "train") == "train":
        raise LlmemError(
            f"{kind} weights have no gradients, so --method full cannot train them; "
            "use --method qlora or lora"
        )
    if spec.method == "qlora" and kind == "int8":
        raise LlmemError("QLoRA is LoRA on 4-bit weights; for int8 use --method lora")
    _check_strategy(model, spec, kind)


def _check_strategy(model: torch.nn.Module, spec: RunSpec, kind: str) -> None:
    if spec.tp > 1 or spec.pp > 1:
        raise LlmemError(
            f"{kind} weights are not cut by --tp or --pp here; use --strategy ddp or fsdp"
        )
    if spec.strategy == "fsdp2" and kind != "int8":
        if spec.fsdp_units != "accelerate" or spec.bnb_4bit_quant_storage != "uint8":
            raise LlmemError(
                f"{kind} weights under fsdp2 are modelled as accelerate leaves them, whole on each "
                "GPU; use --fsdp-units accelerate and --bnb-4bit-quant-storage uint8, or --strategy "
                "fsdp"
            )
        return
    if spec.strategy in ("zero3", "gemini", "fsdp2"):
        raise LlmemError(
            f"{kind} weights under {spec.strategy} are not modelled; use --strategy ddp or fsdp"
        )
    if spec.strategy != "fsdp":
        return
    loaded = _loaded_dtype(model)
    same = next(name for name, dtype in _DTYPES.items() if dtype == loaded)
    if kind == "int8" or spec.bnb_4bit_quant_storage != same:
        raise LlmemError(
            "FSDP1 shards parameters of one floating-point dtype together; use 4-bit weights with "
            f"--bnb-4bit-quant-storage {same}, the dtype of the other parameters"
        )
    if spec.prepare_kbit != "none":
        raise LlmemError(
            "FSDP1 needs one dtype in every unit, which the fp32 upcasts of "
            "prepare_model_for_kbit_training break; add --prepare-kbit none"
        )


def _loaded_dtype(model: torch.nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _replace_layers(model: Any, bits: FourBit | None, habits: Habits) -> int:
    """Quantise the layers that transformers would; returns how many weights they have."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer

    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    count = 0
    new: torch.nn.Module
    for name, module in list(model.named_modules()):
        turned = isinstance(module, Conv1D)
        if not (turned or type(module) is torch.nn.Linear):
            continue
        if not _converts(name, kept):
            continue
        weight = module.weight.detach()
        weight = weight.t().contiguous() if turned else weight
        count += weight.numel()
        if weight.device.type != "meta":
            new = _on_cpu(weight, module.bias, bits)
        elif bits is None:
            new = Linear8bitLt(weight, module.bias, habits)
        else:
            new = Linear4bit(weight, module.bias, bits, habits)
        new.requires_grad_(False)
        new.train(module.training)
        model.set_submodule(name, new)
    if not count:
        raise LlmemError(f"{type(model).__name__} has no linear layer that bitsandbytes quantises")
    return count


def _converts(name: str, kept: list[str]) -> bool:
    """Whether transformers quantises the layer of that name, with ``kept`` the names it leaves."""
    try:
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError:  # 4.x: integrations/bitsandbytes.py, _replace_with_bnb_linear
        last = name.rpartition(".")[2]
        return last not in kept and not any(key == name or f"{key}." in name for key in kept)
    return should_convert_module(name, kept)


def _four_bit(model: Any, spec: RunSpec, kind: str, notes: list[str]) -> FourBit:
    asked = spec.bnb_4bit_compute_dtype
    compute = (
        _DTYPES[asked]
        if asked is not None
        else getattr(torch, spec.autocast_dtype)
        if spec.autocast_dtype is not None
        else _loaded_dtype(model)
    )
    why = (
        "--bnb-4bit-compute-dtype"
        if asked is not None
        else "as recipes set it; BitsAndBytesConfig's own default is float32"
    )
    double = spec.double_quant if spec.double_quant is not None else spec.method == "qlora"
    where = (
        "--double-quant"
        if spec.double_quant is not None
        else "as in QLoRA's recipe"
        if double
        else "BitsAndBytesConfig's default"
    )
    notes.append(
        f"quantization: {_WORDS[kind]}, blocks of 64, "
        f"{'with' if double else 'without'} double quantization ({where}), computed in "
        f"{str(compute).removeprefix('torch.')} ({why})"
    )
    return FourBit(kind, double, compute, _DTYPES[spec.bnb_4bit_quant_storage])


def _note_the_rest(model: torch.nn.Module, replaced: int, notes: list[str]) -> None:
    names = ("Params4bit", "Int8Params")  # the stand-ins', and the library's on a CPU
    quantised = {id(p) for p in model.parameters() if type(p).__name__ in names}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in quantised)
    notes.append(
        f"quantised: {replaced:,} weights; {rest:,} parameters (embeddings, head, norms, biases, "
        "anything but linear layers) stay as loaded"
    )


def _prepare(model: Any, spec: RunSpec, notes: list[str]) -> None:
    """peft's own preparation; ``build`` sets the kind of checkpointing afterwards."""
    from peft import prepare_model_for_kbit_training

    checkpoints = spec.gradient_checkpointing and model.supports_gradient_checkpointing
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
    notes.append(
        "prepare_model_for_kbit_training (peft): 16-bit parameters that are not quantised are fp32"
    )
