"""Megatron-LM's GPT of July 2023 (megatron/model at b387fadfa7), for its published runs.

``transformer_impl local`` without flash attention: [S, B, H] throughout, baddbmm into the global memory
buffer's shape, the fused causal softmax (whose backward writes over its input), bias-GeLU and
bias-dropout-add as one kernel each, weight gradients of linear layers added straight to the buffer of
gradients (``gradient_accumulation_fusion``), a loss on fp32 logits of this rank's words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from llmem.trace.split.megatron_functions import (
    MAKE_VOCAB_SIZE_DIVISIBLE_BY,
    Linear,
    Ranks,
    ReduceOutput,
    Scatter,
    VocabParallelCrossEntropy,
    embed,
)


class Size(NamedTuple):
    """Arguments of a GPT; ``words`` are those of the tokenizer, before padding."""

    layers: int
    hidden: int
    heads: int
    words: int
    positions: int


GPT_345M = Size(layers=24, hidden=1024, heads=16, words=50257, positions=1024)
DROPOUT = 0.1
"""``hidden_dropout`` and ``attention_dropout``."""


class BiasGelu(torch.autograd.Function):
    """``GeLUFunction``: saves the input and the bias, computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        of_input = torch.empty_like(gradient)
        return of_input, of_input.sum(dim=(0, 1))


class BiasDropoutAdd(torch.autograd.Function):
    """x + bias dropped out, plus residual; saved is the mask, a byte per element."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        of_input = torch.empty_like(gradient)
        return of_input, of_input.sum(dim=(0, 1)), gradient


class CausalSoftmax(torch.autograd.Function):
    """``ScaledUpperTriangMaskedSoftmax``: saves its output; backward is in place."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.empty_like(scores)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient


class Column(nn.Module):
    """``ColumnParallelLinear``; with ``skip_bias_add`` whoever comes next adds the bias."""

    def __init__(self, inputs: int, outputs: int, *, skip_bias_add: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.skip_bias_add = skip_bias_add

    def forward(self, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        bias = None if self.skip_bias_add else self.bias
        return Linear.apply(x, self.weight, bias, ranks, True)  # type: ignore[no-any-return]


class Row(nn.Module):
    """``RowParallelLinear`` with ``skip_bias_add``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        output = Linear.apply(x, self.weight, None, ranks, False)
        return output if ranks.degree == 1 else ReduceOutput.apply(output, ranks)


class Layer(nn.Module):
    """A transformer layer: attention and MLP, each behind a norm; x [S (or S/tp), B, H]."""

    def __init__(self, size: Size, degree: int) -> None:
        super().__init__()
        hidden = size.hidden
        self.head_width = hidden // size.heads
        self.input_layernorm = nn.LayerNorm(hidden)
        self.query_key_value = Column(hidden, 3 * hidden // degree)
        self.dense = Row(hidden // degree, hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.dense_h_to_4h = Column(hidden, 4 * hidden // degree, skip_bias_add=True)
        self.dense_4h_to_h = Row(4 * hidden // degree, hidden)

    def forward(self, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        attended = self.attention(self.input_layernorm(x), ranks)
        x = BiasDropoutAdd.apply(self.dense(attended, ranks), self.dense.bias, x)
        del attended
        up = self.dense_h_to_4h(self.post_attention_layernorm(x), ranks)
        up = BiasGelu.apply(up, self.dense_h_to_4h.bias)
        down = self.dense_4h_to_h(up, ranks)
        return BiasDropoutAdd.apply(down, self.dense_4h_to_h.bias, x)  # type: ignore[no-any-return]

    def attention(self, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        mixed = self.query_key_value(x, ranks)
        tokens, batch, _ = mixed.shape
        mixed = mixed.view(tokens, batch, -1, 3 * self.head_width)
        q, k, v = (
            part.view(tokens, -1, self.head_width).transpose(0, 1)
            for part in mixed.split(self.head_width, dim=-1)
        )
        rows = q.shape[0]
        buffer = ranks.from_buffer(q, rows * tokens * tokens).view(rows, tokens, tokens)
        scores = torch.baddbmm(buffer, q, k.transpose(1, 2), beta=0.0)
        probabilities = CausalSoftmax.apply(scores)
        del scores
        probabilities = F.dropout(probabilities, DROPOUT)
        context = torch.bmm(probabilities, v).view(batch, -1, tokens, self.head_width)
        return context.permute(2, 0, 1, 3).contiguous().view(tokens, batch, -1)


class GPT(nn.Module):
    """The model with its loss, in ``dtype``, whole or as one of the ranks that split it."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype
        self.config: Any = SimpleNamespace(
            vocab_size=size.words, model_type="megatron", get_text_config=lambda: self.config
        )
        self._no_split_modules = ["Layer"]
        self._build(_as_in_2023(1, 0, "", sequence=False))

    def over_ranks(self, ranks: Ranks) -> str:
        """Become the part of one of ``ranks``; returns a sentence about it."""
        with torch.device("meta"):
            self._build(_as_in_2023(ranks.degree, ranks.rank, ranks.group, ranks.sequence))
        parallel = "with" if ranks.sequence else "without"
        return f"Megatron-LM's GPT on {ranks.degree} ranks, {parallel} sequence parallelism"

    def _build(self, ranks: Ranks) -> None:
        size = self.size
        self.ranks = ranks
        multiple = MAKE_VOCAB_SIZE_DIVISIBLE_BY * ranks.degree
        padded = -(-size.words // multiple) * multiple
        self.word_embeddings = nn.Embedding(padded // ranks.degree, size.hidden)
        self.position_embeddings = nn.Embedding(size.positions, size.hidden)
        self.layers = nn.ModuleList(Layer(size, ranks.degree) for _ in range(size.layers))
        self.final_layernorm = nn.LayerNorm(size.hidden)
        self.to(self.dtype)

    def tie_weights(self) -> None:
        """The head has no weight of its own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        tokens = input_ids.shape[1]
        mask = torch.tril(torch.ones((1, tokens, tokens), device=input_ids.device)) < 0.5
        x = self._embedded(input_ids)
        for layer in self.layers:
            x = layer(x, self.ranks)
        x = self.final_layernorm(x)
        weight = self.word_embeddings.weight
        logits: torch.Tensor = Linear.apply(x, weight, None, self.ranks, True)
        target = labels.transpose(0, 1).contiguous()
        losses: torch.Tensor = VocabParallelCrossEntropy.apply(logits.float(), target, self.ranks)
        del mask
        return SimpleNamespace(loss=losses.transpose(0, 1).contiguous().view(-1).mean())

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [S (or S/tp), B, H]."""
        ranks = self.ranks
        words = embed(ids, self.word_embeddings.weight, ranks)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand_as(ids)
        x = ranks.reduce_(words) if ranks.degree > 1 else words
        x = (x + self.position_embeddings(positions)).transpose(0, 1).contiguous()
        if ranks.sequence:
            x = Scatter.apply(x, ranks)
        return F.dropout(x, DROPOUT)


def _as_in_2023(degree: int, rank: int, group: str, sequence: bool) -> Ranks:
    return Ranks(
        degree, rank, group, sequence, dim=0, fused=True, subtracts_in_place=False
    )


def builder(size: Size, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """What RunSpec's ``model`` may be: a callable that returns the model."""
    return partial(GPT, size, dtype)
