"""Stock PyTorch layers of the Liger benchmark: norms, MLPs, RoPE, embedding, activations."""

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
    ids,
    randn,
)


def _over(x: torch.Tensor, layer: Callable[[Any], Any], *, fixed: torch.Tensor | None) -> Case:
    backward = from_noise if fixed is None else from_fixed(fixed)
    return Case(lambda: layer(x), backward, (x, layer))


def embedding(s: Setting) -> Case:
    """Both the stock and Liger's embedding are made, whichever is measured (September 2024)."""
    batch, tokens, width = (s.size(name) for name in ("B", "T", "D"))
    stock, other = (nn.Embedding(s.x, width, device=META, dtype=s.dtype) for _ in range(2))
    tokens_in = ids(s.x, batch, tokens)

    def backward(output: torch.Tensor) -> None:
        output.backward(torch.randn_like(output))

    return Case(lambda: stock(tokens_in), backward, (stock, other, tokens_in))


class LlamaRmsNorm(nn.Module):
    """transformers' LlamaRMSNorm; the weight stays fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=META))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + 1e-6)
        return self.weight * wide.to(x.dtype)


def rms_norm(s: Setting) -> Case:
    width = s.x
    x = randn(s.size("M"), width, dtype=s.dtype)
    fixed = torch.randn_like(x)
    layers = [LlamaRmsNorm(width) for _ in range(2)]
    x.requires_grad_(True)
    case = _over(x, layers[0], fixed=fixed)
    case.keep += tuple(layers)
    return case


def layer_norm(s: Setting) -> Case:
    width = s.x
    x = randn(s.size("M"), width, dtype=s.dtype)
    fixed = torch.randn_like(x)
    layers = [nn.LayerNorm(width, device=META) for _ in range(2)]
    x.requires_grad_(True)
    case = _over(x, layers[0], fixed=fixed)
    case.keep += tuple(layers)
    return case


def group_norm(s: Setting) -> Case:
    per_group = s.size("channels_per_group")
    if "hidden_size" in s.config:
        channels, spatial = s.size("hidden_size"), s.size("H")
        shape = (max(1, s.x // spatial), channels, spatial)
        x = randn(*shape, dtype=s.dtype, grad=True)
        layer = nn.GroupNorm(channels // per_group, channels, device=META, dtype=s.dtype)
        return _over(x, layer, fixed=None)
    x = randn(s.size("M"), s.x, s.size("H"), dtype=s.dtype)
    fixed = torch.randn_like(x)
    layers = [nn.GroupNorm(s.x // per_group, s.x, device=META) for _ in range(2)]
    x.requires_grad_(True)
    case = _over(x, layers[0], fixed=fixed)
    case.keep += tuple(layers)
    case.always_full = True
    return case


def megatron_rms_norm(s: Setting) -> Case:
    layer = nn.RMSNorm(s.x, device=META, dtype=torch.bfloat16)
    x = randn(s.size("S"), s.size("B"), s.x, dtype=torch.bfloat16, grad=True)
    return Case(lambda: layer(x), lambda output: output.sum().backward(), (x, layer))


class Dyt(nn.Module):
    """gamma * tanh(alpha * x) (+ beta), parameters in fp32."""

    def __init__(self, width: int, beta: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, device=META))
        self.gamma = nn.Parameter(torch.ones(width, device=META))
        self.beta = nn.Parameter(torch.zeros(width, device=META)) if beta else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.gamma * torch.tanh(self.alpha * x)
        return out if self.beta is None else out + self.beta


def dyt(s: Setting) -> Case:
    x = randn(s.x, s.size("hidden_size"), dtype=s.dtype, grad=True)
    return _over(x, Dyt(s.size("hidden_size"), s.config["beta"]), fixed=None)


class PolyNorm(nn.Module):
    """w0 norm(x^3) + w1 norm(x^2) + w2 norm(x) + b in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=META))
        self.bias = nn.Parameter(torch.ones((), device=META))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def norm(y: torch.Tensor) -> torch.Tensor:
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)

        wide = x.to(torch.float32)
        cubes, squares, same = wide**3, wide**2, wide**1
        cubic, square, linear = norm(cubes), norm(squares), norm(same)
        w = self.weight
        out = w[0] * cubic + w[1] * square + w[2] * linear + self.bias
        return out.to(x.dtype)


def poly_norm(s: Setting) -> Case:
    x = randn(s.x, s.size("hidden_size"), dtype=s.dtype, grad=True)
    return _over(x, PolyNorm(), fixed=None)


