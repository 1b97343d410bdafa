"""DeepSeek-V3 written as torchtitan wrote it in the summer of 2025, for its published 16B runs.

After torchtitan/models/deepseek_v3/model/model.py, models/moe.py and distributed/expert_parallel.py at
f738a03bf (August 2025): latent attention with rotation in fp32 complex numbers, a dense first block, then
experts (three weights each of shape [experts, out, in], multiplied by grouped_mm on rows padded to
multiples of 8 per expert) beside shared ones, routing weights applied in fp32 after the experts, and the
cross-entropy compiled: of the logits it keeps bf16 ones and one fp32 row sum, and makes their gradient.

How many tokens a rank receives is not known on meta: as many as it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments.public_runs.titan_llama import Checkpointed

DIM, LAYERS, DENSE_LAYERS, HEADS = 2048, 27, 1, 16
HIDDEN, EXPERT_HIDDEN, EXPERTS, SHARED, PICKED = 10944, 1408, 64, 2, 6
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
ALIGN = 8
"""``TOKEN_GROUP_ALIGN_SIZE_M``: rows that each expert's group is padded to."""


def rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    turn = frequencies[: x.size(1)].view(1, x.size(1), 1, x.size(-1))
    turned = torch.view_as_real(x * turn).flatten(3)
    return turned.to(dtype)


