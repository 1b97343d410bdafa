"""More layers of the Liger benchmark on Liger's own kernels, through their stand-ins.

Norms, activations, tiled MLPs, rotary embeddings, mixture of experts, multi-token attention. The
cuTile and Triton providers differ only where ``cutile`` says so.
"""

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
    from_noise,
    randn,
)
from experiments.public_runs.liger_layers import (
    GatedMlp,
    PolyNorm,
    llama4_rope_inputs,
    moe_inputs,
    rope_inputs,
    rotated,
)
from llmem.trace.standins import (
    liger_activations,
    liger_moe,
    liger_norms,
    liger_ops,
    liger_positions,
)

Builder = Callable[[Setting], Case]


def _cutile(s: Setting) -> bool:
    return "cutile" in s.provider


def fused_add_rms_norm(s: Setting) -> Case:
    """Scripts from 2026-05 on run backward from the normed output alone."""
    width = s.size("hidden_size")
    x, residual = (randn(s.x, width, dtype=s.dtype, grad=True) for _ in "ab")
    weight = torch.ones(width, device=META, requires_grad=True)
    sms = s.device.sm_count

    def forward() -> torch.Tensor:
        return liger_norms.fused_add_rms_norm(x, residual, weight, sm_count=sms)[0]

    return Case(forward, from_noise, (x, residual, weight))


def add_then_rms_norm(s: Setting) -> Case:
    """torch adds the residual, Liger's RMSNorm follows, and a weight of the wrapper's own."""
    width = s.size("hidden_size")
    x, residual = (randn(s.x, width, dtype=s.dtype, grad=True) for _ in "ab")
    outer, inner = (torch.ones(width, device=META, requires_grad=True) for _ in "ab")
    sms = s.device.sm_count

    def forward() -> torch.Tensor:
        total = x.to(torch.float32) + residual.to(torch.float32)
        normed = liger_ops.rms_norm(total, inner, sm_count=sms, in_place=False)
        both = outer * normed.to(s.dtype), total.to(s.dtype)
        return both[0]

    return Case(forward, from_noise, (x, residual, outer, inner))


