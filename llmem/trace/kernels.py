"""Make composite ops on meta tensors take the path they take on the target device.

torch decides inside C++, by device, which kernel a composite op becomes. For meta tensors it
decides wrongly (SDPA becomes S x S scores, dropout three ops instead of one). While
``kernels_of`` is active, those composite ops have kernels of our own for meta tensors, which
repeat the device's decision and call the op that the device would call. They sit at the autograd
level of the dispatcher, so calls from inside C++ are caught as well.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import Library

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.gpu.scratch import Scratch, TensorMeta, scratch
from llmem.gpu.sdpa import choose_sdpa, choose_sdpa_cpu
from llmem.trace import meta_kernels

aten = torch.ops.aten
Note = Callable[[str], None]


@contextmanager
def kernels_of(
    device: DeviceProfile, note: Note, sdpa: str | None = None, as_torch: str | None = None
) -> Iterator[None]:
    """Composite ops on meta tensors act as on ``device``.

    ``note`` receives a sentence about each choice made; ``sdpa`` forces the attention backend
    (``flash``, ``efficient``, ``cudnn`` or ``math``); ``as_torch`` is the version of torch whose
    choices count (None: the installed one).
    """
    version = torch_version(as_torch)
    composite: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _Attention(device, note, sdpa, version).__call__
    }
    plain: dict[str, Callable[..., Any]] = {"_grouped_mm": meta_kernels.grouped_mm}
    if device.is_cuda:
        composite["dropout"] = _dropout
        composite["softmax.int"] = _softmax
        composite["log_softmax.int"] = _log_softmax
        fused = version >= (2, 9)
        composite["rms_norm"] = (
            meta_kernels.rms_norm_cuda if fused else meta_kernels.rms_norm_formula
        )
        plain["_fused_rms_norm"] = meta_kernels.fused_rms_norm
        plain["_fused_rms_norm_backward"] = meta_kernels.fused_rms_norm_backward
    else:
        plain["native_layer_norm"] = meta_kernels.layer_norm_cpu
    library = Library("aten", "IMPL")  # destroyed below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that are replaced on purpose
            # Library.impl refuses kernels of composite ops for meta; the registration itself works.
            for name, kernel in (composite | plain).items():
                library.m.impl(name, "Meta", kernel)  # type: ignore[union-attr]
            for name, kernel in composite.items():
                library.m.impl(name, "AutogradMeta", kernel)  # type: ignore[union-attr]
        yield
    finally:
        library._destroy()


def describe(tensor: torch.Tensor) -> TensorMeta:
    """Shape and dtype of a tensor, for the rules that know no torch."""
    return TensorMeta(
        tuple(tensor.shape), dtype_name(tensor.dtype), tensor.element_size(), tensor.stride()
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scratch_of(
    device: DeviceProfile, as_torch: str | None = None
) -> Callable[[str, Any, Any, str], list[Scratch]]:
    """What kernels of ``device`` allocate besides their outputs, for the recorder."""
    version = torch_version(as_torch)

    @cache
    def known(name: str, args: Any, out: Any, thread: str, _types: Any) -> list[Scratch]:
        environment = os.environ
        return scratch(name, args, out, device, env=environment, torch_version=version, thread=thread)

    def of(name: str, args: Any, out: Any, thread: str) -> list[Scratch]:
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        made = tuple(describe(t) for t in outputs if isinstance(t, torch.Tensor))
        # The types tell True from 1, which are equal.
        return known(name, _described(args), made, thread, tuple(map(type, args)))

    return of


def _described(args: Any) -> tuple[Any, ...]:
    return tuple(
        describe(arg)
        if isinstance(arg, torch.Tensor)
        else _described(arg)
        if isinstance(arg, (list, tuple))
        else arg
        for arg in args
    )


class _Attention:
    """``scaled_dot_product_attention`` of ATen/native/transformers/attention.cpp."""

    def __init__(
        self, device: DeviceProfile, note: Note, forced: str | None, version: tuple[int, int]
    ) -> None:
        self._device = device
        self._note = note
        self._forced = forced
        self._version = version
        self._choices: dict[Any, str] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        backend = self._choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, grad)
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = _additive_mask(mask, query.dtype)
        # C++ lets go of the other outputs before the arguments: so no name for them here.
        if backend == "math" and hasattr(query, "placements"):
            raise LlmemError(
                "torch's context parallelism loops around flash, efficient and cuDNN attention, and "
                "this one is plain math (see `SDPA kernel` without --cp); try --bf16"
            )
        if backend == "math":
            return aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale,
                enable_gqa=enable_gqa,
            )[0]  # type: ignore[no-any-return]  # fmt: skip
        if not self._device.is_cuda:
            return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )[0]
        if backend == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if backend == "efficient":
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, _padded_mask(mask, query, key), grad, dropout_p, is_causal,
                scale=scale,
            )[0]  # type: ignore[no-any-return]  # fmt: skip
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, mask, grad, dropout_p, is_causal, False, scale=scale
        )[0]

    def _choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool,
        grad: bool,
    ) -> str:
        case = (
            query.shape, key.shape, value.shape, query.dtype,
            None if mask is None else (mask.shape, mask.dtype, mask.requires_grad),
            dropout_p, is_causal, enable_gqa, grad,
        )  # fmt: skip
        known = self._choices.get(case)
        if known is not None:
            return known
        common = {
            "mask": None if mask is None else describe(mask),
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "enable_gqa": enable_gqa,
            "requires_grad": grad,
            "torch_version": self._version,
            "forced": self._forced,
            "mask_requires_grad": mask is not None and mask.requires_grad,
        }
        shapes = (describe(query), describe(key), describe(value))
        if not self._device.is_cuda:
            choice = choose_sdpa_cpu(*shapes, **common)  # type: ignore[arg-type]
        else:
            choice = choose_sdpa(*shapes, device=self._device, **common)  # type: ignore[arg-type]
        refused = "; ".join(f"not {name}: {why}" for name, why in choice.why.items())
        self._note(
            f"SDPA kernel: {choice.backend} for {str(query.dtype).removeprefix('torch.')}, "
            f"head size {query.shape[-1]} on {self._device.name}"
            + (f" ({refused})" if refused else "")
        )
        self._choices[case] = choice.backend
        return choice.backend


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Head sizes are padded to a multiple of 8, the output cut back (attention.cpp)."""
    head = query.shape[-1]
    if head % 8:
        scale = scale if scale is not None else head**-0.5
        pad = 8 - head % 8
        query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head] if head % 8 else out  # type: ignore[no-any-return]


