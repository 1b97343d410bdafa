"""A Llama 3 written as torchtune wrote it in November 2024, with its loss, for its published runs.

After meta-pytorch/torchtune 1814feb17 (BSD-3, the commit that published the table): modules/transformer.py,
attention.py, rms_norm.py, loss/ce_chunked_output_loss.py, models/llama3_1/_position_embeddings.py,
training/_compile.py and _activation_offloading.py. RMSNorm in fp32 by its formula; a table of cosines and
sines in fp32, gathered by position; keys and values repeated to all heads; logits made fp32 whole, or in 8
chunks inside the loss. torchtune compiles layers one by one and of the loss only the chunked one's
cross-entropy (of any other it throws the compiled loss away); a checkpoint lies around a compiled layer.
Attention is FlexAttention, at which compiled layers break: SDPA's flash kernel stands for it, which
saves the same tensors. B batch, T tokens, D features of a head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

CHUNKS = 8
"""``num_output_chunks`` of CEWithChunkedOutputLoss."""
STASHED, SMALLEST = 5, 1024
"""OffloadActivations: tensors that wait for their copy to the host; bytes of those that stay."""


class Size(NamedTuple):
    """A model that was measured."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool


SIZES = {
    "Llama-3.2-3B": Size(128256, 3072, 28, 24, 8, 8192, True),
    "Llama-3.1-70B": Size(128256, 8192, 80, 64, 8, 28672, False),
}
LONGEST = 131072
"""Positions of the rotary table (``max_seq_len`` of both models)."""


class Options(NamedTuple):
    """What the recipe was told."""

    chunked: bool = False
    compiled: bool = False
    checkpointed: bool = False
    offloaded: bool = False


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def turned(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, D] by the cosines and sines of ``positions`` [B, T], in fp32 and back."""
    turns = table[positions]
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    turns = turns.view(-1, pairs.size(1), 1, pairs.size(3), 2)
    cos, sin = turns[..., 0], turns[..., 1]
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(3).type_as(x)


@torch.compiler.disable(recursive=False)
def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.head = size, size.width // size.heads
        self.q_proj = nn.Linear(size.width, size.heads * self.head, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.output_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.size.heads, self.head)
        q = turned(q, table, positions).transpose(1, 2)
        k, v = self.k_proj(x), self.v_proj(x)
        k = turned(k.view(batch, length, -1, self.head), table, positions).transpose(1, 2)
        v = v.view(batch, length, -1, self.head).transpose(1, 2)
        times = self.size.heads // self.size.kv_heads
        shape = (batch, self.size.kv_heads, times, -1, self.head)
        k = k.unsqueeze(2).expand(shape).flatten(1, 2)
        v = v.unsqueeze(2).expand(shape).flatten(1, 2)
        output = attended(q, k, v)
        output = output.transpose(1, 2).contiguous().view(batch, length, -1)
        return self.output_proj(output)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.width, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)
        self.w3 = nn.Linear(size.width, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.w1(x))
        h = h * self.w3(x)
        return self.w2(h)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.sa_norm, self.attn = RMSNorm(size.width), Attention(size)
        self.mlp_norm, self.mlp = RMSNorm(size.width), FeedForward(size)

    def forward(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        h = self.sa_norm(x)
        h = self.attn(h, table, positions) + x
        made = self.mlp(self.mlp_norm(h))
        return h + made  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """torch's wrapper around a layer, which may be compiled."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(
            self.layer, *args, use_reentrant=False, preserve_rng_state=False
        )
        return made


class Head(nn.Linear):
    """The head; its class makes it a unit of FSDP2 where the recipe says so."""


class Offload(saved_tensors_hooks):
    """Saved tensors go to the host on a side stream; the last few are kept until that is done."""

    def __init__(self) -> None:
        self.stash: deque[tuple[object, torch.Tensor]] = deque(maxlen=STASHED)
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < SMALLEST or isinstance(tensor, (nn.Parameter, nn.Buffer)):
            return tensor
        key = (tensor.shape, tensor.dtype, object())
        self.stash.append((key, tensor))
        return key

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        kept = next((tensor for key, tensor in self.stash if key is packed), None)
        self.stash.clear()
        return torch.empty(packed[0], dtype=packed[1], device="meta") if kept is None else kept


class Transformer(nn.Module):
    """The model in bf16 with its loss."""

    config: SimpleNamespace

    def __init__(self, size: Size, options: Options) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=size.vocabulary, get_text_config=lambda: self.config
        )
        self._no_split_modules = ["Layer"]
        self.options = options
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.width)
        layers = (Layer(size) for _ in range(size.layers))
        self.layers = nn.ModuleList(Checkpointed(x) if options.checkpointed else x for x in layers)
        self.norm = RMSNorm(size.width)
        self.output = Head(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.output.weight = self.tok_embeddings.weight
        self.to(torch.bfloat16)
        shape = (LONGEST, size.width // size.heads // 2, 2)
        self.register_buffer("table", torch.empty(shape, dtype=torch.float32))
        self.register_buffer("ignored", torch.empty(1, 1, dtype=torch.int64))
        self.entropy: Callable[..., torch.Tensor] = entropy
        if options.compiled:
            self.entropy = torch.compile(entropy)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        ignored = self.ignored.expand(len(labels), 1)
        with Offload() if self.options.offloaded else nullcontext():
            logits = self.logits(input_ids)
        labels = torch.hstack((labels[..., 1:], ignored))
        loss = self.chunked(logits, labels) if self.options.chunked else whole(logits[0], labels)
        return CausalLMOutput(loss=loss)  # type: ignore[arg-type]  # a mapping, in which FSDP2 looks

    def logits(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        positions = torch.empty_like(tokens)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.table, positions)
        h = self.norm(h)
        with _kept() if self.options.offloaded else nullcontext():
            if self.options.chunked:
                return [self.output(part) for part in h.chunk(CHUNKS, dim=1)]
            return [self.output(h).float()]

    def chunked(self, logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        count = (labels != -100).sum()
        targets = [part.reshape(-1) for part in labels.chunk(CHUNKS, dim=1)]
        rows = [part.reshape(-1, part.size(-1)) for part in logits]
        total = torch.zeros((), device=labels.device)
        for row, target in zip(rows, targets, strict=True):
            total = total + self.entropy(row, target)
        return total / count


def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def whole(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


def _kept() -> saved_tensors_hooks:
    """What the head saves stays on the device (torchtune's NoOpManager)."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def builder(name: str, options: Options) -> Callable[[], nn.Module]:
    """What RunSpec's ``model`` may be: a callable that returns the model."""

    def torchtune() -> nn.Module:
        return Transformer(SIZES[name], options)

    return torchtune
