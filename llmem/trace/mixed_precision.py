"""Mixed precision on one GPU and under DDP, as transformers' Trainer has it through accelerate.

The model's forward runs under autocast, and its 16-bit outputs are converted to fp32 afterwards
(``Accelerator.prepare_model`` and ``convert_outputs_to_fp32`` in accelerate/utils/operations.py).
fp16 also scales the loss, unscales gradients before they are clipped, and checks them for
infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.autocast import autocast_on_meta

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MixedPrecision:
    """What a training step needs: the context of its forward, what becomes of the model's outputs,
    and the scaler of its loss."""

    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    outputs_of: Callable[[Any], Any] = lambda outputs: outputs
    scaler: torch.amp.GradScaler | None = None


def mixed_precision(
    spec: RunSpec, model: torch.nn.Module, device: str, *, cuda: bool, notes: list[str]
) -> MixedPrecision:
    """What ``--bf16`` or ``--fp16`` ask for, on ``device`` (``meta`` or a real one).

    Raises LlmemError where a real run refuses: fp16 without a GPU, and fp16 with parameters that
    are trained in fp16 (GradScaler: "Attempting to unscale FP16 gradients").
    """
    dtype = spec.autocast_dtype
    if dtype is None:
        return MixedPrecision()
    scaler = _scaler(model, device, cuda=cuda) if dtype == "float16" else None
    notes.append(
        f"mixed precision: autocast to {dtype} with {'CUDA' if cuda else 'CPU'}'s op lists, casts "
        "of fp32 weights cached until forward ends, outputs converted to fp32 (as accelerate does)"
    )
    if scaler is not None:
        notes.append("loss scaling: every step finds its gradients finite")

    return MixedPrecision(_region(dtype, device), to_fp32, scaler)


def inside_engine(dtype: str, device: str) -> MixedPrecision:
    """Autocast and fp32 outputs where an engine casts parameters itself, and scales no loss.

    accelerate's ``prepare_model`` wraps the forward before it hands the model to FSDP.
    """
    return MixedPrecision(_region(dtype, device), to_fp32)


def adapters_first_seen_in_fp32(model: torch.nn.Module) -> None:
    """In its first forward a LoRA layer casts its input to the dtype that its adapter is kept in.

    peft asks for ``lora_A.weight.dtype`` before FSDP1 unshards ``lora_A``: at first a view of the
    flat parameter as it was made, later one of the gathered parameter in the computed dtype.
    """
    for layer in model.modules():
        adapters: Any = getattr(layer, "lora_A", None)
        kept = next(iter(adapters.parameters()), None) if hasattr(adapters, "parameters") else None
        if kept is not None and hasattr(layer, "_cast_input_dtype"):
            layer._cast_input_dtype = _Once(layer, kept.dtype)  # type: ignore[assignment]


class _Once:
    """Takes the place of a layer's ``_cast_input_dtype`` for one call."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        del self._layer._cast_input_dtype
        return x.to(self._dtype)


def _region(dtype: str, device: str) -> Callable[[], AbstractContextManager[Any]]:
    if device == "meta":
        return lambda: autocast_on_meta(dtype)
    return lambda: torch.autocast(device, dtype=getattr(torch, dtype))


def to_fp32(data: Any) -> Any:
    """``data`` (tensors; lists, tuples and mappings of them) with 16-bit tensors in fp32."""
    if isinstance(data, torch.Tensor):
        return data.float() if data.dtype in _HALVES else data
    if isinstance(data, Mapping):
        return type(data)({name: to_fp32(value) for name, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(to_fp32, data))
    if isinstance(data, (list, tuple)):
        return type(data)(map(to_fp32, data))
    return data


class ScalerOnMeta(torch.amp.GradScaler):
    """A GradScaler whose gradients are always finite, as meta tensors cannot say."""

    def __init__(self) -> None:
        super().__init__("meta")

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return optimizer.step(*args, **kwargs)


def _scaler(model: torch.nn.Module, device: str, *, cuda: bool) -> torch.amp.GradScaler:
    if not cuda:
        raise LlmemError(
            "fp16 mixed precision needs a GPU, accelerate refuses it on cpu; use --bf16"
        )
    if any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        raise LlmemError(
            "--fp16 cannot train parameters that are fp16 themselves (GradScaler refuses to "
            "unscale their gradients); add --param-dtype fp32, or use --bf16"
        )
    return ScalerOnMeta() if device == "meta" else torch.amp.GradScaler(device)