def _additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``convert_boolean_attn_mask``: a mask of zeros and minus infinities in the query's dtype."""
    return torch.where(
        mask,
        torch.zeros((), dtype=dtype, device=mask.device),
        torch.full((), float("-inf"), dtype=dtype, device=mask.device),
    )


def _padded_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """``preprocess_mask``: last dimension padded to 16 elements and cut back, then broadcast."""
    if mask is None:
        return None
    if mask.shape[-1] % 16:
        padded = torch.nn.functional.pad(mask, (0, 16 - mask.shape[-1] % 16))
        mask = padded[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``dropout`` of ATen/native/Dropout.cpp: one fused kernel that returns a bool mask too."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p < 1:
        return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]
    return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))


def _softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``softmax.int`` of ATen/native/SoftMax.cpp: fp16 to fp32 happens inside the kernel."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax(input, dim, True)  # type: ignore[no-any-return]
    converted = input if dtype is None else input.to(dtype)
    return aten._softmax(converted, dim, False)  # type: ignore[no-any-return]


def _log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``log_softmax.int``, as ``_softmax``."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax(input, dim, True)  # type: ignore[no-any-return]
    converted = input if dtype is None else input.to(dtype)
    return aten._log_softmax(converted, dim, False)  # type: ignore[no-any-return]


def torch_version(as_torch: str | None = None) -> tuple[int, int]:
    """(major, minor) of ``as_torch``, or of the installed torch.

    Raises LlmemError if that is no version.

    >>> torch_version("2.6.0")
    (2, 6)
    """
    parts = (as_torch or torch.__version__).split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise LlmemError(f"'{as_torch}' is no version of torch; write it as 2.6")
    return int(parts[0]), int(parts[1])
