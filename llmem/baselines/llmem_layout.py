"""What LLMem reads off a model: parameter sizes in order, and who is embedding, linear or head.

LLMem was written against transformers 4.29.2, whose CodeGen registers `qkv_proj` before `out_proj`,
the other way round than transformers 5. Sizes are therefore taken from shapes and never from
pushing an input through modules in their order. (The chunk size is the same in both orders.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmem.baselines.dims import dims_of, layer_stack

if TYPE_CHECKING:
    from torch import nn

FP32_LOGITS_NAMES = ("codegen", "neo")
FP32_LOGITS_TYPES = ("codegen", "gpt_neo")

@dataclass(frozen=True)
class Parameter:
    """A parameter: its elements, and whether tensor parallelism shards it."""

    name: str
    numel: int
    sharded: bool


def parameters(model: nn.Module) -> list[Parameter]:
    """Parameters in ``model.parameters()`` order, shared ones once.

    LLMem's tensor parallelism shards the weights of every Linear and Embedding; biases and norms
    are replicated.
    """
    wide = {f"{name}.weight" for name, module in model.named_modules() if is_table(module)}
    return [Parameter(n, p.numel(), n in wide) for n, p in model.named_parameters()]


def is_embedding(module: nn.Module) -> bool:
    """LLMem's test for an embedding: by class name, so position tables and subclasses count."""
    return "Embedding" in type(module).__name__


def is_linear(module: nn.Module) -> bool:
    """LLMem's test for a Linear: the class name is exactly this (GPT-2's Conv1D is not one)."""
    return type(module).__name__ == "Linear"


def is_table(module: nn.Module) -> bool:
    """An embedding or a Linear that holds parameters."""
    return is_embedding(module) or is_linear(module)


def local_numels(params: list[Parameter], tp: int) -> list[int]:
    """Elements of each parameter on one of ``tp`` tensor-parallel ranks."""
    return [-(-p.numel // tp) if p.sharded else p.numel for p in params]


def logits_bytes(name: str, config: Any) -> int:
    """Bytes per logit: 4 where the model's name says so (LLMem's rule), else 2.

    The code looks for "codegen" or "neo" in the model's name, whose 4.29.2 classes cast logits to
    fp32; a model without a telling name (a path, a callable) is known by its ``model_type``.
    """
    by_name = any(part in name.lower() for part in FP32_LOGITS_NAMES)
    return 4 if by_name or getattr(config, "model_type", "") in FP32_LOGITS_TYPES else 2


def cannot_express(model: Any, config: Any) -> str | None:
    """Why neither the equations nor the code apply to this model, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "LLMem covers decoder-only models"
    if hasattr(model, "peft_config"):
        return "LLMem covers full fine-tuning only"
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        return "LLMem needs an input embedding and a language-model head"
    if not layer_stack(model):
        return "no stack of transformer layers was found"
    try:
        dims_of(model, config)
    except ValueError as error:
        return str(error)
    return None


def method_of(zero: str | None, gpus: int, tp: int) -> str | None:
    """LLMem's name of the strategy (``CDP``, ``ADP``, ``TP``, ``DP+TP``), or None where it has
    none.

    Several GPUs without a named strategy mean ADP, the paper's default; FSDP and ZeRO-3 are the
    nearest to ADP; ZeRO-1 and ZeRO-2 have no equation.
    """
    if zero in ("zero1", "zero2") and gpus > 1:
        return None
    if tp > 1:
        return "TP" if tp >= gpus else "DP+TP"
    if gpus == 1 or zero == "ddp":
        return "CDP"
    return "ADP"
