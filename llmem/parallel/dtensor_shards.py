"""What an optimizer sees of a tensor-parallel rank's parameter: a DTensor.

Ops of an optimizer follow the placements of the parameter. The gradient of an embedding that is cut over
the vocabulary comes as one of all tokens, with which the rank has nothing to exchange: each op takes a
copy of the rank's part of it (torch/distributed/tensor/_redistribute.py, ``Replicate`` to ``Shard``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Part:
    """A chunk of ``size`` elements along ``dimension``, of ``rank`` among ``ranks``.

    Without dimension all ranks have the same, and a summand each of its gradient (norms under ``sp``).
    """

    rank: int
    ranks: int
    dimension: int | None = None
    size: int = 0
    whole_gradient: bool = False
    """Whether the rank holds the gradient of all chunks."""


def group_of(parts: list[Part]) -> AbstractContextManager[None]:
    """The process group in which ``parts`` are DTensors, if there are any."""
    from llmem.trace.split.process_group import rank_of

    return rank_of(parts[0].ranks, parts[0].rank) if parts else nullcontext()


def mesh_of(parts: list[Part]) -> Any:
    """The mesh of that group, in it."""
    from llmem.trace.split.process_group import make_mesh

    return make_mesh((parts[0].ranks,), ("tp",)) if parts else None


def parameter_of(local: torch.Tensor, part: Part | None, mesh: Any) -> torch.nn.Parameter:
    """``local`` as a parameter, of which it is ``part``."""
    from torch.distributed.tensor import Replicate, Shard

    if part is None:
        return torch.nn.Parameter(local)
    placed = Replicate() if part.dimension is None else Shard(part.dimension)
    return torch.nn.Parameter(_dtensor(local, part, mesh, placed))


def gradient_of(local: torch.Tensor, part: Part | None, mesh: Any) -> torch.Tensor:
    """A gradient of the parameter whose ``part`` is ``local``."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if part is None:
        return torch.empty_like(local)
    if part.dimension is None:
        return _dtensor(torch.empty_like(local), part, mesh, Partial())
    if part.whole_gradient:
        return _dtensor(local.new_empty(_whole(local, part)), part, mesh, Replicate())
    return _dtensor(torch.empty_like(local), part, mesh, Shard(part.dimension))


def _whole(local: torch.Tensor, part: Part) -> torch.Size:
    shape = list(local.shape)
    if part.dimension is not None:
        shape[part.dimension] = part.size
    return torch.Size(shape)


def _dtensor(local: torch.Tensor, part: Part, mesh: Any, placed: Any) -> torch.Tensor:
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor import DTensor

    shape = _whole(local, part)
    stride = tuple(make_contiguous_strides_for(shape))
    return DTensor.from_local(local, mesh, [placed], run_check=False, shape=shape, stride=stride)
