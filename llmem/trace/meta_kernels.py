"""Kernels for meta tensors where torch's own answer for another device or refuse.

Each returns outputs of the shape, dtype and strides that the named device kernel of torch makes;
none computes anything. ``llmem.trace.kernels`` registers them for the time of a trace.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``_grouped_mm``: torch's meta kernel takes bf16 alone, its device kernels any float dtype.

    Rows of the output are padded to 16 bytes (``create_grouped_gemm_output_tensor`` of
    aten/src/ATen/native/GroupedMMUtils.h).
    """
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2:
        shape = [a.shape[0], b.shape[-1]]
    elif b.dim() == 2:
        shape = [a.shape[1], b.shape[1]]
    else:
        shape = [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    per_line = 16 // dtype.itemsize
    row = -(-shape[-1] // per_line) * per_line
    stride = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


def layer_norm_cpu(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``native_layer_norm`` on a CPU keeps mean and rstd in the input's dtype (on CUDA: fp32).

    Except for a half input with fp32 weights (``param_scalar_type`` of
    aten/src/ATen/native/cpu/mixed_data_type.h).
    """
    half = input.dtype in (torch.bfloat16, torch.float16)
    mixed = half and any(p is not None and p.dtype == torch.float32 for p in (weight, bias))
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    mean, rstd = (
        torch.empty(
            _statistics_shape(input, len(normalized_shape)),
            dtype=torch.float32 if mixed else input.dtype,
            device=input.device,
        )
        for _ in range(2)
    )
    return out, mean, rstd


def rms_norm_cuda(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """``rms_norm`` of aten/src/ATen/native/layer_norm.cpp: one fused kernel on CUDA.

    Where input and weight differ in dtype it falls apart into its formula, as on a CPU.
    """
    if weight is not None and weight.dtype != input.dtype:
        return rms_norm_formula(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, normalized_shape, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


def fused_rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_fused_rms_norm`` (aten/src/ATen/native/cuda/layer_norm_kernel.cu): output, fp32 rstd."""
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    shape = _statistics_shape(input, len(normalized_shape))
    kind = torch.float64 if input.dtype == torch.float64 else torch.float32
    return out, torch.empty(shape, dtype=kind, device=input.device)


def fused_rms_norm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``_fused_rms_norm_backward``: the gradients of input and weight that ``mask`` asks for."""
    contiguous = torch.contiguous_format
    d_input = torch.empty_like(input, memory_format=contiguous) if mask[0] else None
    wanted = mask[1] and weight is not None
    d_weight = torch.empty_like(weight, memory_format=contiguous) if wanted else None  # type: ignore[arg-type]
    return d_input, d_weight


class _FusedRmsNorm(torch.autograd.Function):
    """What derivatives.yaml says of ``_fused_rms_norm``; a CPU build of torch leaves it out."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        out, rstd = aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        d_input, d_weight = aten._fused_rms_norm_backward(
            grads[0], input, ctx.shape, rstd, weight, wanted
        )
        return d_input, None, d_weight, None


def rms_norm_formula(
    input: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """``rms_norm_composite``: halves are computed in fp32 and rounded at the end.

    What CUDA did too before torch 2.9 (pytorch#153666).
    """
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    dims = list(range(input.dim() - len(shape), input.dim()))
    rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True).add_(eps or 1e-6))
    normed = x.mul(rstd)
    return (normed if weight is None else normed.mul(weight)).to(input.dtype)


def _statistics_shape(input: torch.Tensor, normalized: int) -> list[int]:
    """One number per normalised group: [..., 1, 1] with as many ones as normalised dimensions."""
    return [*input.shape[: input.dim() - normalized], *[1] * normalized]
