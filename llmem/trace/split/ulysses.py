"""DeepSpeed-Ulysses: all-to-alls change which dimension is split, tokens or heads, around attention.

As ``UlyssesSPAttentionHF`` of deepspeed 0.19 (deepspeed/runtime/sequence_parallel/ulysses_sp.py;
Arctic Long Sequence Training): query, key and value [B, heads, S/N, D] of a rank are copied to
[N, S/N, B, heads/N, D], exchanged, and copied to [B, heads/N, S, D] for the model's own attention;
its output goes the same way back. Fewer key-value heads than ranks are repeated first. The
exchange allocates its output, and backward does the same again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from llmem.errors import LlmemError


def check_heads(config: Any, degree: int, tp: int = 1) -> None:
    """Raises LlmemError if ``degree`` ranks cannot share the attention heads of ``config``.

    Those of one of ``tp`` tensor-parallel ranks, each of which has as many.
    """
    heads = int(config.num_attention_heads) // tp
    if heads % degree:
        raise LlmemError(
            f"--cp-comm ulysses cannot split {heads} attention heads over {degree} ranks; choose a "
            "--cp that divides them, or --cp-comm allgather"
        )
    shared = int(getattr(config, "num_key_value_heads", None) or heads * tp) // tp
    if shared % degree and degree % shared:
        raise LlmemError(
            f"--cp-comm ulysses cannot split {shared} key-value heads over {degree} ranks, nor "
            "repeat them evenly; choose another --cp, or --cp-comm allgather"
        )


class _Exchange(torch.autograd.Function):
    """``deepspeed.sequence.layer._dim_zero_all_to_all``: a new tensor, forward and backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        given = given.contiguous()
        output = torch.empty_like(given)
        dist.all_to_all_single(output, given, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = grads[0].contiguous()
        output = torch.empty_like(gradient)
        dist.all_to_all_single(output, gradient, group=ctx.group)
        return output, None


class UlyssesAttention:
    """The attention function of a model on a rank that holds S/N tokens."""

    def __init__(self, group: Any, degree: int) -> None:
        self._group = group
        self._degree = degree
        self._attention: Any = None

    @contextmanager
    def in_place_of(self, name: str) -> Iterator[None]:
        """Stand for transformers' attention function ``name``, as DeepSpeed registers itself."""
        from transformers import AttentionInterface

        # The table of the class: an entry of ALL_ATTENTION_FUNCTIONS itself would hide it for good.
        self._attention = AttentionInterface()[name]
        AttentionInterface.register(name, self)
        try:
            yield
        finally:
            AttentionInterface.register(name, self._attention)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """query [B, heads, S/N, D], key and value [B, fewer, S/N, D] -> output [B, S/N, heads*D].

        The mask is that of S/N tokens and goes; the model's attention is causal over all S.
        """
        kwargs["position_ids"] = self._all_positions(kwargs.get("position_ids"))
        # One after the other, each in place of what it was copied from, as in DeepSpeed's forward.
        whole_query, whole_key, whole_value = (
            self._heads(tensor.permute(2, 0, 1, 3)) for tensor in (query, key, value)
        )
        whole_query = whole_query.permute(1, 2, 0, 3).contiguous()
        whole_key = whole_key.permute(1, 2, 0, 3).contiguous()
        whole_value = whole_value.permute(1, 2, 0, 3).contiguous()
        groups = getattr(module, "num_key_value_groups", None)
        if groups is None:
            raise LlmemError(
                f"DeepSpeed-Ulysses sets the num_key_value_groups of an attention layer, and "
                f"{type(module).__name__} has none; use --cp-comm allgather"
            )
        module.num_key_value_groups = whole_query.size(1) // whole_key.size(1)
        try:
            out, weights = self._attention(
                module, whole_query, whole_key, whole_value, None, *args, **kwargs
            )
        finally:
            module.num_key_value_groups = groups
        out = out.transpose(0, 1)
        out = out.reshape(*out.shape[:2], -1)
        return self._tokens(out), weights

    def _all_positions(self, mine: torch.Tensor | None) -> torch.Tensor | None:
        """position_ids [B, S/N] of all ranks as [B, S], which some attentions read documents off."""
        if mine is None:
            return None
        parts = [torch.empty_like(mine) for _ in range(self._degree)]
        dist.all_gather(parts, mine, group=self._group)
        return torch.cat(parts, dim=1)

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """[S/N, B, heads, D] -> [S, B, heads/N, D]."""
        tokens, batch, heads, size = tensor.shape
        if heads < self._degree:
            tensor = tensor.repeat_interleave(self._degree // heads, dim=2)
            heads = self._degree
        tensor = tensor.reshape(tokens, batch, self._degree, heads // self._degree, size)
        tensor = tensor.permute(2, 0, 1, 3, 4).contiguous()
        exchanged: torch.Tensor = _Exchange.apply(tensor, self._group)
        return exchanged.reshape(self._degree * tokens, *exchanged.shape[2:])

    def _tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """[S, B, width/N] -> [B, S/N, width]."""
        whole, batch, width = tensor.shape
        cut = tensor.reshape(self._degree, whole // self._degree, batch, width).contiguous()
        back: torch.Tensor = _Exchange.apply(cut, self._group)
        back = back.permute(1, 2, 0, 3)
        back = back.reshape(*back.shape[:2], -1).contiguous()
        return back.transpose(0, 1)
