"""Liger's kernels on meta: same outputs, saved tensors, in-place gradients and temporaries.

From linkedin/Liger-Kernel 0.8.0, src/liger_kernel/ops/: rms_norm.py (``rms_norm_forward``,
``rms_norm_backward``), rope.py, swiglu.py and geglu.py, cross_entropy.py,
fused_linear_cross_entropy.py, layer_norm.py. B batch, S tokens, T = B·S, H hidden size, V
vocabulary, F width of a gated MLP.
"""

from __future__ import annotations

from typing import Any

import torch

FP32 = torch.float32


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, sm_count: int, in_place: bool = True
) -> torch.Tensor:
    """``LigerRMSNormFunction``: x [..., H] to [..., H], rstd fp32 [T] is kept.

    The weight's gradient is summed from one fp32 row per SM. ``in_place``: the gradient of the
    output becomes that of the input; False allocates another.
    """
    return _RmsNorm.apply(x, weight, sm_count, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, sm_count: int, in_place: bool
    ) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rstd = torch.empty(x.shape[:-1].numel(), dtype=FP32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.sm_count, ctx.in_place = sm_count, in_place
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        partial = torch.empty(ctx.sm_count, grad.shape[-1], dtype=FP32, device=grad.device)
        d_input = grad if ctx.in_place else torch.zeros_like(grad)
        return d_input, partial.sum(dim=0).to(weight.dtype), None, None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, sm_count: int
) -> torch.Tensor:
    """``LigerLayerNormFunction``: mean and rstd [T] in x's dtype, gradients summed per SM."""
    return _LayerNorm.apply(x, weight, bias, sm_count)  # type: ignore[no-any-return, no-untyped-call]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sm_count: int
    ) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.shape[:-1].numel()
        mean, rstd = (torch.empty(rows, dtype=x.dtype, device=x.device) for _ in range(2))
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.sm_count = sm_count
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight, bias, _, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_input = torch.empty_like(grad)
        rows = (ctx.sm_count, grad.shape[-1])
        partials = [torch.empty(rows, dtype=FP32, device=grad.device) for _ in range(2)]
        sums = [
            p.sum(dim=0).to(t.dtype) for p, t in zip(partials, (weight, bias), strict=True)
        ]
        return d_input, *sums, None


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``LigerRopeFunction``: q [B, heads, S, D] and k are rotated in place.

    In place means in memory order [B, S, heads, D]; tensors that lie otherwise are copied first.
    Only cos and sin are kept.
    """
    return _Rope.apply(q, k, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _by_token(q), _by_token(k)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _by_token(grads[0]), _by_token(grads[1]), None, None


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``LigerSiLUMulFunction`` and ``LigerGELUMulFunction``: act(gate) * up, all [..., F].

    Only gate and up are kept, and their gradients take their places.
    """
    return _Gated.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grads[0].contiguous()
        gate, up = ctx.saved_tensors
        return gate.view_as(gate), up.view_as(up)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, copies: bool = False, per_row: bool = False
) -> torch.Tensor:
    """``LigerCrossEntropyFunction``: the gradient is written over the logits [T, V] in forward.

    Loss per row in the dtype of the logits, and a few vectors over the targets. ``copies``: the
    gradient times that of the loss is another tensor (the cuTile kernel if that is not 1, and any
    if ``per_row``, which returns the losses [T]).
    """
    return _CrossEntropy.apply(logits, target, copies or per_row, per_row)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, copies: bool, per_row: bool
    ) -> torch.Tensor:
        loss = torch.zeros(logits.shape[0], dtype=logits.dtype, device=logits.device)
        kept = target != -100
        kept.sum()
        for extreme in (torch.max, torch.min):
            extreme(target * kept)
        ctx.save_for_backward(logits.contiguous().detach())
        ctx.copies = copies
        return loss if per_row else torch.sum(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        if not ctx.copies:
            return logits, None, None, None
        each = grads[0].unsqueeze(-1) if grads[0].ndim else grads[0]
        return logits * each, None, None, None


def fused_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, upcast: bool = False
) -> torch.Tensor:
    """``LigerFusedLinearCrossEntropyFunction``: loss of x [T, H] @ weight[V, H].T without logits.

    Tokens go in chunks of the power of two from T / ceil(V / H) on, so that a chunk's logits are
    about as large as x; gradients are made in forward. ``upcast``: each chunk's logits are copied
    to fp32 and back and scaled, as until 0.4.
    """
    return _FusedLinear.apply(x, weight, target, upcast)  # type: ignore[no-any-return, no-untyped-call]


def chunk_rows(tokens: int, hidden: int, vocabulary: int) -> int:
    """Tokens per chunk.

    >>> chunk_rows(16384, 4096, 32000)
    2048
    """
    wanted = -(-tokens // -(-vocabulary // hidden))
    return 1 << (wanted - 1).bit_length()


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, upcast: bool
    ) -> torch.Tensor:
        trained = weight.requires_grad
        d_input = torch.zeros_like(x)
        d_weight = torch.zeros_like(weight) if trained else None
        loss = torch.zeros(x.shape[0], dtype=FP32, device=x.device)
        kept = target != -100
        kept.sum()
        rows = chunk_rows(x.shape[0], x.shape[1], weight.shape[0])
        for start in range(0, x.shape[0], rows):
            part = x[start : start + rows]
            logits = part @ weight.t()
            if upcast:
                logits = logits.float()
                logits = logits.to(x.dtype)
                scaled = logits * 1.0
            else:
                scaled = logits
            d_input[start : start + rows] = scaled @ weight
            if d_weight is not None and upcast:
                torch.addmm(d_weight, logits.t(), part, out=d_weight)
            elif d_weight is not None:
                d_weight += torch.mm(logits.t(), part).float()
        ctx.save_for_backward(d_input.detach(), d_weight)
        return torch.sum(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_input, d_weight = ctx.saved_tensors
        return d_input, d_weight, None, None
