"""FSDP2's arguments, and the shard that a rank holds of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from llmem.lifetimes import Parameter

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Fsdp2Options:
    """Arguments of ``fully_shard``; dtypes as torch names, None keeps the parameters' own.

    ``shard_size`` ranks share one copy (the world, or fewer for HSDP, with ``replicas`` copies).
    ``reshard`` is ``reshard_after_forward`` of the blocks, ``root_reshard`` that of the root.
    ``offload``: ``CPUOffloadPolicy``.
    """

    shard_size: int
    replicas: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard: bool | int = True
    root_reshard: bool = False
    kept: frozenset[str] = frozenset()
    """Names of units with ``reshard_after_forward=False`` whatever the others have."""
    offload: bool = False
    inputs_require_grad: bool = False
    """The embedding's output requires a gradient, whatever is trained."""


def padded_shard(parameter: Parameter, ranks: int) -> int:
    """Elements of a shard with its padding: ceil(d0/N) rows.

    >>> padded_shard(Parameter(0, "w", (5, 3), "float32", 4, True, 0), 2)
    9
    """
    shape = parameter.shape or (1,)
    return ceil(shape[0] / ranks) * prod(shape[1:])


def local_shape(parameter: Parameter, ranks: int, rank: int) -> tuple[int, ...]:
    """Shape of the chunk that ``rank`` really owns (torch.chunk: the last ones may be empty).

    >>> local_shape(Parameter(0, "w", (5, 3), "float32", 4, True, 0), 4, 3)
    (0, 3)
    """
    shape = parameter.shape or (1,)
    rows = ceil(shape[0] / ranks)
    mine = max(0, min(rows, shape[0] - rank * rows))
    return (mine, *shape[1:])
