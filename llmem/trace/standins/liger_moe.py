"""Liger's fused mixture of experts on meta.

From linkedin/Liger-Kernel 0.8.2, src/liger_kernel/ops/fused_moe.py. T tokens, K experts per token,
E experts, H hidden size, F width of an expert. Only what comes out of the up projection is kept
for backward; activations are made again, and rows [T·K, H] live within one pass.
"""

from __future__ import annotations

from typing import Any

import torch

INT32 = torch.int32
TILE_ROWS = 64
"""Rows of one expert that a block takes (``BLOCK_M_TOKEN``)."""
ROUTED = 1024
"""Choices that a block of the router's histogram counts."""

BALANCED = "Liger: every expert gets the same number of tokens (tiles of its fused experts, a few KiB)"


def fused_moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``LigerFusedMoEFunction``: x [T, H], gate_up [E, 2F, H], down [E, H, F] to [T, H].

    ``chosen`` int32 [T, K] and ``weights`` [T, K]: the router's experts and their weights, assumed
    to be balanced (it decides the number of tiles, a few KiB).
    """
    return _FusedMoe.apply(x, gate_up, down, chosen, weights)  # type: ignore[no-any-return, no-untyped-call]


def tiles(rows: int, experts: int) -> int:
    """Blocks of 64 rows, when each expert has the same share of ``rows``.

    >>> tiles(65536, 128)
    1024
    """
    return experts * -(-rows // (experts * TILE_ROWS))


def _route(chosen: torch.Tensor, experts: int) -> list[torch.Tensor]:
    """The router's tables: starts [E + 1], gather, scatter and its inverse [T·K], tiles twice."""
    tokens, per_token = chosen.shape
    rows = tokens * per_token
    options: dict[str, Any] = {"dtype": INT32, "device": chosen.device}
    per_block = max(1, ROUTED // (1 << (per_token - 1).bit_length()))
    counts = torch.empty(experts, -(-tokens // per_block), **options)
    _counts = counts.sum(dim=1, dtype=INT32)  # read by the kernel
    starts, _offsets = (torch.empty(experts + 1, **options) for _ in "ab")
    blocks = [torch.empty(tiles(rows, experts), **options) for _ in "ab"]
    return [starts, *blocks, *(torch.empty(rows, **options) for _ in "abc")]


class _FusedMoe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
        chosen: torch.Tensor, weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        tables = _route(chosen, gate_up.shape[0])
        rows, width = chosen.numel(), gate_up.shape[1] // 2
        before = x.new_empty(rows, 2 * width)
        after = x.new_empty(rows, width)
        each = x.new_empty(rows, x.shape[1])
        flat = weights.flatten().contiguous()
        out = torch.empty_like(x)
        ctx.save_for_backward(x, gate_up, down, before, flat, *tables)
        ctx.choices = chosen.shape
        ctx.mark_non_differentiable(chosen)
        del after, each
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, down, before, flat, *_tables = ctx.saved_tensors
        grads[0].contiguous()
        d_before = torch.empty_like(before)
        _weighted = before.new_empty(before.shape[0], before.shape[1] // 2)
        d_weights = torch.zeros_like(flat)
        d_down = torch.zeros_like(down)
        _d_rows = x.new_empty(flat.shape[0], x.shape[1])
        d_input = torch.zeros_like(x)
        d_gate_up = torch.zeros_like(gate_up)
        del d_before
        return d_input, d_gate_up, d_down, None, d_weights.view(ctx.choices)
