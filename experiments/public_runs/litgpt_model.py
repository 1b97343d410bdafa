"""A GPT written as litgpt wrote it in October 2023, with its LoRA, for its published runs.

After Lightning-AI/litgpt 8641822: lit_gpt/model.py, lora.py, utils.py and finetune/lora.py, and
rmsnorm.py as of 6178c7cc (in fp32), which came before the table did; torch 2.1 and
``precision="bf16-true"``. One linear for query, key and value, LoRA on query and value whose update
is padded with zeros for the key; rotary tables in fp32 (they are made anew for the longest sample);
head and loss in chunks of 128 tokens, logits made fp32 on the way out of Fabric's wrapper. B batch,
T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

CHUNK = 128
"""Tokens of the head and of the loss at a time."""
RANK, DROPOUT = 8, 0.05


class Size(NamedTuple):
    """A model that was measured; ``rotary`` features of each head are turned."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    rotary: int
    hidden: int
    llama: bool = False
    """RMSNorm, a gated MLP, no biases; blocks one after the other."""
    shared_norm: bool = False
    head_bias: bool = False
    gelu: str = "none"


SIZES = {
    "phi-1.5 1.3 B": Size(
        51200, 2048, 24, 32, 32, 8192, shared_norm=True, head_bias=True, gelu="tanh"
    ),
    "StableLM Alpha 3 B": Size(50688, 4096, 16, 32, 32, 16384),
    "Llama 2 7 B": Size(32000, 4096, 32, 32, 128, 11008, llama=True),
    "Llama 2 13 B": Size(32000, 5120, 40, 40, 128, 13824, llama=True),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = x.dtype, x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(given)


class QKV(nn.Module):
    """x [B, T, C] to query, key and value [B, T, 3C]; LoRA's part for the key is zeros."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.linear = nn.Linear(width, 3 * width, bias=not size.llama)
        self.dropout = nn.Dropout(DROPOUT)
        self.lora_A = nn.Parameter(torch.empty(2 * RANK, width))
        self.lora_B = nn.Parameter(torch.empty(2 * width, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        after_a = F.linear(self.dropout(x), self.lora_A)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2)
        update: torch.Tensor = self._padded(after_b.transpose(-2, -1)) * 2.0
        return made + update  # type: ignore[no-any-return]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        columns = torch.empty(x.shape[-1], dtype=torch.int64, device=x.device)
        whole = x.new_zeros((*x.shape[:-1], self.linear.out_features)).flatten(0, 1)
        whole = whole.index_copy(1, columns, x.reshape(-1, x.shape[-1]))
        return whole.view((*x.shape[:-1], self.linear.out_features)).transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attn = QKV(size)
        self.proj = nn.Linear(size.width, size.width, bias=not size.llama)
        self.size = size

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads, n = self.size.heads, self.size.rotary
        qkv = self.attn(x).view(batch, tokens, heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, heads, tokens, -1) for part in qkv.split(1, dim=2))
        q_turned, k_turned = turned(q[..., :n], cos, sin), turned(k[..., :n], cos, sin)
        q = torch.cat((q_turned, q[..., n:]), dim=-1)
        k = torch.cat((k_turned, k[..., n:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, n] by cos and sin [T, n] in fp32, back in x's dtype."""
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (other * sin)).type_as(x)


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(size.width, size.hidden, bias=not size.llama)
        self.fc_2 = nn.Linear(size.width, size.hidden, bias=False) if size.llama else None
        self.proj = nn.Linear(size.hidden, size.width, bias=not size.llama)
        self.gelu = size.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.fc_1(x)
        if self.fc_2 is None:
            first = F.gelu(first, approximate=self.gelu)
            return self.proj(first)  # type: ignore[no-any-return]
        second = self.fc_2(x)
        x = F.silu(first) * second
        return self.proj(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        norm = RMSNorm if size.llama else nn.LayerNorm
        self.norm_1 = norm(size.width)
        self.attn = Attention(size)
        self.norm_2 = None if size.shared_norm else norm(size.width)
        self.mlp = MLP(size)
        self.llama = size.llama

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if self.llama:
            assert self.norm_2 is not None
            x = x + h
            return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]
        n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
        return x + h + self.mlp(n_2)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The model in bf16 with its loss, only LoRA trained."""

    config: SimpleNamespace

    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=size.vocabulary, get_text_config=lambda: self.config
        )
        self._no_split_modules = ["Block"]
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=size.head_bias)
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = RMSNorm(size.width) if size.llama else nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)
        self.to(torch.bfloat16)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, size.rotary, dtype=torch.float32))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logits = [chunk.float() for chunk in self._chunks(input_ids)]
        logits[-1] = logits[-1][..., :-1, :]
        targets = labels[..., 1:].split(CHUNK, dim=1)
        rows = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        losses = [
            F.cross_entropy(row, target.reshape(-1), ignore_index=-1, reduction="none")
            for row, target in zip(rows, targets, strict=True)
        ]
        return SimpleNamespace(loss=torch.cat(losses).mean(), logits=logits)

    def _chunks(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        x = self.ln_f(x)
        return [self.lm_head(part) for part in x.split(CHUNK, dim=1)]


def builder(name: str, length: int) -> Callable[[], nn.Module]:
    """What RunSpec's ``model`` may be: a callable that returns the model."""

    def litgpt() -> nn.Module:
        return GPT(SIZES[name], length)

    return litgpt
