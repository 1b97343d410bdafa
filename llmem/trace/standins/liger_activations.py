"""Liger's activations on meta: gate-up SwiGLU, ReLU squared, softmax, sparsemax, tiled MLPs.

From linkedin/Liger-Kernel 0.8.2, src/liger_kernel/ops/: swiglu.py, relu_squared.py, softmax.py,
sparsemax.py, tiled_mlp.py, multi_token_attention.py. SwiGLU and GEGLU of separate gate and up are
``liger_ops.gated``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.grad import conv2d_weight


def gated_together(y: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """``LigerFusedGateUpSiLUMulFunction``: y [..., 2F], gate and up side by side, to [..., F].

    ``in_place``: the gradient of y takes its place.
    """
    return _GatedTogether.apply(y, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _GatedTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, in_place: bool) -> torch.Tensor:
        y = y.contiguous()
        ctx.save_for_backward(y)
        ctx.in_place = in_place
        return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        _contiguous = grads[0].contiguous()  # read by the kernel
        return (y.view_as(y) if ctx.in_place else torch.empty_like(y)), None


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """``LigerReLUSquaredFunction``: x is kept, nothing else."""
    return _Elementwise.apply(x, False)  # type: ignore[no-any-return, no-untyped-call]


def softmax(x: torch.Tensor) -> torch.Tensor:
    """``LigerSoftmaxFunction`` over the last dimension: the output is kept."""
    return _Elementwise.apply(x, True)  # type: ignore[no-any-return, no-untyped-call]


class _Elementwise(torch.autograd.Function):
    """One tensor in, one of its shape out, and one of its shape kept: either of the two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keeps_output: bool) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ctx.save_for_backward(out if keeps_output else x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (_kept,) = ctx.saved_tensors
        return torch.empty_like(grads[0].contiguous()), None


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """``LigerSparsemaxFunction`` over the last dimension, sorted by torch in fp32 beforehand."""
    return _Sparsemax.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out, kept = _sparsemax(x)
        ctx.save_for_backward(kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (_kept,) = ctx.saved_tensors
        return torch.empty_like(grads[0].contiguous())


def _sparsemax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = x.contiguous().view(-1, x.shape[-1])
    _ordered = torch.sort(flat.float(), dim=-1, descending=True).values  # read by the kernel
    out = torch.empty_like(flat)
    return out.view_as(x), out


def multi_token_attention(
    scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *,
    padding: int, groups: int = 1, sparse: bool = False, cutile: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerMultiTokenAttentionFunction``: causal softmax of scores [B, C, L, L], convolved.

    Kept are the masked scores and the probabilities. ``sparse``: sparsemax instead of softmax.
    ``cutile``: the softmax's gradient is one kernel, and the convolution's one call.
    """
    options = (padding, groups, sparse, cutile)
    return _MultiTokenAttention.apply(scores, weight, bias, options)  # type: ignore[no-any-return, no-untyped-call]


class _MultiTokenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        options: tuple[int, int, bool, bool],
    ) -> torch.Tensor:  # fmt: skip
        padding, groups, sparse, _ = ctx.options = options
        masked = torch.empty_like(scores.contiguous())
        kept = None
        if sparse:
            probabilities, kept = _sparsemax(masked)
        else:
            probabilities = torch.empty_like(masked)
        ctx.save_for_backward(masked, probabilities, kept, weight, bias)
        mixed = torch.nn.functional.conv2d(
            probabilities, weight, bias, padding=padding, groups=groups
        )
        return torch.empty_like(mixed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, probabilities, _, weight, bias = ctx.saved_tensors
        padding, groups, sparse, cutile = ctx.options
        d_mixed = torch.empty_like(grads[0].contiguous())
        if cutile:
            d_probabilities, d_weight, _ = torch.ops.aten.convolution_backward(
                d_mixed, probabilities, weight, None, [1, 1], [padding] * 2, [1, 1], False,
                [0, 0], groups, [True, True, False],
            )  # fmt: skip
        else:
            d_probabilities = torch.nn.functional.conv_transpose2d(
                d_mixed, weight, padding=padding, groups=groups
            )
            d_weight = conv2d_weight(
                probabilities, weight.shape, d_mixed, padding=padding, groups=groups
            )
        d_bias = None if bias is None else d_mixed.sum(dim=(0, 2, 3))
        if cutile and not sparse:
            return torch.empty_like(probabilities), d_weight, d_bias, None
        if sparse:
            d_masked = torch.empty_like(d_probabilities)
        else:
            dot = (d_probabilities * probabilities).sum(dim=-1, keepdim=True)
            d_masked = probabilities * (d_probabilities - dot)
        return torch.empty_like(d_masked), d_weight, d_bias, None


def tiled(
    mlp: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, shards: int
) -> torch.Tensor:
    """``LigerTiledMLPFunction``: mlp of x [..., S, H] in ``shards`` parts along S.

    Only x is kept; backward runs each part again, and the parameters' gradients add up part by
    part. DeepSpeed's ``TiledMLP``, which it follows, allocates the same.
    """
    return _Tiled.apply(x, mlp, shards)  # type: ignore[no-any-return, no-untyped-call]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mlp: Callable[[torch.Tensor], torch.Tensor], shards: int
    ) -> torch.Tensor:
        ctx.mlp, ctx.shards = mlp, shards
        ctx.save_for_backward(x)
        with torch.no_grad():
            parts = [mlp(part) for part in torch.chunk(x, shards, dim=-2)]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().view(-1, saved.shape[-1])
        grad = grads[0].contiguous().view(-1, grads[0].shape[-1])
        d_input = torch.zeros_like(x)
        parts = [torch.chunk(t, ctx.shards, dim=0) for t in (x, grad, d_input)]
        for part, d_output, place in zip(*parts, strict=True):
            part = part.detach().requires_grad_()
            part.grad = place
            with torch.enable_grad():
                output = ctx.mlp(part)
            torch.autograd.backward(output, d_output)
        return d_input.view(saved.shape), None, None
