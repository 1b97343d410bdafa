"""Colossal-AI 0.3.0's 1-D tensor parallelism, as LLMem ran it: every linear layer row-parallel.

Read in colossalai/nn/_ops (``linear.py``, ``embedding.py``), colossalai/nn/parallel/layers and
colossalai/tensor/dist_spec_mgr.py at commit d4fb7bf, with LLMem's change of the embedding's default
(github.com/taehokim20/LLMem at 3d289b4):

* the weight of a linear layer is cut along its inputs, that of an embedding along its dimension;
  biases and norms are whole on every rank;
* a linear layer copies this rank's columns of its input out, multiplies, and all-reduces the
  full-size partial output in place; the bias is added afterwards, out of place;
* the backward of that copy gathers the gradient of the whole input; the forward of an embedding
  gathers its whole output. Outputs, logits and the loss are therefore full-size on every GPU;
* a gather asks ``dist.all_gather`` for a list: one tensor for each rank's part, which NCCL's process
  group (torch 2.0) fills from a flat copy of them all, and the list is then put side by side.

The collectives are those of the current process group, so a rank is traced or really runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.library import Library

from llmem.errors import LlmemError
from llmem.spec import RunSpec

GATHER_LIST = "gather_list"
"""Op that makes the tensors of the list: with the flat copy (``all_gather_into_tensor``) and the
``cat`` it is a gather's memory."""

_library = Library("llmem_tp", "DEF")
_library.define(f"{GATHER_LIST}(Tensor part, int ranks) -> Tensor[]")
_library.impl(
    GATHER_LIST,
    lambda part, ranks: [torch.empty_like(part) for _ in range(ranks)],
    "CompositeExplicitAutograd",
)


def check_colossal(spec: RunSpec) -> None:
    """Raises LlmemError where the plan is asked for with what it does not go with."""
    if spec.tp == 1:
        return
    if spec.strategy == "gemini" and spec.tp_plan != "colossal":
        raise LlmemError("--strategy gemini knows Colossal-AI's tensors only; add --tp-plan colossal")
    if spec.tp_plan != "colossal":
        return
    if spec.strategy not in ("none", "gemini"):
        raise LlmemError(
            f"--tp-plan colossal with --strategy {spec.strategy} is not supported; Colossal-AI 0.3.0 "
            "has gemini (or none, where all GPUs split tensors)"
        )
    if spec.pp > 1:
        raise LlmemError("--tp-plan colossal with --pp is not supported; leave --pp out")


def parallelize(model: torch.nn.Module, spec: RunSpec, mesh_of: Callable[[], Any]) -> str:
    """Cut the weights of ``model`` and its layers' forward; returns a sentence about it.

    Raises LlmemError for layers that the plan does not know or that do not divide.
    """
    from transformers.pytorch_utils import Conv1D

    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise LlmemError(
            f"Colossal-AI's plan splits torch.nn.Linear and Embedding alone, and "
            f"{type(model).__name__} is made of Conv1D, which would stay whole; leave --tp out"
        )
    mesh = mesh_of()
    ranks = _Ranks(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)
    cut: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        layer: Any = module
        if layer.weight not in cut:
            cut[layer.weight] = _columns(layer.weight, ranks, name)
        layer.weight = cut[layer.weight]
        is_linear = isinstance(layer, torch.nn.Linear)
        forward: Any = partial(_linear, layer) if is_linear else partial(_gathered, layer.forward)
        layer.forward = partial(forward, ranks)
    return (
        f"tensor parallelism: Colossal-AI 0.3.0's 1-D plan on {spec.tp} ranks (every linear layer "
        "row-parallel, embeddings by dimension; outputs and logits whole on each), every rank of "
        "them on the same batch"
    )


@dataclass(frozen=True)
class _Ranks:
    """How many ranks split a tensor, which of them this is, and their process group's name."""

    degree: int
    rank: int
    group: str


def _columns(weight: torch.nn.Parameter, ranks: _Ranks, name: str) -> torch.nn.Parameter:
    """This rank's part [rows, columns / degree] of ``weight`` [rows, columns], memory of its own."""
    whole = weight.shape[-1]
    if whole % ranks.degree:
        raise LlmemError(
            f"--tp {ranks.degree} cannot split the {whole} inputs of {name}: Colossal-AI gives "
            "every rank equal parts; use a divisor"
        )
    part = torch.nn.Parameter(_own(weight.detach(), ranks), weight.requires_grad)
    part.sharded_dimension = (weight.dim() - 1, whole)  # type: ignore[attr-defined]
    return part


def _own(whole: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
    """A copy of this rank's columns (``DistSpecManager._shard_as``)."""
    columns = whole.shape[-1] // ranks.degree
    return whole.narrow(-1, ranks.rank * columns, columns).clone(
        memory_format=torch.contiguous_format
    )


def _all(part: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
    """The columns of all ranks (``DistSpecManager._gather``)."""
    functional = torch.ops._c10d_functional
    parts = getattr(torch.ops.llmem_tp, GATHER_LIST)(part, ranks.degree)
    flat = functional.all_gather_into_tensor(part.contiguous(), ranks.degree, ranks.group)
    flat = functional.wait_tensor(flat)
    for one, found in zip(parts, flat.chunk(ranks.degree), strict=True):
        one.copy_(found)
    del flat, one, found
    return torch.cat(parts, -1)


# -- the layers ------------------------------------------------------------------------------------


def _linear(layer: torch.nn.Linear, ranks: _Ranks, x: torch.Tensor) -> torch.Tensor:
    """``colo_linear_1drow``: x [..., inputs] -> [..., outputs], both whole."""
    part: torch.Tensor = _Slice.apply(x, ranks)
    output: torch.Tensor = _AllReduce.apply(torch.nn.functional.linear(part, layer.weight), ranks)
    return output if layer.bias is None else output + layer.bias


def _gathered(forward: Callable[..., torch.Tensor], ranks: _Ranks, *args: Any, **kwargs: Any) -> Any:
    """``colo_embedding_1Dcol``, around an embedding's own forward."""
    return _Gather.apply(forward(*args, **kwargs), ranks)


class _Slice(torch.autograd.Function):
    """Forward copies this rank's columns out, backward gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _own(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _all(gradient, ctx.ranks), None


class _Gather(torch.autograd.Function):
    """Forward gathers the columns of all ranks, backward copies this rank's out."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _all(part, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _own(gradient, ctx.ranks), None


class _AllReduce(torch.autograd.Function):
    """Sum over the ranks, in place (``dist.all_reduce``); the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, partial_sums: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
        functional = torch.ops._c10d_functional
        reduced: torch.Tensor = functional.all_reduce_(partial_sums, "sum", ranks.group)
        functional.wait_tensor(reduced)
        return partial_sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None