def relu_squared(s: Setting) -> Case:
    x = randn(s.x, dtype=s.dtype, grad=True)

    def backward(output: torch.Tensor) -> None:
        output.backward(torch.ones_like(output), retain_graph=True)

    return Case(lambda: torch.square(torch.relu(x)), backward, (x,))


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)), no biases (LlamaMLP)."""

    def __init__(self, width: int, inner: int, act: str, dtype: torch.dtype) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": META, "dtype": dtype}
        self.gate = nn.Linear(width, inner, **options)
        self.up = nn.Linear(width, inner, **options)
        self.down = nn.Linear(inner, width, **options)
        self.act = nn.SiLU() if act == "silu" else nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def gated_mlp(s: Setting) -> Case:
    cublas_workspaces()
    width = s.size("hidden_size")
    x = randn(s.size("bsz", "B"), s.x, width, dtype=s.dtype, grad=True)
    layer = GatedMlp(width, s.size("intermediate_size"), s.config["hidden_act"], s.dtype)
    return _over(x, layer, fixed=None)


def _heads(s: Setting) -> tuple[int, int, int, int]:
    """(tokens, query heads, key heads, head size)."""
    new = "num_attention_heads" in s.config
    tokens = s.x if new else s.size("seq_len")
    queries = s.size("num_attention_heads", "num_q_heads")
    keys = s.size("num_key_value_heads", "num_kv_heads")
    return tokens, queries, keys, s.size("hidden_size") // queries


def rotated(
    s: Setting, q: torch.Tensor, k: torch.Tensor, apply: Callable[[], Any], keep: Any
) -> Case:
    """Newer scripts run backward from the queries alone, older ones ask for both gradients."""
    if "num_attention_heads" in s.config:
        return Case(lambda: apply()[0], from_noise, (q, k, keep))
    gradients = (torch.randn_like(q), torch.randn_like(k))

    def backward(outputs: Any) -> None:
        torch.autograd.grad(outputs, (q, k), gradients, allow_unused=True, retain_graph=True)

    return Case(apply, backward, (q, k, keep, gradients))


def rope_inputs(s: Setting) -> tuple[torch.Tensor, ...]:
    """q and k [1, heads, tokens, D] as transposed views, cos and sin [1, tokens, D]."""
    tokens, queries, keys, head = _heads(s)
    q, k = (
        randn(1, tokens, heads, head, dtype=s.dtype, grad=True).transpose(1, 2)
        for heads in (queries, keys)
    )
    angles = _angles(tokens, head)
    both = torch.cat((angles, angles), dim=-1)
    return q, k, both.cos().to(s.dtype), both.sin().to(s.dtype)


def _angles(tokens: int, head: int) -> torch.Tensor:
    """[1, tokens, D/2]: a matrix product, as the rotary embedding modules make them."""
    frequencies = torch.empty(1, head // 2, 1, device=META)
    positions = torch.arange(tokens, device=META)[None, None, :].float()
    return (frequencies @ positions).transpose(1, 2)


def rope(s: Setting) -> Case:
    """transformers' apply_rotary_pos_emb with rotate_half."""
    q, k, cos, sin = rope_inputs(s)
    positions = torch.arange(q.shape[2], device=META).unsqueeze(0)

    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat((-second, first), dim=-1)

    def apply() -> tuple[torch.Tensor, torch.Tensor]:
        c, n = cos.unsqueeze(1), sin.unsqueeze(1)
        turned_q = (q * c) + (rotate_half(q) * n)
        turned_k = (k * c) + (rotate_half(k) * n)
        return turned_q, turned_k

    return rotated(s, q, k, apply, (cos, sin, positions))


def llama4_rope_inputs(s: Setting) -> tuple[torch.Tensor, ...]:
    """q and k [1, tokens, heads, D], complex frequencies [1, tokens, D/2]."""
    tokens, queries, keys, head = _heads(s)
    q, k = (randn(1, tokens, n, head, dtype=s.dtype, grad=True) for n in (queries, keys))
    angles = _angles(tokens, head)
    return q, k, torch.polar(torch.ones_like(angles), angles)


def llama4_rope(s: Setting) -> Case:
    """Pairs of channels as complex numbers in fp32, times complex frequencies."""
    q, k, frequencies = llama4_rope_inputs(s)
    positions = torch.arange(q.shape[1], device=META).unsqueeze(0)

    def apply() -> tuple[torch.Tensor, ...]:
        pairs = [torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) for t in (q, k)]
        turned = [torch.view_as_real(p * frequencies[:, :, None, :]).flatten(3) for p in pairs]
        return tuple(t.type_as(like) for t, like in zip(turned, (q, k), strict=True))

    return rotated(s, q, k, apply, (frequencies, positions))


