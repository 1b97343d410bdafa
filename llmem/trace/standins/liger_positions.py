"""Liger's other rotary embeddings on meta: Llama 4's complex one and Qwen2-VL's in sections.

From linkedin/Liger-Kernel 0.8.2, src/liger_kernel/ops/: llama4_rope.py, qwen2vl_mrope.py. The
cuTile ones of the same names allocate the same. The common RoPE is ``liger_ops.rope``.
"""

from __future__ import annotations

from typing import Any

import torch

from llmem.trace.standins import liger_ops


def llama4_rope(
    q: torch.Tensor, k: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``LigerLlama4RopeFunction``: q [B, S, heads, D] and k are turned in place.

    ``frequencies`` [B, S, D/2], complex, are kept. What is not contiguous is copied.
    """
    return _Llama4Rope.apply(q, k, frequencies)  # type: ignore[no-any-return, no-untyped-call]


class _Llama4Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, frequencies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(frequencies.detach())
        return _turned(q, k.to(q.dtype), frequencies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (frequencies,) = ctx.saved_tensors
        return *_turned(grads[0], grads[1], frequencies), None


def _turned(
    q: torch.Tensor, k: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, where they lie; transformers' frequencies are a transposed product, so a copy."""
    turned = (q.contiguous().view_as(q), k.contiguous().view_as(k))
    _read = torch.view_as_real(frequencies).contiguous()
    return turned


def qwen2vl_mrope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``LigerQwen2VLMRopeFunction``: as RoPE, with cos and sin [3, B, S, D]: time, height, width."""
    return liger_ops.rope(q, k, cos, sin)
