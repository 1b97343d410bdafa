"""Fused LoRA products on 4-bit weights on meta, as fms-acceleration has them from unsloth.

Read in foundation-model-stack/fms-acceleration 733992a, plugins/fused-ops-and-kernels/src/
fms_acceleration_foak/fused_ops/unsloth_lora: bnb/fast_lora.py (``LoRA_QKV``, ``LoRA_W``) and
utils.py (``matmul_lora``, ``fast_dequantize``). One autograd node takes the place of a layer, its
adapter and its dropout; backward works by hand and writes over what was saved. ``LoRA_MLP`` is left
out: its backward multiplies by a mask of another shape, so it cannot have run. T tokens, K input
and N output features, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmem.trace.standins.bitsandbytes_ops import QuantState, dequantize_4bit

_forward: Callable[..., Any] = torch.amp.custom_fwd(device_type="cuda")  # type: ignore[attr-defined]
_backward: Callable[..., Any] = torch.amp.custom_bwd(device_type="cuda")  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Layer:
    """A linear layer with an adapter: packed weights, their statistics, A [r, K], B [N, r]."""

    packed: torch.Tensor
    state: QuantState
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    dropout: torch.nn.Module


def layer_of(module: Any) -> Layer:
    """What is fused of a peft layer with one active adapter."""
    base, adapter = module.base_layer, module.active_adapters[0]
    return Layer(
        base.weight, base.quant_state, module.lora_A[adapter].weight,
        module.lora_B[adapter].weight, module.scaling[adapter], module.lora_dropout[adapter],
    )  # fmt: skip


def products(x: torch.Tensor, layers: Sequence[Layer]) -> tuple[torch.Tensor, ...]:
    """x [B, S, K] through each layer: ``LoRA_QKV`` of three, ``LoRA_W`` of one."""
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    out = _Products.apply(x, layers, *factors)  # type: ignore[no-untyped-call]
    return out  # type: ignore[no-any-return]


class _Products(torch.autograd.Function):
    """Saves x and what each dropout left of it. Of several, the gradient of x is written over x."""

    @staticmethod
    @_forward
    def forward(
        ctx: Any, x: torch.Tensor, layers: Sequence[Layer], *factors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = [_product(x, layer) for layer in layers]
        ctx.layers = layers
        ctx.save_for_backward(x, *factors, *(dropped for _, dropped in made))
        return tuple(out for out, _ in made)

    @staticmethod
    @_backward
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layers: Sequence[Layer] = ctx.layers
        x, *others = ctx.saved_tensors
        dropped = others[2 * len(layers) :]
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        flat = x.view(-1, x.shape[-1])
        pairs = zip(rows, dropped, layers, strict=True)
        d_factors = [d for grad, kept, layer in pairs for d in _of_factors(grad, kept, layer)]
        d_x = flat if len(layers) > 1 else None
        for number, (grad, kept, layer) in enumerate(zip(rows, dropped, layers, strict=True)):
            weight = _weight(layer)
            if d_x is None:
                d_x = grad @ weight.t()
            elif number == 0:
                torch.matmul(grad, weight.t(), out=d_x)
            else:
                d_x += grad @ weight.t()
            del weight
            d_x += _of_dropped(grad, kept, layer)
        assert d_x is not None
        return d_x.view(x.shape), None, *d_factors


def _weight(layer: Layer) -> torch.Tensor:
    """The dequantised weights [K, N]."""
    return dequantize_4bit(layer.packed, layer.state).t()


def _product(x: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """``matmul_lora``: x [B, S, K] to [B, S, N], and what dropout left of x, [T, K]."""
    rows = x.view(-1, x.shape[-1])
    weight = _weight(layer)
    out = torch.matmul(rows, weight)
    del weight
    dropped = layer.dropout(rows)
    a, b = layer.a.t(), layer.b.t()
    out += (dropped @ a.to(x.dtype)) @ (layer.scale * b.to(x.dtype))
    return out.view(*x.shape[:-1], -1), dropped


def _of_factors(
    grad: torch.Tensor, dropped: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A [r, K] and B [N, r] by that of the output, [T, N]."""
    a, b = layer.a.t(), layer.b.t()
    d_a = dropped.t() @ (grad @ b.t())
    d_b = (a.t() @ dropped.t()) @ grad
    d_a *= layer.scale
    d_b *= layer.scale
    return d_a.t(), d_b.t()


def _of_dropped(grad: torch.Tensor, dropped: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The adapter's part of the gradient of x, [T, K]: zero where dropout was."""
    a, b = layer.a.t(), layer.b.t()
    dtype = dropped.dtype
    kept = dropped != 0
    return kept * (grad @ b.to(dtype).t() @ (layer.scale * a.to(dtype).t()))
