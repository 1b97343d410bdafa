"""Losses of the Liger benchmark on Liger's own kernels, through their stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from experiments.public_runs.liger_case import (
    META,
    Case,
    Setting,
    cublas_workspaces,
    from_kept_loss,
    from_loss,
    from_noise,
    ids,
    randn,
)
from experiments.public_runs.liger_losses import from_random, lm_head, probabilities
from llmem.trace.standins import liger_losses, liger_ops, liger_preference


def kl_div(s: Setting) -> Case:
    x, target = probabilities(s, "log_softmax", "softmax")
    new, cutile = from_random(s), s.provider == "liger_cutile"

    def loss() -> torch.Tensor:
        return liger_losses.kl_div(
            x, target, scaled=new, over_prediction=s.date < "2024-09-06", cutile=cutile
        )

    return Case(loss, from_noise if new else from_kept_loss, (x, target))


def jsd(s: Setting) -> Case:
    x, target = probabilities(s, "log_softmax", "log_softmax")
    return Case(lambda: liger_losses.jsd(x, target, scaled=True), from_noise, (x, target))


def tvd(s: Setting) -> Case:
    x, target = probabilities(s, "softmax", "softmax")
    return Case(lambda: liger_losses.tvd(x, target, divided=True), from_kept_loss, (x, target))


def fused_linear_jsd(s: Setting) -> Case:
    cublas_workspaces()
    width, vocabulary = s.size("hidden_size"), s.size("vocab_size")
    student, teacher = lm_head(vocabulary, width, s.dtype), lm_head(vocabulary, width, s.dtype)
    x = randn(s.x, width, dtype=s.dtype, grad=True)
    other = randn(s.x, width, dtype=s.dtype)

    def loss() -> torch.Tensor:
        return liger_losses.fused_linear_jsd(x, student.weight, other, teacher.weight)

    return Case(loss, from_noise, (student, teacher, x, other))


def cross_entropy(s: Setting) -> Case:
    """cuTile's kernel; the cuteDSL one allocates as Triton's."""
    tokens, vocabulary = s.x, s.size("vocab_size")
    x = randn(tokens, vocabulary, grad=True)
    target = ids(vocabulary, tokens)
    copies = s.provider == "liger_cutile"
    return Case(
        lambda: liger_ops.cross_entropy(x, target, copies=copies), from_noise, (x, target)
    )


def megatron_cross_entropy(s: Setting) -> Case:
    """Losses of one rank's logits [S, B, V]; the script clears the gradient before each run."""
    shape = (s.size("S"), s.size("B"))
    logits = randn(*shape, s.x, dtype=torch.bfloat16, grad=True)
    target = ids(s.x, *shape)

    def losses() -> torch.Tensor:
        logits.grad = None
        if s.provider == "liger":
            return liger_losses.vocab_parallel_cross_entropy(logits, target)
        return MegatronCrossEntropy.apply(logits, target, s.provider == "megatron-fused")

    return Case(losses, lambda output: output.sum().backward(), (logits, target))


class MegatronCrossEntropy(torch.autograd.Function):
    """Megatron-Core's ``_VocabParallelCrossEntropy`` (NVIDIA/Megatron-LM d98e8a6, 2026-08).

    tensor_parallel/cross_entropy.py works in place on fp32 logits, which become the softmax and
    then the gradient. fusions/fused_cross_entropy.py compiles the same steps: what is written in
    place there is a new tensor where it is an input of the compiled step that also is kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, fused: bool) -> torch.Tensor:
        wide = logits.float()
        largest = torch.max(wide, dim=-1)[0]
        softmax = torch.empty_like(wide) if fused else wide.sub_(largest.unsqueeze(-1))
        mask = target < 0
        masked = target.clone()
        sums = softmax.sum(dim=-1)
        loss = torch.log(sums) - largest
        ctx.save_for_backward(softmax, mask, masked.view(-1))
        ctx.fused = fused
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, _, _ = ctx.saved_tensors
        if not ctx.fused:
            return softmax.mul_(grads[0].unsqueeze(-1)), None, None
        updated = softmax.clone()
        return updated.to(torch.bfloat16), None, None


def preference(s: Setting) -> Case:
    """ORPO and SimPO; the head is made for both providers."""
    cublas_workspaces()
    tokens, width, vocabulary = (s.size(n) for n in ("T", "H", "V"))
    heads = [lm_head(vocabulary, width, s.dtype) for _ in "ab"]
    x = randn(s.x, tokens, width, dtype=s.dtype, grad=True)
    target = ids(vocabulary, s.x, tokens)
    weight = heads[0].weight
    return Case(
        lambda: liger_preference.paired(x, weight, target), from_loss, (heads, x, target)
    )


def kto(s: Setting) -> Case:
    """Heads with a bias and their references, for both providers; inputs need no gradient."""
    cublas_workspaces()
    tokens, width, vocabulary = (s.size(n) for n in ("T", "H", "V"))
    heads = [nn.Linear(width, vocabulary, device=META, dtype=s.dtype) for _ in range(4)]
    x, other = (randn(s.x, tokens, width, dtype=s.dtype) for _ in "ab")
    target = ids(vocabulary, s.x, tokens)
    reference = (other, heads[1].weight.detach())

    def loss() -> torch.Tensor:
        return liger_preference.unpaired(
            x, heads[0].weight, target, heads[0].bias, reference=reference
        )

    return Case(loss, from_loss, (heads, x, other, target))


def grpo(s: Setting) -> Case:
    """Compiled as a whole in 0.6, by blocks of the vocabulary since 0.8."""
    cublas_workspaces()
    tokens = s.size("T")
    width, vocabulary = s.size("hidden_size", "H"), s.size("vocab_size", "V")
    new = from_random(s)
    heads = [lm_head(vocabulary, width, s.dtype) for _ in range(2 if new else 4)]
    x = randn(s.x, tokens, width, dtype=s.dtype, grad=True)
    target = ids(vocabulary, s.x, tokens)
    mask = torch.ones(s.x, tokens, device=META)
    other = randn(s.x, tokens, width, dtype=s.dtype)
    reference = (other, heads[1].weight.detach())
    weight = heads[0].weight

    def loss() -> torch.Tensor:
        if new:
            return liger_preference.grpo(x, weight, target, reference=reference, scaled=True)
        return liger_preference.unpaired(x, weight, target, reference=reference)

    return Case(loss, from_noise if new else from_loss, (heads, x, target, mask, other))


KERNEL_LOSSES: dict[tuple[str, str], Callable[[Setting], Case]] = {
    ("tvd", "liger"): tvd,
    ("cross_entropy", "liger_cutile"): cross_entropy,
    ("cross_entropy", "liger_cutedsl"): cross_entropy,
    **{
        ("megatron_cross_entropy", p): megatron_cross_entropy
        for p in ("liger", "megatron-fused", "megatron-unfused")
    },
    ("fused_linear_orpo_loss", "liger"): preference,
    ("fused_linear_simpo_loss", "liger"): preference,
    ("kto_loss", "liger"): kto,
    ("fused_linear_grpo_loss_token", "liger"): grpo,
    ("fused_linear_grpo_loss_sequence", "liger"): grpo,
    ("fused_linear_grpo_loss_sequence", "liger_cutile"): grpo,
    **{("kl_div", p): kl_div for p in ("liger", "liger_cutile", "liger_triton")},
    **{("jsd", p): jsd for p in ("liger_cutile", "liger_triton")},
    **{("fused_linear_jsd", p): fused_linear_jsd for p in ("liger_cutile", "liger_triton")},
}
"""(op, provider) -> its case."""
