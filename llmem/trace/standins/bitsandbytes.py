"""bitsandbytes' quantised linear layers on meta: what they keep, copy and save.

From bitsandbytes 0.50.2: ``nn/modules.py`` (Params4bit, Linear4bit, Int8Params, Linear8bitLt) and
``functional.py`` (``quantize_4bit``, ``quantize_blockwise``); the products are in
``bitsandbytes_ops.py``. peft has layers of its own around these classes, so ``known_to_peft`` lets
it take the stand-ins for the real ones, installed or not. N output and K input features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from llmem.trace.standins import bitsandbytes_ops as ops
from llmem.trace.standins.bitsandbytes_ops import Habits, Int8State, Nested, QuantState

BLOCK = 64
"""Weights that share one absmax (``Params4bit``'s default)."""
NESTED_BLOCK = 256
"""absmax values that share one absmax of their own, under double quantization."""
OUTLIER_THRESHOLD = 6.0
"""``BitsAndBytesConfig.llm_int8_threshold``."""


def quantize_4bit(
    weight: torch.Tensor, quant_type: str, *, double: bool, storage: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, QuantState]:
    """Packed weights and their statistics, as ``bitsandbytes.functional.quantize_4bit`` keeps them.

    Two weights a byte, in one column of ``storage``; one fp32 absmax per 64 weights; the table of
    the 16 values in fp32. ``double``: absmax in one byte each, with an offset, an fp32 absmax per
    256 of them and a table of 256 values (every layer has its own).
    """

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=weight.device)

    packed = new((weight.numel() + 1) // (2 * storage.itemsize), 1, dtype=storage)
    blocks = -(-weight.numel() // BLOCK)
    shape = torch.Size(weight.shape)
    if not double:
        return packed, QuantState(new(blocks), shape, weight.dtype, quant_type, new(16))
    nested = Nested(new(-(-blocks // NESTED_BLOCK)), new(256), new())
    absmax = new(blocks, dtype=torch.uint8)
    return packed, QuantState(absmax, shape, weight.dtype, quant_type, new(16), nested)


class Params4bit(torch.nn.Parameter):
    """Packed weights [N·K/2, 1] that know their statistics; peft goes by the class's name."""

    quant_state: QuantState
    quant_type: str
    compress_statistics: bool
    quant_storage: torch.dtype

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Params4bit:
        return torch.Tensor._make_subclass(cls, data, requires_grad)


class Int8Params(torch.nn.Parameter):
    """int8 weights [N, K] with an fp32 scale per row, ``SCB`` [N]."""

    SCB: torch.Tensor | None
    has_fp16_weights: bool

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Int8Params:
        return torch.Tensor._make_subclass(cls, data, requires_grad)


@dataclass(frozen=True)
class FourBit:
    """The arguments of ``Linear4bit`` after its sizes."""

    quant_type: str
    double: bool
    compute_dtype: torch.dtype
    storage: torch.dtype


class Linear4bit(torch.nn.Linear):
    """x [..., K] to [..., N], computed in ``compute_dtype`` and returned in x's dtype."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.nn.Parameter | None, bits: FourBit, habits: Habits
    ) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        packed, state = quantize_4bit(
            weight, bits.quant_type, double=bits.double, storage=bits.storage
        )
        self.weight = Params4bit(packed)
        self.weight.quant_state = state
        self.weight.quant_type = bits.quant_type
        self.weight.compress_statistics = bits.double
        self.weight.quant_storage = bits.storage
        self.register_parameter("bias", bias)
        self.quant_state = state
        self.compute_dtype = bits.compute_dtype
        self.compute_type_is_set = not habits.compute_dtype_from_input
        self._habits = habits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.compute_type_is_set:
            if x.dtype in (torch.float32, torch.bfloat16):
                self.compute_dtype = x.dtype
            self.compute_type_is_set = True
        given, x = x.dtype, x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None:
            if bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)
            bias = bias.to(self.compute_dtype)  # type: ignore[assignment]
        # FSDP replaces the parameter: the module keeps the statistics, too.
        return ops.matmul_4bit(x, self.weight, bias, self.quant_state, self._habits).to(given)


class Linear8bitLt(torch.nn.Linear):
    """x [..., K] to [..., N] by LLM.int8(), ``has_fp16_weights=False``."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.nn.Parameter | None, habits: Habits
    ) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = Int8Params(torch.empty_like(weight, dtype=torch.int8))
        scale = torch.empty(self.out_features, dtype=torch.float32, device=weight.device)
        self.weight.SCB, self.weight.has_fp16_weights = scale, False
        self.register_parameter("bias", bias)
        self.index = None
        self.state = Int8State(self.weight.data, scale, OUTLIER_THRESHOLD)
        self._habits = habits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        self.state.is_training = self.training
        return ops.matmul_int8(x, self.weight, self.bias, self.state, self._habits)


def statistics(module: torch.nn.Module) -> list[torch.Tensor]:
    """What a quantised layer keeps beside its parameters; no buffer of the module either.

    Of the stand-ins and of the library's own layers.
    """
    weight = getattr(module, "weight", None)
    kind = type(weight).__name__
    if kind == "Int8Params":
        return [weight.SCB]  # type: ignore[union-attr, list-item]
    if kind != "Params4bit":
        return []
    state: Any = weight.quant_state  # type: ignore[union-attr]
    if isinstance(state, QuantState):
        return state.tensors()
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return [state.absmax, *nested, state.code]


@cache
def library() -> ModuleType:
    """A module ``bitsandbytes`` of as much as peft asks for."""
    package, nn, functional = (
        ModuleType(name) for name in ("bitsandbytes", "bitsandbytes.nn", "bitsandbytes.functional")
    )
    package.__spec__ = ModuleSpec("bitsandbytes", None)
    for kind in (Params4bit, Int8Params, Linear4bit, Linear8bitLt):
        setattr(nn, kind.__name__, kind)
    functional.dequantize_4bit = ops.dequantize_4bit  # type: ignore[attr-defined]
    functional.int8_vectorwise_dequant = ops.dequantize_int8  # type: ignore[attr-defined]
    package.nn, package.functional = nn, functional  # type: ignore[attr-defined]
    return package


@contextmanager
def known_to_peft() -> Iterator[None]:
    """peft finds ``bitsandbytes`` installed, and it is the stand-ins.

    peft's layers for quantised weights are in modules ``peft.tuners.*.bnb``, which import
    bitsandbytes when they are loaded: those loaded here are forgotten at the end, the others get
    back the library that they had.
    """
    from peft import import_utils

    before = sys.modules.get("bitsandbytes")
    loaded = _peft_modules()
    theirs = {name: module.bnb for name, module in loaded.items() if hasattr(module, "bnb")}
    sys.modules["bitsandbytes"] = library()
    for name in theirs:
        loaded[name].bnb = library()
    _forget(import_utils)
    try:
        yield
    finally:
        for name in _peft_modules().keys() - loaded.keys():
            del sys.modules[name]
        for name, real in theirs.items():
            loaded[name].bnb = real
        del sys.modules["bitsandbytes"]
        if before is not None:
            sys.modules["bitsandbytes"] = before
        _forget(import_utils)


def _peft_modules() -> dict[str, Any]:
    return {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("peft.tuners.") and name.endswith(".bnb")
    }


def _forget(import_utils: Any) -> None:
    """peft asks once per process whether the library is there."""
    import_utils.is_bnb_available.cache_clear()
    import_utils.is_bnb_4bit_available.cache_clear()
