"""A LLaMA written as torchtitan wrote it in 2024, for its published FSDP2 runs.

After torchtitan/models/llama/model.py at 83c879f18 (March), 9dc418a8b (July) and 9dec370 (December
2024), which agree in what memory is concerned: rotation in fp32 complex numbers, RMSNorm by its formula,
keys and values repeated before attention, blocks wrapped for checkpointing one by one. Logits are
made fp32 at the end of the model, by December in the loss, whose caller has those in bf16 until it returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten


class Size(NamedTuple):
    """The flavours that were measured."""

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int


SIZES = {
    "Llama-2-7B": Size(32000, 4096, 32, 32, 32, 11008),
    "Llama-3-8B": Size(128256, 4096, 32, 32, 8, 14336),
}


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def normed(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

        output = normed(x.float()).type_as(x)
        return output * self.weight


def rotated(
    q: torch.Tensor, k: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q_complex = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_complex = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    turn = frequencies[: q.shape[1]].view(1, q.shape[1], 1, -1)
    q_out = torch.view_as_real(q_complex * turn).flatten(3)
    k_out = torch.view_as_real(k_complex * turn).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    if times == 1:
        return x
    batch, length, heads, size = x.shape
    wide = x.unsqueeze(3).expand(batch, length, heads, times, size)
    return wide.reshape(batch, length, heads * times, size)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.head = size.dim // size.heads
        self.wq = nn.Linear(size.dim, size.heads * self.head, bias=False)
        self.wk = nn.Linear(size.dim, size.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(size.dim, size.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(size.heads * self.head, size.dim, bias=False)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(batch, length, self.size.heads, self.head)
        xk = xk.view(batch, length, self.size.kv_heads, self.head)
        xv = xv.view(batch, length, self.size.kv_heads, self.head)
        xq, xk = rotated(xq, xk, frequencies)
        times = self.size.heads // self.size.kv_heads
        keys, values = repeated(xk, times), repeated(xv, times)
        xq, xk, xv = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        output = output.view(batch, length, -1)
        return self.wo(output)


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.dim, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)
        self.w3 = nn.Linear(size.dim, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.feed_forward = FeedForward(size)
        self.attention_norm = RMSNorm(size.dim)
        self.ffn_norm = RMSNorm(size.dim)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), frequencies)
        return h + self.feed_forward(self.ffn_norm(h))


SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}


def selective() -> Any:
    """Keep what matrix products (every second one) and attention make, recompute the rest."""
    seen: dict[bool, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is aten.mm.default:
            seen[ctx.is_recompute] += 1
        second = func is aten.mm.default and seen[ctx.is_recompute] % 2 == 0
        keep = func in SAVED and not second
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Checkpointed(nn.Module):
    """The wrapper around a block that FSDP2 takes for its unit."""

    def __init__(self, block: nn.Module, mode: str) -> None:
        super().__init__()
        self.block = block
        extra = {"context_fn": selective} if mode == "selective" else {}
        self.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **extra)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return self.run(self.block, x, frequencies)


class Transformer(nn.Module):
    """The model with its loss; ``mode`` is '', 'full' or 'selective' (activation checkpointing).

    ``december``: as of 9dec370, with logits made fp32 in the loss and no spare rotary frequencies.
    """

    def __init__(self, size: Size, length: int, mode: str, *, december: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=size.vocabulary, get_text_config=lambda: self.config
        )
        self._no_split_modules = ["Checkpointed" if mode else "TransformerBlock"]
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.dim)
        self.december = december
        shape = (length if december else 2 * length, size.dim // size.heads // 2)
        self.register_buffer("freqs_cis", torch.empty(shape, dtype=torch.complex64))
        blocks = (TransformerBlock(size) for _ in range(size.layers))
        self.layers = nn.ModuleList(Checkpointed(b, mode) if mode else b for b in blocks)
        self.norm = RMSNorm(size.dim)
        self.output = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logits = self.logits(input_ids)
        loss = loss_of(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis)
        h = self.norm(h)
        made = self.output(h)
        return made if self.december else made.float()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def builder(
    name: str, length: int, mode: str, *, december: bool = False
) -> Callable[[], nn.Module]:
    """What RunSpec's ``model`` may be: a callable that returns the model, in fp32."""

    def torchtitan_llama() -> nn.Module:
        return Transformer(SIZES[name], length, mode, december=december)

    return torchtitan_llama
