"""A transformer decoder written by hand, as its published CUDA allocator histories were made with.

24 pre-norm blocks, d_model 1024, 16 heads, d_ff 4096, vocabulary 10,000, untied head, no biases,
no dropout: 423.2 M fp32 parameters. Every formula (attention, softmax, RMSNorm, cross-entropy,
AdamW) is written out in elementary ops, so that a history shows each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder; ``context`` is the sequence length in tokens."""

    context: int
    layers: int = 24
    d_model: int = 1024
    heads: int = 16
    d_ff: int = 4096
    vocabulary: int = 10_000
    batch: int = 4

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads


class Linear(nn.Module):
    """y[..., out] = sum over in of weight[out, in] x[..., in]."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,oi->bto", x, self.weight)


class Embedding(nn.Module):
    """Rows of weight[vocabulary, d_model] by plain indexing."""

    def __init__(self, vocabulary: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, d_model))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids, :]


class RMSNorm(nn.Module):
    """x / sqrt(mean of squares + eps), times a weight; computed in fp32."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * rms
        return (self.weight * x).to(dtype)


class RotaryEmbedding(nn.Module):
    """Rotates pairs of channels; ``cache`` is [2, context, d_head / 2]: cosines and sines."""

    cache: Tensor

    def __init__(self, context: int, d_head: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.empty(2, context, d_head // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
        cos, sin = self.cache
        turned1 = cos * x1 - sin * x2
        turned2 = sin * x1 + cos * x2
        return torch.cat((turned1, turned2), dim=-1)


def softmax(x: Tensor, dim: int) -> Tensor:
    shifted = x - torch.max(x, dim=dim, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=dim, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / sqrt(q.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores, dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class CausalSelfAttention(nn.Module):
    def __init__(self, shape: Shape, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj = Linear(shape.d_model, shape.d_model)
        self.k_proj = Linear(shape.d_model, shape.d_model)
        self.v_proj = Linear(shape.d_model, shape.d_model)
        self.output_proj = Linear(shape.d_model, shape.d_model)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d_model = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        at = torch.arange(length, device=x.device)
        mask = at.view(1, 1, -1, 1) >= at.view(1, 1, 1, -1)
        out = attend(q, k, v, mask)
        out = out.transpose(1, 2).reshape(batch, length, d_model)
        return self.output_proj(out)  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, shape: Shape, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(shape, rotary)
        self.ffn = SwiGLU(shape.d_model, shape.d_ff)
        self.ln1 = RMSNorm(shape.d_model)
        self.ln2 = RMSNorm(shape.d_model)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.ln1(x))
        middle = x + attended
        fed = self.ffn(self.ln2(middle))
        return middle + fed  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """ids [batch, context] to logits [batch, context, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embeddings = Embedding(shape.vocabulary, shape.d_model)
        rotary = RotaryEmbedding(shape.context, shape.d_head)
        self.layers = nn.ModuleList(Block(shape, rotary) for _ in range(shape.layers))
        self.ln_final = RMSNorm(shape.d_model)
        self.lm_head = Linear(shape.d_model, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = embedded = self.token_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.ln_final(x)
        logits: Tensor = self.lm_head(x)
        del x, embedded  # the inference histories hold the embeddings until here
        return logits


def log_softmax(x: Tensor, dim: int) -> Tensor:
    top = torch.max(x, dim=dim, keepdim=True)[0]
    x = x - top
    return x - torch.log(torch.sum(torch.exp(x), dim=dim, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits, dim=-1)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class HandAdamW(torch.optim.Optimizer):
    """AdamW one parameter at a time; new moments are fresh tensors that replace the old ones."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = p.grad.data
                p.data -= lr * group["weight_decay"] * p.data
                m = state.get("m", torch.zeros_like(p))
                v = state.get("v", torch.zeros_like(p))
                m_new = beta1 * m + (1 - beta1) * grad
                v_new = beta2 * v + (1 - beta2) * torch.square(grad)
                p.data -= lr * m_new / (torch.sqrt(v_new) + group["eps"])
                state["m"] = m_new
                state["v"] = v_new


Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass
class CourseStep:
    """One training step, callable any number of times: zero_grad, forward, loss, backward, step."""

    model: Decoder
    optimizer: HandAdamW
    ids: Tensor
    targets: Tensor
    autocast: Autocast = nullcontext
    """Context of forward and loss."""

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.model(self.ids)
            loss = cross_entropy(logits, self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


@dataclass
class CourseInference:
    """One forward pass under ``inference_mode``."""

    model: Decoder
    ids: Tensor
    autocast: Autocast = nullcontext

    def __call__(self) -> None:
        with torch.inference_mode(), self.autocast():
            self.model(self.ids)


PREALLOCATED = 5
"""How many batches of ids (and of targets) were put on the device beforehand, as one tensor."""


def training(shape: Shape, device: str = "meta", autocast: Autocast = nullcontext) -> CourseStep:
    with torch.device(device):
        model = Decoder(shape)
        ids, targets = (
            torch.empty((PREALLOCATED, shape.batch, shape.context), dtype=torch.int64)
            for _ in range(2)
        )
    return CourseStep(model, HandAdamW(model.parameters()), ids[0], targets[0], autocast)


def inference(
    shape: Shape, device: str = "meta", autocast: Autocast = nullcontext
) -> CourseInference:
    with torch.device(device):
        model = Decoder(shape)
        ids = torch.empty((PREALLOCATED, shape.batch, shape.context), dtype=torch.int64)
    return CourseInference(model, ids[0], autocast)