class Attention(nn.Module):
    """Multi-head latent attention without a latent for queries."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * (NOPE + ROPE), bias=False)
        self.wkv_a = nn.Linear(DIM, LATENT + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(LATENT)
        self.wkv_b = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.wo = nn.Linear(HEADS * VALUE, DIM, bias=False)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, HEADS, NOPE + ROPE)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        q_pe = rotated(q_pe, frequencies)
        q = torch.cat([q_nope, q_pe], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [LATENT, ROPE], dim=-1)
        k_pe = rotated(k_pe.unsqueeze(2), frequencies)
        kv = self.wkv_b(self.kv_norm(kv)).view(batch, length, HEADS, NOPE + VALUE)
        k_nope, v = torch.split(kv, [NOPE, VALUE], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, HEADS, -1)], dim=-1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        output = output.view(batch, length, -1)
        return self.wo(output)


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, hidden, bias=False)
        self.w2 = nn.Linear(hidden, DIM, bias=False)
        self.w3 = nn.Linear(DIM, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Exchange(torch.autograd.Function):
    """``_A2A`` at f738a03bf: c10d's all-to-all, which selective checkpointing does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = len(x)
        return x.new_empty(rows, x.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_empty(ctx.rows, gradient.shape[1]), None


class GroupedExperts(nn.Module):
    """The experts of a rank, with the exchange of rows around them where it has a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.exchanges = False
        self.w1 = nn.Parameter(torch.empty(EXPERTS, EXPERT_HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, DIM, EXPERT_HIDDEN))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, EXPERT_HIDDEN, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = len(x)
        if self.exchanges:
            x = Exchange.apply(x, sent)
        x = self._padded(x)
        return Exchange.apply(x, sent) if self.exchanges else x

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the experts, each expert's padded; and back."""
        w1, w2, w3 = (w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w2, self.w3))
        with torch.no_grad():
            order = torch.empty(len(x) + len(w1) * ALIGN, dtype=torch.int32, device=x.device)
            ends = torch.empty(len(w1), dtype=torch.int32, device=x.device)
        x = torch.vstack((x, x.new_zeros(x.shape[-1])))
        shape = x.shape
        x = x[order, :]
        h = F.silu(torch._grouped_mm(x, w1.transpose(-2, -1), offs=ends))
        h = h * torch._grouped_mm(x, w3.transpose(-2, -1), offs=ends)
        out = torch._grouped_mm(h, w2.transpose(-2, -1), offs=ends).type_as(x)
        unpadded = out.new_empty(shape)
        unpadded[order, :] = out
        return unpadded[:-1]


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedExperts()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.shared_experts = FeedForward(EXPERT_HIDDEN * SHARED)
        self.register_buffer("expert_bias", torch.empty(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.view(-1, DIM)
        scores = F.softmax(self.gate(x).to(torch.float32), dim=1)
        _, picked = torch.topk(scores + self.expert_bias, k=PICKED, dim=1)
        weights = scores.gather(dim=1, index=picked) * 1.0
        order = torch.argsort(picked.view(-1), stable=True)
        weights = weights.view(-1)[order]
        rows = (order // PICKED).reshape(-1, 1).expand(-1, DIM)
        routed = self.experts(torch.gather(x, dim=0, index=rows))
        routed = (routed.to(torch.float32) * weights.reshape(-1, 1)).to(x.dtype)
        out = self.shared_experts(x).scatter_add(dim=0, index=rows, src=routed)
        return out.reshape(shape)


class TransformerBlock(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.feed_forward = FeedForward(HIDDEN) if dense else MoE()

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), frequencies)
        return x + self.feed_forward(self.ffn_norm(x))


class CompiledLoss(torch.autograd.Function):
    """Cross-entropy as Inductor fuses it: logits stay bf16, nothing of their size is made in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits.new_empty(len(logits), 1, dtype=torch.float32)
        most = torch.empty_like(rows)
        ctx.save_for_backward(logits, labels, rows, most)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, *_ = ctx.saved_tensors
        return torch.empty_like(logits), None


class DeepSeek(nn.Module):
    """The model with its loss; ``mode`` is 'full' or 'selective' (activation checkpointing).

    ``compiled``: the loss is. It is eager in fp32 otherwise.
    """

    base_model_prefix = ""

    def __init__(self, length: int, mode: str, vocabulary: int, compiled: bool) -> None:
        super().__init__()
        self.compiled = compiled
        self.config = SimpleNamespace(
            vocab_size=vocabulary, get_text_config=lambda: self.config, _attn_implementation="sdpa"
        )
        self._no_split_modules = ["Checkpointed"]
        self.tok_embeddings = nn.Embedding(vocabulary, DIM)
        self.register_buffer("freqs_cis", torch.empty(length, ROPE // 2, dtype=torch.complex64))
        blocks = (TransformerBlock(number < DENSE_LAYERS) for number in range(LAYERS))
        self.layers = nn.ModuleList(Checkpointed(block, mode) for block in blocks)
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, vocabulary, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        h = self.tok_embeddings(input_ids)
        for layer in self.layers:
            h = layer(h, self.freqs_cis)
        logits = self.output(self.norm(h))
        rows, targets = logits.flatten(0, 1), labels.flatten(0, 1)
        if self.compiled:
            return SimpleNamespace(loss=CompiledLoss.apply(rows, targets), logits=logits)
        return SimpleNamespace(loss=F.cross_entropy(rows.float(), targets), logits=logits)

    # What `--ep` asks of a model of transformers.

    @property
    def ep_plan(self) -> dict[str, str]:
        names = [name for name, module in self.named_modules() if isinstance(module, GroupedExperts)]
        weights = {f"{name}.w{i}": "grouped_gemm" for name in names for i in (1, 2, 3)}
        return weights | dict.fromkeys(names, _exchanging())

    def _expand_parallel_plan(self, plan: dict[str, str]) -> dict[str, str]:
        return plan


def _exchanging() -> str:
    """The name of a style of transformers under which ``GroupedExperts`` exchanges its rows."""
    from transformers.distributed.expert_parallel import ExpertParallelLayer
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    class Exchanging(ExpertParallelLayer):  # type: ignore[misc]
        def install_forward(self, module: Any, mesh: Any) -> Any:
            module.exchanges = True
            return module

    ALL_PARALLEL_STYLES.register("torchtitan_exchange", Exchanging())
    return "torchtitan_exchange"


def builder(
    length: int, mode: str, vocabulary: int = 102400, compiled: bool = True
) -> Callable[[], nn.Module]:
    """What RunSpec's ``model`` may be: a callable that returns the model, in fp32."""

    def torchtitan_deepseek() -> nn.Module:
        return DeepSeek(length, mode, vocabulary, compiled)

    return torchtitan_deepseek
