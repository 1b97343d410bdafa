"""Stock PyTorch losses of the Liger benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments.public_runs.liger_case import (
    META,
    Case,
    Setting,
    from_kept_loss,
    from_loss,
    from_noise,
    ids,
    randn,
)


def _rows(s: Setting) -> tuple[int, int]:
    """(tokens, vocabulary) of a loss over logits: either may be the swept value."""
    if "B" in s.config:
        return s.size("B") * s.size("T"), s.x
    return s.x, s.size("vocab_size")


def from_random(s: Setting) -> bool:
    """Scripts from 2026-05 on measure through one function, from a random gradient."""
    return s.date >= "2026-05"


def cross_entropy(s: Setting) -> Case:
    tokens, vocabulary = _rows(s)
    x = randn(tokens, vocabulary, grad=True)
    target = ids(vocabulary, tokens)
    backward = from_noise if from_random(s) else from_loss
    return Case(lambda: F.cross_entropy(x, target), backward, (x, target))


def probabilities(s: Setting, student: str, teacher: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, vocabulary = _rows(s)
    x = getattr(randn(tokens, vocabulary, grad=True), student)(dim=-1)
    return x, getattr(randn(tokens, vocabulary), teacher)(dim=-1)


def kl_div(s: Setting) -> Case:
    x, target = probabilities(s, "log_softmax", "softmax")
    backward = from_noise if from_random(s) else from_kept_loss
    return Case(lambda: F.kl_div(x, target, reduction="batchmean"), backward, (x, target))


def jsd_loss(log_q: torch.Tensor, log_p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of two log-probabilities [T, V] with beta 1/2."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.kl_div(a, b, reduction="batchmean", log_target=True)

    log_p, log_q = log_p.to(torch.float32), log_q.to(torch.float32)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    mean = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    loss = 0.5 * kl(torch.log(mean), log_p) + 0.5 * kl(torch.log(mean), log_q)
    return loss.to(dtype)


def jsd(s: Setting) -> Case:
    x, target = probabilities(s, "log_softmax", "log_softmax")
    backward = from_noise if from_random(s) else from_kept_loss
    return Case(lambda: jsd_loss(x, target, torch.float32), backward, (x, target))


def tvd(s: Setting) -> Case:
    x, target = probabilities(s, "softmax", "softmax")

    def loss() -> torch.Tensor:
        distance = torch.abs(x - target) / 2.0
        return torch.sum(distance) / x.size(0)

    return Case(loss, from_noise if from_random(s) else from_kept_loss, (x, target))


def lm_head(vocabulary: int, width: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(width, vocabulary, bias=False, device=META, dtype=dtype)


def fused_linear_cross_entropy(s: Setting) -> Case:
    """The script of 2024 makes the head twice, once for each provider."""
    width, vocabulary = s.size("H"), s.size("V")
    stock, other = lm_head(vocabulary, width, s.dtype), lm_head(vocabulary, width, s.dtype)
    x = randn(s.x, width, dtype=s.dtype, grad=True)
    target = ids(vocabulary, s.x, 1).squeeze(1)

    def loss() -> torch.Tensor:
        logits = stock(x)
        return F.cross_entropy(logits, target)

    return Case(loss, from_loss, (stock, other, x, target))


def fused_linear_jsd(s: Setting) -> Case:
    """Student and teacher heads; the providers share their weights."""
    width, vocabulary = s.size("hidden_size", "H"), s.size("vocab_size", "V")
    student, teacher = lm_head(vocabulary, width, s.dtype), lm_head(vocabulary, width, s.dtype)
    x = randn(s.x, width, dtype=s.dtype, grad=True)
    other = randn(s.x, width, dtype=s.dtype)

    def loss() -> torch.Tensor:
        logits, teacher_logits = student(x), teacher(other)
        probabilities = torch.log_softmax(logits / 1.0, dim=-1)
        teacher_probabilities = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return jsd_loss(probabilities, teacher_probabilities, s.dtype)

    return Case(loss, from_noise if from_random(s) else from_loss, (student, teacher, x, other))


def distill_jsd_loss(s: Setting) -> Case:
    """Hard cross-entropy plus JSD; a student of half the width; heads made for both providers."""
    width, vocabulary = s.size("H"), s.size("V")
    heads = [lm_head(vocabulary, w, s.dtype) for w in (width // 2, width) * 2]
    student, teacher = heads[:2]
    source = randn(s.x, width // 2, dtype=s.dtype)
    inputs = [source.detach().clone().requires_grad_(True) for _ in range(2)]
    other = randn(s.x, width, dtype=s.dtype)
    target = ids(vocabulary, s.x)

    def logits_of() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = inputs[1] @ student.weight.t()
        with torch.no_grad():
            teacher_outputs = other @ teacher.weight.t()
        logits, teacher_logits = outputs.float(), teacher_outputs.float()
        return logits, teacher_logits, F.cross_entropy(logits, target)

    def soft(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        log_q, log_p = F.log_softmax(logits, dim=-1), F.log_softmax(teacher_logits, dim=-1)
        mean = 0.5 * log_q.exp() + 0.5 * log_p.exp()
        log_mean = mean.log()
        student_kl = F.kl_div(log_mean, log_q, reduction="batchmean", log_target=True)
        teacher_kl = F.kl_div(log_mean, log_p, reduction="batchmean", log_target=True)
        return 0.5 * teacher_kl + 0.5 * student_kl

    def loss() -> torch.Tensor:
        logits, teacher_logits, hard = logits_of()
        logits /= 1.0
        teacher_logits /= 1.0
        return 0.5 * hard + 0.5 * soft(logits, teacher_logits)

    return Case(loss, from_loss, (heads, source, inputs, other, target))


def preference(s: Setting) -> Case:
    """CPO and SimPO (trl's formulas): average log-probabilities of chosen and rejected halves."""
    batch, tokens, width, vocabulary = (s.size(n) for n in ("-", "T", "H", "V"))
    heads = [lm_head(vocabulary, width, s.dtype) for _ in range(2)]
    weight = heads[0].weight
    x = randn(batch, tokens, width, dtype=s.dtype, grad=True)
    target = ids(vocabulary, batch, tokens)
    half = batch // 2

    def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
        mask = target != -100
        labels = torch.where(target == -100, 0, target)
        each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (each * mask).sum(-1) / mask.sum(-1)

    def forward() -> tuple[torch.Tensor, ...]:
        outputs = x @ weight.t()
        logits = outputs.float()
        chosen = F.cross_entropy(logits[:half].view(-1, vocabulary), target[:half].view(-1))
        each = log_probabilities(logits)
        return each[:half], each[half:], logits[:half], logits[half:], chosen

    def loss() -> torch.Tensor:
        outputs = forward()
        chosen, rejected, _, _, nll = outputs
        losses = F.logsigmoid(0.1 * (chosen - rejected))
        return nll - losses.mean()

    return Case(loss, from_loss, (heads, x, target))


def grpo(s: Setting) -> Case:
    """GRPO with a reference head, importance weights per token or per sequence."""
    batch, tokens = s.x, s.size("T")
    width, vocabulary = s.size("hidden_size", "H"), s.size("vocab_size", "V")
    copies = 1 if from_random(s) else 2
    heads = [lm_head(vocabulary, width, s.dtype) for _ in range(2 * copies)]
    head, reference = heads[:2]
    x = randn(batch, tokens, width, dtype=s.dtype, grad=True)
    chosen = ids(vocabulary, batch, tokens)
    mask = torch.ones(batch, tokens, device=META)
    advantages = randn(batch, dtype=s.dtype)
    other = randn(batch, tokens, width, dtype=s.dtype)
    by_sequence = s.config["importance_sampling_level"] == "sequence"

    def of_chosen(log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)

    def per_token(logps: torch.Tensor, reference_logps: torch.Tensor) -> torch.Tensor:
        ratio = logps - logps.detach()
        if by_sequence:
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        first = torch.exp(ratio)
        second = torch.clamp(first, 0.8, 1.2)
        gain = advantages.unsqueeze(1)
        loss = -torch.min(first * gain, second * gain)
        gap = reference_logps.float() - logps
        return loss + 0.1 * (torch.exp(gap) - gap - 1.0)

    def forward() -> torch.Tensor:
        logits = x @ head.weight.t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        logps = of_chosen(log_probs)
        with torch.no_grad():
            reference_logits = other @ reference.weight.t()
            reference_log_probs = F.log_softmax(reference_logits.float(), dim=-1)
            reference_logps = of_chosen(reference_log_probs)
        each = per_token(logps, reference_logps)
        return (each * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    keep: tuple[Any, ...] = (heads, x, chosen, mask, advantages, other)
    return Case(forward, from_noise if from_random(s) else from_loss, keep)


LOSSES: dict[str, Callable[[Setting], Case]] = {
    "cross_entropy": cross_entropy, "distill_jsd_loss": distill_jsd_loss,
    "fused_linear_cpo_loss": preference, "fused_linear_simpo_loss": preference,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_grpo_loss_sequence": grpo, "fused_linear_jsd": fused_linear_jsd,
    "jsd": jsd, "kl_div": kl_div, "tvd": tvd,
}  # fmt: skip
