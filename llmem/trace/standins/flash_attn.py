"""flash-attn 2, as transformers calls it under ``flash_attention_2``.

Three paths (transformers/modeling_flash_attention_utils.py, ``_flash_attention_forward``): a batch
whose mask holds padding is unpadded by indexing, goes through ``flash_attn_varlen_func`` and is
padded again; a packed row goes through the same function without copies; else
``flash_attn_func``. Outputs, saved tensors and accumulators (Dao-AILab/flash-attention,
csrc/flash_attn/flash_api.cpp: ``mha_fwd``, ``mha_varlen_fwd``, ``mha_bwd``, ``mha_varlen_bwd``;
flash_attn_interface.py) are those of torch's own copy of it, the aten ops
``_flash_attention_forward`` and ``_flash_attention_backward``, which have kernels on meta; their
scratch is in ``llmem.gpu.scratch_attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from llmem.errors import LlmemError

aten = torch.ops.aten
NAME = "flash_attention_2"


@contextmanager
def active() -> Iterator[None]:
    """``flash_attention_2`` is registered in ``transformers.AttentionInterface`` for a while."""
    from transformers import AttentionInterface

    table: dict[str, Any] = AttentionInterface._global_mapping
    before = table.get(NAME)
    AttentionInterface.register(NAME, attention)
    try:
        yield
    finally:
        if before is None:
            del table[NAME]
        else:
            table[NAME] = before


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    query [B, H, M, K], key [B, G, N, K] and value [B, G, N, V] to an output [B, M, H, V].
    ``attention_mask`` [B, N] is given where there is padding; how much of it is unknown, so that
    the unpadded tensors are taken to be as long as the padded ones. fp32 inputs are cast to the
    dtype of the weights or of autocast, as ``integrations/flash_attention.py`` does.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    head, value_head = query.shape[-1], value.shape[-1]
    if value_head != head:
        value = pad(value, [0, head - value_head])
    query, key, value = (_to_half(t, module) for t in (query, key, value))
    if attention_mask is not None and query.shape[1] == key.shape[1]:
        out = _unpadded(query, key, value, attention_mask, dropout, causal, scaling)
    elif cu_seq_lens_q is not None:
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (query, key, value))
        longest = int(max_length_q or query.shape[1])
        packed = _kernel(
            q, k, v, dropout, causal, scaling, starts=cu_seq_lens_q, longest=longest
        )
        out = packed.view(query.shape[0], -1, *packed.shape[1:])
    else:
        out = _kernel(query, key, value, dropout, causal, scaling)
    return (out[..., :value_head] if value_head != head else out), None


def _to_half(tensor: torch.Tensor, module: Any) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    from transformers.integrations.flash_attention import get_target_dtype

    try:
        target = get_target_dtype(tensor, module)
    except StopIteration:  # it asks a linear layer, and GPT-2 has none
        target = torch.float32
    if target == torch.float32:
        raise LlmemError(
            "flash-attn takes fp16 and bf16 alone, and this attention would run in fp32; add --bf16, "
            "--fp16 or --param-dtype bf16"
        )
    return tensor.to(target)


def _unpadded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
    dropout: float, causal: bool, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """``_upad_input``, the packed kernel, ``pad_input``: every copy that these make."""
    batch, tokens = query.shape[:2]
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    kept = torch.empty(mask.numel(), dtype=torch.int64, device=mask.device)  # nonzero
    starts = pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    key, value, query = (t.reshape(-1, *t.shape[2:])[kept] for t in (key, value, query))
    out = _kernel(query, key, value, dropout, causal, scaling, starts=starts, longest=tokens)
    padded = torch.zeros(batch * tokens, *out.shape[1:], dtype=out.dtype, device=out.device)
    padded[kept] = out
    return padded.view(batch, tokens, *out.shape[1:])


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool,
    scaling: float | None, *, starts: torch.Tensor | None = None, longest: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Dense [B, M, H, K] without ``starts`` [B+1], packed [tokens, H, K] with it.

    Head sizes are padded to a multiple of 8 and the output cut back (``FlashAttnFunc.forward``).
    """
    head = query.shape[-1]
    if head % 8:
        scaling = head**-0.5 if scaling is None else scaling
        query, key, value = (pad(t, [0, 8 - head % 8]) for t in (query, key, value))
    length_q = query.shape[1] if starts is None else longest
    length_k = key.shape[1] if starts is None else longest
    out = aten._flash_attention_forward(
        query, key, value, starts, starts, length_q, length_k, dropout, causal, False,
        scale=scaling,
    )[0]  # fmt: skip
    return out[..., :head] if head % 8 else out  # type: ignore[no-any-return]
