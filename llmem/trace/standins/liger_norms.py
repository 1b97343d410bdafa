"""Liger's other norms on meta: residual plus RMSNorm, group norm, dynamic tanh, PolyNorm.

From linkedin/Liger-Kernel 0.8.2, src/liger_kernel/ops/: fused_add_rms_norm.py, group_norm.py,
dyt.py, poly_norm.py, and their counterparts in ops/cutile/ops where those allocate otherwise
(``cutile=True``). RMSNorm and layer norm are in ``liger_ops``. T rows, H width; gradients of
parameters are summed from one fp32 row per SM, as there.
"""

from __future__ import annotations

from typing import Any

import torch

FP32 = torch.float32

TANH_BLOCK = {False: 512, True: 1024}
"""Columns per partial sum of alpha's gradient, by ``cutile`` (``triton.cdiv(N, 512)``)."""


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, sm_count: int,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``LigerFusedAddRMSNormFunction``: (norm(x + residual), x + residual), both [..., H].

    The sum and fp32 rstd [T] are kept, and x and residual share one gradient.
    """
    return _FusedAddRmsNorm.apply(x, residual, weight, sm_count, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _FusedAddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, sm_count: int,
        in_place: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        rstd = torch.empty(x.shape[:-1].numel(), dtype=FP32, device=x.device)
        ctx.save_for_backward(total, weight, rstd)
        ctx.sm_count, ctx.in_place = sm_count, in_place
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        d_out, _d_total = (grad.contiguous() for grad in grads)
        partial = torch.empty(ctx.sm_count, d_out.shape[-1], dtype=FP32, device=d_out.device)
        d_input = d_out if ctx.in_place else torch.empty_like(d_out)
        return d_input, d_input, partial.sum(dim=0).to(weight.dtype), None, None


def group_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, *,
    cutile: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerGroupNormFunction`` of x [B, C, ...]: mean and rstd [B, groups] in x's dtype.

    ``cutile``: those in fp32, and parameter gradients from one row per sample.
    """
    return _GroupNorm.apply(x, weight, bias, groups, cutile)  # type: ignore[no-any-return, no-untyped-call]


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int,
        cutile: bool,
    ) -> torch.Tensor:  # fmt: skip
        x = x.contiguous()
        out = torch.empty_like(x)
        dtype = FP32 if cutile else x.dtype
        mean, rstd = (torch.zeros(x.shape[0], groups, dtype=dtype, device=x.device) for _ in "ab")
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.cutile = cutile
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, _, _ = ctx.saved_tensors
        grads[0].contiguous()
        d_input = torch.empty_like(x)
        if not ctx.cutile:
            return d_input, torch.zeros_like(weight), torch.zeros_like(bias), None, None
        partials = [weight.new_zeros(x.shape[0], weight.shape[0]) for _ in (weight, bias)]
        return d_input, *(partial.sum(dim=0) for partial in partials), None, None


def dyt(
    x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, *,
    sm_count: int, cutile: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerDyTFunction``: tanh(alpha x) gamma + beta of x [..., H]; only x is kept."""
    return _Dyt.apply(x, alpha, gamma, beta, sm_count, cutile)  # type: ignore[no-any-return, no-untyped-call]


class _Dyt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor,
        beta: torch.Tensor | None, sm_count: int, cutile: bool,
    ) -> torch.Tensor:  # fmt: skip
        x = x.contiguous()
        ctx.save_for_backward(x, alpha, gamma, beta)
        ctx.sm_count, ctx.cutile = sm_count, cutile
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, _, gamma, beta = ctx.saved_tensors
        grad = grads[0].contiguous()
        width = grad.shape[-1]
        options: dict[str, Any] = {"dtype": FP32, "device": grad.device}
        blocks = -(-width // TANH_BLOCK[ctx.cutile])
        d_alphas = torch.zeros(ctx.sm_count, blocks, **options)
        d_gammas = torch.empty(ctx.sm_count, width, **options)
        d_betas = None if beta is None else torch.empty(ctx.sm_count, width, **options)
        d_input = torch.empty_like(grad)
        d_beta = None if d_betas is None else d_betas.sum(dim=0).to(x.dtype)
        d_gamma = d_gammas.sum(dim=0).to(gamma.dtype)
        d_alpha = d_alphas.sum().to(x.dtype).unsqueeze(0)
        return d_input, d_alpha, d_gamma, d_beta, None, None


def poly_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, sm_count: int,
    in_place: bool = True,
) -> torch.Tensor:  # fmt: skip
    """``LigerPolyNormFunction`` of x [..., H]: fp32 rstd [T, 3] of cubes, squares and x is kept."""
    return _PolyNorm.apply(x, weight, bias, sm_count, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _PolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sm_count: int,
        in_place: bool,
    ) -> torch.Tensor:  # fmt: skip
        x = x.contiguous()
        out = torch.empty_like(x)
        rstd = torch.empty(x.shape[:-1].numel(), 3, dtype=FP32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.sm_count, ctx.in_place = sm_count, in_place
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_input = grad if ctx.in_place else torch.zeros_like(grad)
        d_weights = torch.empty(ctx.sm_count, 3, dtype=FP32, device=grad.device)
        d_biases = torch.empty(ctx.sm_count, dtype=FP32, device=grad.device)
        d_weight = d_weights.sum(dim=0).to(weight.dtype)
        return d_input, d_weight, d_biases.sum().to(weight.dtype), None, None
