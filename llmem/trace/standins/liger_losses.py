"""Liger's divergences on meta, and its cross-entropy over a vocabulary in shards.

From linkedin/Liger-Kernel 0.8.2, src/liger_kernel/ops/: kl_div.py, jsd.py, tvd.py,
fused_linear_jsd.py, vocab_parallel_cross_entropy.py. T tokens, V vocabulary, H hidden size.
``scaled``: the loss has another gradient than 1 (a weighted sum of losses, gradient accumulation
outside the loss), so that the kept gradient is multiplied; ``loss.backward()`` does without.
"""

from __future__ import annotations

from typing import Any

import torch

from llmem.trace.standins.liger_ops import chunk_rows

FP32 = torch.float32


def kl_div(
    prediction: torch.Tensor, target: torch.Tensor, *, scaled: bool = False,
    over_prediction: bool = False, cutile: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerKLDivLossFunction``, mean per row of [T, V]: the gradient is made in backward.

    ``over_prediction``: it is written over the prediction, as until 0.3. ``cutile``: scaled by the
    kernel that makes it.
    """
    options = (scaled and not cutile, over_prediction, not cutile)
    return _KlDiv.apply(prediction, target, options)  # type: ignore[no-any-return, no-untyped-call]


class _KlDiv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prediction: torch.Tensor, target: torch.Tensor, options: tuple[bool, bool, bool]
    ) -> torch.Tensor:
        losses = torch.zeros(prediction.shape[0], dtype=FP32, device=prediction.device)
        kept = (prediction.contiguous(), target) if options[1] else (target,)
        ctx.save_for_backward(*kept)
        ctx.options = options
        return losses.sum() / prediction.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled, over_prediction, divided = ctx.options
        first = ctx.saved_tensors[0]
        made = first if over_prediction else torch.empty_like(first)
        derivative = made * grads[0] if scaled else made
        if divided:
            derivative = derivative / made.shape[0]
        return derivative, None, None


def jsd(
    prediction: torch.Tensor, target: torch.Tensor, *, scaled: bool = False
) -> torch.Tensor:
    """``LigerJSDFunction`` of log-probabilities [T, V]: an fp32 loss per entry in forward."""
    return _Kept.apply(prediction, prediction.shape, False, scaled)  # type: ignore[no-any-return, no-untyped-call]


def tvd(
    prediction: torch.Tensor, target: torch.Tensor, *, scaled: bool = False,
    divided: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerTVDLossFunction``: an fp32 loss per row, the gradient [T, V] is made in forward.

    ``divided``: by the number of rows in a second tensor, as until 0.7.
    """
    return _Kept.apply(prediction, prediction.shape[:1], divided, scaled)  # type: ignore[no-any-return, no-untyped-call]


class _Kept(torch.autograd.Function):
    """A loss whose gradient is made in forward and kept."""

    @staticmethod
    def forward(
        ctx: Any, prediction: torch.Tensor, losses: torch.Size, divided: bool, scaled: bool
    ) -> torch.Tensor:
        each = torch.zeros(losses, dtype=FP32, device=prediction.device)
        gradient = torch.empty_like(prediction.contiguous())
        loss = each.sum()
        if divided:
            loss, gradient = loss / gradient.shape[0], gradient / gradient.shape[0]
        ctx.save_for_backward(gradient)
        ctx.scaled = scaled
        return loss.to(prediction.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (grads[0] * gradient if ctx.scaled else gradient), None, None, None


def fused_linear_jsd(
    x: torch.Tensor, weight: torch.Tensor, teacher_x: torch.Tensor, teacher_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``LigerFusedLinearJSDFunction``: JSD of two heads on x [T, H], chunk by chunk.

    Chunks are those of the fused linear cross-entropy, their logits fp32; the fp32 loss [T, V] is
    whole. Gradients are made in forward, and scaled where they lie.
    """
    return _FusedLinearJsd.apply(x, weight, teacher_x, teacher_weight)  # type: ignore[no-any-return, no-untyped-call]


class _FusedLinearJsd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, teacher_x: torch.Tensor,
        teacher_weight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        d_weight = torch.zeros_like(weight) if weight.requires_grad else None
        d_input = torch.zeros_like(x)
        losses = torch.zeros(x.shape[0], weight.shape[0], dtype=FP32, device=x.device)
        rows = chunk_rows(x.shape[0], x.shape[1], weight.shape[0])
        for start in range(0, x.shape[0], rows):
            part = x[start : start + rows]
            logits = (part @ weight.t()).to(FP32)
            teacher_logits = (teacher_x[start : start + rows] @ teacher_weight.t()).to(FP32)
            logits = logits / 1.0
            teacher_logits = teacher_logits / 1.0
            log_probs = torch.log_softmax(logits, dim=-1)
            teacher_log_probs = torch.log_softmax(teacher_logits, dim=-1)
            row_sums = log_probs.sum(dim=-1, keepdim=True).broadcast_to(log_probs.shape)
            logits = (log_probs - torch.softmax(logits, dim=-1) * row_sums) / 1.0
            logits = logits.to(x.dtype)
            d_input[start : start + rows] = logits @ weight
            if d_weight is not None:
                d_weight.add_(logits.t() @ part)
        ctx.save_for_backward(d_input.detach(), d_weight)
        del teacher_log_probs
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_input, d_weight = ctx.saved_tensors
        return d_input, d_weight, None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``LigerVocabParallelCEFunction`` (Megatron): losses [S, B] of logits [S, B, V / shards].

    Kept is exp(logits - max) in fp32; backward writes the gradient over it and casts.
    """
    return _VocabParallel.apply(logits, target)  # type: ignore[no-any-return, no-untyped-call]


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = logits.contiguous()
        _largest = logits.amax(dim=-1).float()
        flat = target.reshape(-1).contiguous().to(torch.int64)
        options: dict[str, Any] = {"dtype": FP32, "device": logits.device}
        exponentials = torch.empty(flat.shape[0], logits.shape[-1], **options)
        predicted, sums = (torch.empty(flat.shape[0], **options) for _ in "ab")
        loss = torch.log(sums) - predicted
        ignored = flat == -100
        loss = torch.where(ignored, torch.zeros_like(loss), loss)
        ctx.save_for_backward(exponentials, sums, flat)
        ctx.like = logits.dtype, logits.shape
        return loss.reshape(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exponentials, _, _ = ctx.saved_tensors
        dtype, shape = ctx.like
        _flat = grads[0].contiguous().reshape(-1).to(FP32)
        return exponentials.to(dtype).view(shape), None
