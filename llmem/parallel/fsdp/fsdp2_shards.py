"""FSDP2's arguments, and the shard that a rank holds of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from llmem.lifetimes import Parameter, Trace
from llmem.spec import RunSpec

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks that share the shards of the same experts ("efsdp" in transformers and torchtitan).

    Of the ranks that share a copy of the rest, every ``stride``-th holds the same experts; there are
    ``size`` of those. ``keys`` are the parameters that are sharded so.
    """

    size: int
    stride: int
    keys: frozenset[int]


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
    experts: ExpertMesh | None = None
    """Of parameters that have another mesh than the rest, under expert parallelism."""

    def ranks(self, parameter: Parameter) -> int:
        """How many ranks share the shards of ``parameter``."""
        experts = self.experts
        return experts.size if experts and parameter.key in experts.keys else self.shard_size

    def index(self, parameter: Parameter, rank: int) -> int:
        """Which of its shards global rank ``rank`` holds.

        >>> weight = Parameter(0, "w", (8,), "float32", 4, True, 0)
        >>> options = Fsdp2Options(4, experts=ExpertMesh(2, 2, frozenset({0})))
        >>> [options.index(weight, rank) for rank in range(4)]
        [0, 0, 1, 1]
        """
        experts = self.experts
        if experts and parameter.key in experts.keys:
            return rank // experts.stride % experts.size
        return rank % self.shard_size

    def local_shape(self, parameter: Parameter, rank: int) -> tuple[int, ...]:
        """Shape of what global rank ``rank`` owns of ``parameter``."""
        return local_shape(parameter, self.ranks(parameter), self.index(parameter, rank))


def expert_mesh(trace: Trace, spec: RunSpec) -> ExpertMesh | None:
    """The mesh of ``trace``'s experts under ``spec``, None where no rank has a part of them.

    All ranks that share a copy of the rest, over those that share a set of experts
    (``DistributedConfig.efsdp_size``); ranks of one batch share the rest as they share the experts.
    """
    if not trace.experts:
        return None
    groups = spec.ep if spec.ep_plan == "alltoall" else 1
    inside = tuple(f"{name}." for name in trace.experts)
    keys = frozenset(p.key for p in trace.parameters if p.name.startswith(inside))
    return ExpertMesh(spec.shard_ranks // groups, groups, keys)


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
