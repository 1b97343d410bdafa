"""Ops of the Liger benchmark that run Liger's own kernels, through their stand-ins."""

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
    from_fixed,
    from_loss,
    from_noise,
    ids,
    randn,
)
from experiments.public_runs.liger_kernel_layers import KERNEL_LAYERS
from experiments.public_runs.liger_kernel_losses import KERNEL_LOSSES
from experiments.public_runs.liger_layers import GatedMlp, rope_inputs, rotated
from llmem.trace.standins import liger_ops


def cross_entropy(s: Setting) -> Case:
    tokens, vocabulary = (s.size("B") * s.size("T"), s.x) if "B" in s.config else (
        s.x, s.size("vocab_size"))  # fmt: skip
    x = randn(tokens, vocabulary, grad=True)
    target = ids(vocabulary, tokens)
    backward = from_noise if s.date >= "2026-05" else from_loss
    return Case(lambda: liger_ops.cross_entropy(x, target), backward, (x, target))


def rms_norm(s: Setting) -> Case:
    x = randn(s.size("M"), s.x, dtype=s.dtype)
    fixed = torch.randn_like(x)
    weights = [torch.ones(s.x, device=META, requires_grad=True) for _ in range(2)]
    x.requires_grad_(True)
    sms = s.device.sm_count
    return Case(
        lambda: liger_ops.rms_norm(x, weights[0], sm_count=sms), from_fixed(fixed), (x, weights)
    )


def layer_norm(s: Setting) -> Case:
    x = randn(s.size("M"), s.x, dtype=s.dtype)
    fixed = torch.randn_like(x)
    layers = [nn.LayerNorm(s.x, device=META) for _ in range(2)]
    x.requires_grad_(True)
    weight, bias, sms = layers[0].weight, layers[0].bias, s.device.sm_count
    return Case(
        lambda: liger_ops.layer_norm(x, weight, bias, sm_count=sms), from_fixed(fixed), (x, layers)
    )


class LigerMlp(GatedMlp):
    """``LigerSwiGLUMLP`` and ``LigerGEGLUMLP``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(liger_ops.gated(self.gate(x), self.up(x)))


def gated_mlp(s: Setting) -> Case:
    cublas_workspaces()
    width = s.size("hidden_size")
    x = randn(s.size("bsz", "B"), s.x, width, dtype=s.dtype, grad=True)
    layer = LigerMlp(width, s.size("intermediate_size"), s.config["hidden_act"], s.dtype)
    return Case(lambda: layer(x), from_noise, (x, layer))


def fused_linear_cross_entropy(s: Setting) -> Case:
    """The script of 2024 makes the head twice; kernels of that time upcast each chunk."""
    width, vocabulary = s.size("H"), s.size("V")
    heads = [nn.Linear(width, vocabulary, bias=False, device=META, dtype=s.dtype) for _ in "ab"]
    x = randn(s.x, width, dtype=s.dtype, grad=True)
    target = ids(vocabulary, s.x, 1).squeeze(1)
    weight = heads[0].weight

    def loss() -> torch.Tensor:
        return liger_ops.fused_linear_cross_entropy(x, weight, target, upcast=True)

    return Case(loss, from_loss, (heads, x, target))


def rope(s: Setting) -> Case:
    q, k, cos, sin = rope_inputs(s)
    return rotated(s, q, k, lambda: liger_ops.rope(q, k, cos, sin), (cos, sin))


def fused_add_rms_norm(s: Setting) -> Case:
    """The provider ``liger_rms_norm``: torch adds the residual, RMSNorm not in place, a weight."""
    x, residual = (randn(s.size("M"), s.x, dtype=s.dtype) for _ in range(2))
    gradients = (torch.randn_like(x), torch.randn_like(residual))
    x.requires_grad_(True)
    residual.requires_grad_(True)
    outer, inner = (torch.ones(s.x, device=META, requires_grad=True) for _ in range(2))
    sms = s.device.sm_count

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        total = x.to(torch.float32) + residual.to(torch.float32)
        normed = liger_ops.rms_norm(total, inner, sm_count=sms, in_place=False)
        return outer * normed.to(s.dtype), total.to(s.dtype)

    def backward(outputs: Any) -> None:
        torch.autograd.backward(outputs, gradients)

    return Case(forward, backward, (x, residual, outer, inner))


def embedding(s: Setting) -> Case:
    """``LigerEmbedding``: gathers rows, and adds gradients into zeros of the weight's shape."""
    batch, tokens, width = (s.size(name) for name in ("B", "T", "D"))
    layers = [nn.Embedding(s.x, width, device=META, dtype=s.dtype) for _ in range(2)]
    tokens_in = ids(s.x, batch, tokens)
    weight = layers[0].weight

    def backward(output: torch.Tensor) -> None:
        output.backward(torch.randn_like(output))

    return Case(lambda: _Embedding.apply(weight, tokens_in), backward, (layers, tokens_in))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        shape = (tokens.numel(), weight.shape[1])
        out = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        return out.view(*tokens.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grads[0].contiguous()
        return torch.zeros_like(ctx.saved_tensors[1]), None


KERNELS: dict[tuple[str, str], Callable[[Setting], Case]] = {
    ("cross_entropy", "liger"): cross_entropy,
    ("cross_entropy", "liger_triton"): cross_entropy,
    ("embedding", "liger"): embedding,
    ("fused_add_rms_norm", "liger_rms_norm"): fused_add_rms_norm,
    ("fused_linear_cross_entropy", "liger"): fused_linear_cross_entropy,
    ("layer_norm", "liger"): layer_norm,
    ("rms_norm", "liger"): rms_norm,
    ("rope", "liger_triton"): rope,
    **{
        (op, provider): gated_mlp
        for op in ("geglu", "swiglu", "tiled_geglu", "tiled_swiglu")
        for provider in ("liger", "liger_triton", "liger_cutile")
    },
    **KERNEL_LAYERS,
    **KERNEL_LOSSES,
}
"""(op, provider) -> its case: every one in the data."""
