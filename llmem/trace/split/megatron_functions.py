"""What Megatron-LM core's tensor-parallel layers allocate, forward and backward.

Read in megatron/core/tensor_parallel (``layers.py``, ``mappings.py``, ``cross_entropy.py``) and
megatron/core/utils.py (``GlobalMemoryBuffer``) of NVIDIA/Megatron-LM at d98e8a64dd. Kernels write where
theirs write: all-reduces are in place, gathers and reduce-scatters have outputs of their own, and the
input that sequence parallelism gathers for a linear layer goes to one global buffer that only grows.

Megatron's first dimension is the sequence, that of transformers' models the second (``Ranks.dim``).
There, too, parts are laid one after the other along the first, so shapes and bytes are right and values
are not: these functions are for tracing on meta.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library

MAKE_VOCAB_SIZE_DIVISIBLE_BY = 128
"""Megatron's argument of that name, its default: vocabularies are padded to a multiple, times tp."""

GLOBAL_BUFFER = "global_memory_buffer"
"""Op that makes the buffer for gathered inputs."""

_library = Library("llmem_megatron", "DEF")
_library.define(f"{GLOBAL_BUFFER}(Tensor like, int numel) -> Tensor")
_library.impl(
    GLOBAL_BUFFER, lambda like, numel: like.new_empty(numel), "CompositeExplicitAutograd"
)


@dataclass
class Ranks:
    """The tensor-parallel ranks as one of them sees them.

    ``sequence``: sequence parallelism, over dimension ``dim``; ``fused``: weights of linear layers get
    no gradient of their own, as Megatron's kernel adds it to the buffer of all gradients;
    ``subtracts_in_place``: the loss shifts logits in place, as it did not yet in 2023 (b387fadfa7).
    """

    degree: int
    rank: int
    group: str
    sequence: bool
    dim: int = 1
    fused: bool = False
    subtracts_in_place: bool = True
    buffers: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    local: torch.Tensor | None = None
    """This rank's part of a layer's input whose place a stand-in of the whole shape has taken."""

    def reduce_(self, tensor: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """All-reduce in place."""
        if self.degree == 1:
            return tensor
        functional = torch.ops._c10d_functional
        functional.wait_tensor(functional.all_reduce_(tensor, how, self.group))
        return tensor

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[B, S/tp, H] -> [B, S, H], in memory of its own."""
        functional = torch.ops._c10d_functional
        whole = functional.all_gather_into_tensor(part.contiguous(), self.degree, self.group)
        return functional.wait_tensor(whole).view(self._whole(part))  # type: ignore[no-any-return]

    def gather_to_buffer(self, part: torch.Tensor) -> torch.Tensor:
        """[B, S/tp, H] -> [B, S, H], in the global memory buffer."""
        found = self.from_buffer(part, part.numel() * self.degree)
        functional = torch.ops._c10d_functional
        whole = found.view(self.degree * part.shape[0], *part.shape[1:])
        functional.all_gather_into_tensor_out(part, self.degree, self.group, out=whole)
        functional.wait_tensor(whole)
        return found.view(self._whole(part))

    def from_buffer(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of the global memory buffer of a dtype."""
        buffer = self.buffers.get(like.dtype)
        if buffer is None or buffer.numel() < numel:
            make = getattr(torch.ops.llmem_megatron, GLOBAL_BUFFER)
            buffer = self.buffers[like.dtype] = make(like.detach(), numel)
        return buffer[:numel]

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S/tp, H]."""
        functional = torch.ops._c10d_functional
        shape = list(whole.shape)
        shape[self.dim] //= self.degree
        rows = whole.contiguous().view(-1, whole.shape[-1])
        part = functional.reduce_scatter_tensor(rows, "sum", self.degree, self.group)
        return functional.wait_tensor(part).view(shape)  # type: ignore[no-any-return]

    def split(self, whole: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> this rank's [B, S/tp, H], a copy."""
        tokens = whole.shape[self.dim] // self.degree
        return whole.narrow(self.dim, self.rank * tokens, tokens).contiguous()

    def _whole(self, part: torch.Tensor) -> list[int]:
        shape = list(part.shape)
        shape[self.dim] *= self.degree
        return shape


