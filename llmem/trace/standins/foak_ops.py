"""Unsloth's kernels as fms-acceleration ships them, on meta: outputs, saved tensors, in-place writes.

Read in foundation-model-stack/fms-acceleration 733992a (2024-12) and 24bdadb (2025-02),
plugins/fused-ops-and-kernels/src/fms_acceleration_foak/kernels/unsloth: rms_layernorm.py,
rope_embedding.py, cross_entropy_loss.py. B batch, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

FP32 = torch.float32

LARGEST_ROW = 65536
"""Logits of a token that one block reads; more are cut into chunks (``MAX_FUSED_SIZE``)."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``Fast_RMS_Layernorm``: x [..., H] to [..., H] in x's dtype; x and fp32 1/rms are kept.

    The gradient of the output becomes that of x; the weight gets none.
    """
    return _RmsNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        out = torch.empty_like(rows)
        inverse = torch.empty(rows.shape[0], dtype=FP32, device=x.device)
        ctx.save_for_backward(rows, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        _saved = ctx.saved_tensors  # read by the kernel
        return grads[0].view(grads[0].shape), None


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``fast_rope_embedding``: q [B, heads, S, D] and k are rotated where they lie.

    Only cos and sin are kept. A gradient that does not lie token by token is copied first.
    """
    turned = [_Rope.apply(t.transpose(1, 2), cos, sin) for t in (q, k)]  # type: ignore[no-untyped-call]
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.tables = cos.squeeze(), sin.squeeze()
        return _by_token(x.view(_flat(x)), x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _by_token(grads[0].reshape(_flat(grads[0])), grads[0]), None, None


def _flat(x: torch.Tensor) -> tuple[int, int]:
    batch, tokens, heads, width = x.shape
    return batch * tokens, heads * width


def _by_token(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.view(like.shape)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, count: Any = None) -> torch.Tensor:
    """Mean loss of logits [T, V], whose gradient is written over them in backward.

    Kept are the logits and their fp32 log-sum-exp. ``count``: predicted tokens, if known.
    """
    losses = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    if count is None:
        count = torch.count_nonzero(labels != -100)
    return losses.sum() / count  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, vocabulary = logits.shape
        chunks = -(-vocabulary // LARGEST_ROW)
        losses = torch.empty(rows, dtype=FP32, device=logits.device)
        shape = (rows,) if chunks == 1 else (rows, chunks)
        logsumexp = torch.empty(shape, dtype=FP32, device=logits.device)
        if chunks > 1:
            logsumexp = torch.logsumexp(logsumexp, dim=1)
            losses += logsumexp
            losses.masked_fill_(labels == -100, 0)
        ctx.save_for_backward(logits, logsumexp, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None