def moe_inputs(s: Setting) -> tuple[torch.Tensor, ...]:
    """x [T, H], both projections of E experts, and the router's choices and weights [T, K]."""
    config = {**s.config, s.config["sweep_dim"]: s.x}
    t, e, h, inner, k = (int(config[n]) for n in ("T", "E", "H", "intermediate_dim", "K"))
    x = randn(t, h, dtype=s.dtype, grad=True)
    up_leaf = randn(e, 2 * inner, h, dtype=s.dtype, grad=True)
    up = up_leaf * 0.02
    down_leaf = randn(e, h, inner, dtype=s.dtype, grad=True)
    down = down_leaf * 0.02
    chosen = torch.empty(t, k, dtype=torch.int32, device=META)
    weights = torch.empty(t, k, dtype=s.dtype, device=META).requires_grad_(True)
    return x, up, down, chosen, weights


def fused_moe(s: Setting) -> Case:
    """A loop over experts, every expert with the same share of T·K tokens."""
    x, up, down, chosen, weights = moe_inputs(s)
    (t, k), e = chosen.shape, up.shape[0]
    share = max(1, t * k // e)

    def forward() -> torch.Tensor:
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = torch.zeros(t, k, e, dtype=torch.int64, device=META).permute(2, 1, 0)
        for expert in range(e):
            where = torch.empty(2, share, dtype=torch.int64, device=META)
            place, token = where[0], where[1]
            rows = x[token]
            gate, wide = nn.functional.linear(rows, up[expert]).chunk(2, dim=-1)
            rows = nn.functional.silu(gate) * wide
            rows = nn.functional.linear(rows, down[expert])
            rows = rows * weights[token, place, None]
            final.index_add_(0, token, rows.to(final.dtype))
        del mask
        return final

    return Case(forward, from_noise, (x, up, down, chosen, weights))


class SparseMultiTokenAttention(nn.Module):
    """Causal sparsemax over scores [B, C, L, L], then a K x K convolution."""

    def __init__(self, s: Setting) -> None:
        super().__init__()
        inputs, outputs, k = (s.size(name) for name in ("C_in", "C_out", "K"))
        self.weight = nn.Parameter(randn(outputs, inputs // s.size("groups"), k, k, dtype=s.dtype))
        self.bias = nn.Parameter(randn(outputs, dtype=s.dtype))
        self.groups, self.pad = s.size("groups"), k // 2

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        length = scores.shape[-1]
        ones = torch.ones(length, length, dtype=torch.bool, device=META)
        mask = torch.tril(ones).view(1, 1, length, length)
        low, zero = (torch.empty((), device=META) for _ in range(2))
        z = scores.to(torch.float32).masked_fill(~mask, low)
        ordered, _ = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        steps = torch.arange(1, length + 1, device=META, dtype=z.dtype).view(1, 1, 1, length)
        positive = ordered > -1e8
        support = (1 + steps * ordered > sums) & positive
        count = torch.sum(support, dim=-1, keepdim=True)
        safe = torch.max(count, torch.ones_like(count))
        chosen = torch.gather(sums, dim=-1, index=safe.long() - 1)
        tau = (chosen - 1) / safe.to(z.dtype)
        tau = torch.where(count == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        out = nn.functional.conv2d(
            probabilities, self.weight.to(z.dtype), self.bias.to(z.dtype), padding=self.pad,
            groups=self.groups,
        )  # fmt: skip
        return out.masked_fill(~mask, zero).to(scores.dtype)


def sparse_multi_token_attention(s: Setting) -> Case:
    layers = [SparseMultiTokenAttention(s) for _ in range(2)]
    x = randn(s.size("B"), s.size("C_in"), s.x, s.x, dtype=s.dtype)
    fixed = torch.randn_like(x)
    x.requires_grad_(True)
    return Case(lambda: layers[0](x), from_fixed(fixed), (layers, x))


LAYERS: dict[str, Callable[[Setting], Case]] = {
    "dyt": dyt, "embedding": embedding, "fused_moe": fused_moe, "geglu": gated_mlp,
    "group_norm": group_norm, "layer_norm": layer_norm, "llama4_rope": llama4_rope,
    "megatron_rms_norm": megatron_rms_norm, "poly_norm": poly_norm, "relu_squared": relu_squared,
    "rms_norm": rms_norm, "rope": rope,
    "sparse_multi_token_attention": sparse_multi_token_attention, "swiglu": gated_mlp,
    "tiled_geglu": gated_mlp, "tiled_swiglu": gated_mlp,
}  # fmt: skip