def group_norm(s: Setting) -> Case:
    per_group = s.size("channels_per_group")
    new = "hidden_size" in s.config
    channels, spatial = (s.size("hidden_size") if new else s.x), s.size("H")
    samples = max(1, s.x // spatial) if new else s.size("M")
    x = randn(samples, channels, spatial, dtype=s.dtype)
    layers = [
        nn.GroupNorm(channels // per_group, channels, device=META, dtype=s.dtype)
        for _ in range(1 if new else 2)
    ]
    fixed = None if new else torch.randn_like(x)
    x.requires_grad_(True)
    weight, bias, groups = layers[0].weight, layers[0].bias, channels // per_group
    cutile = _cutile(s)

    def forward() -> torch.Tensor:
        return liger_norms.group_norm(x, weight, bias, groups, cutile=cutile)

    backward = from_noise if fixed is None else from_fixed(fixed)
    return Case(forward, backward, (x, layers), always_full=not new)


def dyt(s: Setting) -> Case:
    width = s.size("hidden_size")
    x = randn(s.x, width, dtype=s.dtype, grad=True)
    alpha = torch.ones(1, device=META, requires_grad=True)
    gamma, beta = (torch.ones(width, device=META, requires_grad=True) for _ in "ab")
    offset = beta if s.config["beta"] else None
    options: dict[str, Any] = {"sm_count": s.device.sm_count, "cutile": _cutile(s)}
    return Case(
        lambda: liger_norms.dyt(x, alpha, gamma, offset, **options), from_noise, (x, alpha, gamma)
    )


def poly_norm(s: Setting) -> Case:
    x = randn(s.x, s.size("hidden_size"), dtype=s.dtype, grad=True)
    layer = PolyNorm()
    sms = s.device.sm_count
    return Case(
        lambda: liger_norms.poly_norm(x, layer.weight, layer.bias, sm_count=sms), from_noise,
        (x, layer),
    )  # fmt: skip


def megatron_rms_norm(s: Setting) -> Case:
    """``WrappedTorchNorm`` of Megatron-Core returns torch.nn.RMSNorm."""
    layer = nn.RMSNorm(s.x, device=META, dtype=torch.bfloat16)
    x = randn(s.size("S"), s.size("B"), s.x, dtype=torch.bfloat16, grad=True)
    return Case(lambda: layer(x), lambda output: output.sum().backward(), (x, layer))


def megatron_swiglu(s: Setting) -> Case:
    """The script clears the gradient before each run."""
    shape = (s.size("S"), s.size("B"), 2 * s.x)
    x = randn(*shape, dtype=torch.bfloat16, grad=True)
    in_place = s.provider.endswith("in_place")

    def forward() -> torch.Tensor:
        x.grad = None
        return liger_activations.gated_together(x, in_place=in_place)

    return Case(forward, lambda output: output.sum().backward(), (x,))


def softmax(s: Setting) -> Case:
    """The script of 2025 takes a vector, and a gradient of ones."""
    new = "hidden_size" in s.config
    x = randn(s.x, *((s.size("hidden_size"),) if new else ()), dtype=s.dtype, grad=True)

    def from_ones(output: torch.Tensor) -> None:
        output.backward(torch.ones_like(output), retain_graph=True)

    return Case(lambda: liger_activations.softmax(x), from_noise if new else from_ones, (x,))


def sparsemax(s: Setting) -> Case:
    if "hidden_size" in s.config:
        x = randn(s.x, s.size("hidden_size"), dtype=s.dtype, grad=True)
        return Case(lambda: liger_activations.sparsemax(x), from_noise, (x,))
    x = randn(s.size("B") * s.size("T"), s.x, dtype=s.dtype)
    fixed = torch.randn_like(x)
    x.requires_grad_(True)
    return Case(lambda: liger_activations.sparsemax(x), from_fixed(fixed), (x,))


def multi_token_attention(s: Setting) -> Case:
    """Of softmax or sparsemax; both providers' weights are made."""
    inputs, outputs, k, groups = (s.size(name) for name in ("C_in", "C_out", "K", "groups"))
    weights = [randn(outputs, inputs // groups, k, k, dtype=s.dtype, grad=True) for _ in "ab"]
    biases = [randn(outputs, dtype=s.dtype, grad=True) for _ in "ab"]
    x = randn(s.size("B"), inputs, s.x, s.x, dtype=s.dtype)
    fixed = torch.randn_like(x)
    x.requires_grad_(True)
    cutile, sparse = _cutile(s), "dim" not in s.config and s.dtype == torch.float32

    def forward() -> torch.Tensor:
        return liger_activations.multi_token_attention(
            x, weights[0], biases[0], padding=k // 2, groups=groups, sparse=sparse, cutile=cutile
        )

    return Case(forward, from_fixed(fixed), (x, weights, biases))


def tiled_mlp(s: Setting) -> Case:
    """Liger's gate under Liger's tiling, plain PyTorch's under DeepSpeed's."""
    cublas_workspaces()
    width, shards = s.size("hidden_size"), s.size("num_shards")
    x = randn(s.size("bsz"), s.x, width, dtype=s.dtype, grad=True)
    layer = GatedMlp(width, s.size("intermediate_size"), s.config["hidden_act"], s.dtype)
    fused = s.provider == "liger_tiled"

    def part(rows: torch.Tensor) -> torch.Tensor:
        if not fused:
            return layer(rows)
        gate, up = layer.gate(rows), layer.up(rows)  # variables there, which outlive the product
        return layer.down(liger_ops.gated(gate, up))

    return Case(lambda: liger_activations.tiled(part, x, shards), from_noise, (x, layer))


def llama4_rope(s: Setting) -> Case:
    q, k, frequencies = llama4_rope_inputs(s)
    return rotated(
        s, q, k, lambda: liger_positions.llama4_rope(q, k, frequencies), (frequencies,)
    )


def qwen2vl_mrope(s: Setting) -> Case:
    """cos and sin [3, 1, tokens, D]."""
    q, k, cos, sin = rope_inputs(s)
    three = cos.expand(3, *cos.shape).contiguous(), sin.expand(3, *sin.shape).contiguous()
    del cos, sin
    return rotated(s, q, k, lambda: liger_positions.qwen2vl_mrope(q, k, *three), three)


def fused_moe(s: Setting) -> Case:
    """Its products are Triton's; the stock layer's, measured in that process too, were cuBLAS's."""
    cublas_workspaces()
    x, up, down, chosen, weights = moe_inputs(s)
    return Case(
        lambda: liger_moe.fused_moe(x, up, down, chosen, weights), from_noise,
        (x, up, down, chosen, weights),
    )  # fmt: skip


KERNEL_LAYERS: dict[tuple[str, str], Builder] = {
    ("fused_add_rms_norm", "liger_cutile_fused_add_rms_norm"): fused_add_rms_norm,
    ("fused_add_rms_norm", "liger_triton_rms_norm"): add_then_rms_norm,
    ("group_norm", "liger"): group_norm,
    ("group_norm", "liger_cutile"): group_norm,
    ("group_norm", "liger_triton"): group_norm,
    ("dyt", "liger_cutile"): dyt,
    ("poly_norm", "liger_triton"): poly_norm,
    ("megatron_rms_norm", "megatron"): megatron_rms_norm,
    ("megatron_swiglu", "liger"): megatron_swiglu,
    ("megatron_swiglu", "liger_in_place"): megatron_swiglu,
    ("multi_token_attention", "liger_cutile"): multi_token_attention,
    ("sparse_multi_token_attention", "liger"): multi_token_attention,
    ("fused_moe", "liger"): fused_moe,
    **{("softmax", provider): softmax for provider in ("liger", "liger_cutile")},
    **{("sparsemax", p): sparsemax for p in ("liger", "liger_cutile", "liger_triton")},
    **{
        (f"tiled_{op}", provider): tiled_mlp
        for op in ("geglu", "swiglu")
        for provider in ("liger_tiled", "deepspeed_tiled")
    },
    **{("llama4_rope", p): llama4_rope for p in ("liger_cutile", "liger_triton")},
    **{("qwen2vl_mrope", p): qwen2vl_mrope for p in ("liger_cutile", "liger_triton")},
}
"""(op, provider) -> its case."""