class Linear(torch.autograd.Function):
    """``LinearWithGradAccumulationAndAsyncCommunication``.

    x [B, S (or S/tp), in], weight [out, in] of this rank. ``column``: the input is the same on every
    rank, so that the gradient of it is reduced; under sequence parallelism it is gathered first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ranks: Ranks,
        column: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.ranks, ctx.column = bias is not None, ranks, column
        total = ranks.gather_to_buffer(x) if column and ranks.sequence else x
        output = torch.matmul(total, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ranks, sequence = ctx.ranks, ctx.column and ctx.ranks.sequence
        total = ranks.gather_to_buffer(x) if sequence else x
        of_input = gradient.matmul(weight)
        rows = gradient.contiguous().view(-1, gradient.shape[-1])
        if sequence:
            scattered = ranks.reduce_scatter(of_input)
        elif ctx.column:
            ranks.reduce_(of_input)
        fused = ranks.fused
        of_weight = None if fused else rows.t().matmul(total.reshape(-1, total.shape[-1]))
        of_bias = rows.sum(dim=0) if ctx.bias else None
        return scattered if sequence else of_input, of_weight, of_bias, None, None


class ReduceOutput(torch.autograd.Function):
    """Partial sums [B, S, H] -> their sum, whole (in place) or this rank's [B, S/tp, H]."""

    @staticmethod
    def forward(ctx: Any, partial_sums: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.reduce_scatter(partial_sums) if ranks.sequence else ranks.reduce_(partial_sums)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.ranks.gather(gradient) if ctx.ranks.sequence else gradient, None


class Scatter(torch.autograd.Function):
    """``scatter_to_sequence_parallel_region``: [B, S, H] -> [B, S/tp, H]; backward gathers."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.split(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.ranks.gather(gradient), None


def embed(ids: torch.Tensor, weight: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``VocabParallelEmbedding`` before its reduction: ids [B, S] -> partial [B, S, H]."""
    if ranks.degree == 1:
        return torch.nn.functional.embedding(ids, weight)
    first = ranks.rank * weight.shape[0]
    mask = (ids < first) | (ids >= first + weight.shape[0])
    masked = (ids.clone() - first).masked_fill_(mask, 0)
    return torch.nn.functional.embedding(masked, weight).masked_fill_(mask.unsqueeze(-1), 0.0)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss [B, S] in fp32 of logits [B, S, V/tp] and targets [B, S]; saved is the softmax in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ranks: Ranks
    ) -> torch.Tensor:
        wide = logits.float()
        largest = ranks.reduce_(torch.max(wide, dim=-1)[0], "max")
        if ranks.subtracts_in_place:
            wide -= largest.unsqueeze(dim=-1)
        else:
            wide = wide - largest.unsqueeze(dim=-1)
        words = wide.shape[-1]
        first = ranks.rank * words
        mask = (target < first) | (target >= first + words)
        masked = (target.clone() - first).masked_fill_(mask, 0).view(-1)
        rows = wide.view(-1, words)
        index = torch.arange(rows.shape[0], device=rows.device)
        predicted = rows[index, masked].clone().view_as(target).masked_fill_(mask, 0.0)
        torch.exp(wide, out=wide)
        total = wide.sum(dim=-1)
        ranks.reduce_(predicted)
        ranks.reduce_(total)
        loss = torch.log(total) - predicted
        wide.div_(total.unsqueeze(dim=-1))
        ctx.save_for_backward(wide, mask, masked)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        softmax, mask, masked = ctx.saved_tensors
        rows = softmax.view(-1, softmax.shape[-1])
        index = torch.arange(rows.shape[0], device=rows.device)
        rows[index, masked] -= 1.0 - mask.view(-1).float()
        softmax.mul_(gradient.unsqueeze(dim=-1))
        return softmax, None, None
