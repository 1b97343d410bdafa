"""FSDP1's flat parameters: what a unit's parameters become on one rank.

Read in torch/distributed/fsdp/_flat_param.py (``_init_flat_param_and_metadata``, ``_get_shard``,
``_get_shard_metadata``). The parameters of a unit are concatenated; each rank holds one chunk of
ceil(numel / ranks) elements, the last ones padded. With ``use_orig_params`` every parameter starts
at a multiple of 16 bytes of the computed dtype, the whole is padded to the number of ranks, and the
optimizer sees the parts of the original parameters that lie in the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from llmem.errors import LlmemError
from llmem.lifetimes import Parameter
from llmem.parallel.sharded_step import Shard

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ALIGNMENT = 16
"""Bytes; ``_get_aligned_numel``."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a flat parameter: a parameter, or padding (None)."""

    numel: int
    parameter: Parameter | None


@dataclass(frozen=True)
class FlatParameter:
    """A unit's parameters as one.

    ``kept`` is the dtype of the shard (and of its gradient in ``.grad``), ``computed`` that of the
    gathered parameter and of gradients as backward makes them, ``reduced`` that in which they are
    reduced; names as torch has them. Sizes are in elements.
    """

    pieces: tuple[Piece, ...]
    ranks: int
    kept: str
    computed: str
    reduced: str

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def shard(self) -> int:
        """Elements of a rank's chunk, padding included."""
        return ceil(self.numel / self.ranks)

    @property
    def padded(self) -> int:
        """Elements of the gathered parameter."""
        return self.shard * self.ranks

    @property
    def trainable(self) -> bool:
        return any(p.parameter is not None and p.parameter.trainable for p in self.pieces)

    @property
    def key(self) -> int:
        """The table key that stands for the whole: its first parameter's."""
        return next(p.parameter.key for p in self.pieces if p.parameter is not None)

    def whole(self, name: str) -> Shard:
        """What the optimizer sees without ``use_orig_params``: the chunk."""
        return Shard(self.key, name, (self.shard,), self.kept)

    def parts(self, rank: int) -> list[Shard]:
        """What it sees with ``use_orig_params``: the trained parameters' parts in the chunk.

        A parameter that has no element in the chunk has no gradient, and is left alone.
        """
        first, last = rank * self.shard, (rank + 1) * self.shard
        found, start = [], 0
        for piece in self.pieces:
            inside = min(start + piece.numel, last) - max(start, first)
            if piece.parameter is not None and piece.parameter.trainable and inside > 0:
                parameter = piece.parameter
                found.append(Shard(parameter.key, parameter.name, (inside,), self.kept))
            start += piece.numel
        return found


def flatten(
    parameters: Sequence[Parameter],
    ranks: int,
    *,
    kept: dict[int, str],
    computed: str | None = None,
    reduced: str | None = None,
    use_orig_params: bool = False,
) -> FlatParameter:
    """The flat parameter of a unit's ``parameters`` on ``ranks`` ranks.

    ``kept``: dtype of each parameter by key. ``computed`` and ``reduced`` are the dtypes of
    ``MixedPrecision``, None for those that parameters are kept in. Raises LlmemError for what FSDP1
    refuses (several dtypes; frozen beside trained parameters without ``use_orig_params``), and for
    the latter with ``use_orig_params``.

    >>> p = [Parameter(i, str(i), (n,), "float32", 4, True, i) for i, n in enumerate((5, 6))]
    >>> kept = {0: "float32", 1: "float32"}
    >>> flatten(p, 3, kept=kept).shard
    4
    >>> [q.numel for q in flatten(p, 3, kept=kept, use_orig_params=True).pieces]
    [5, 3, 6, 1]
    """
    dtypes = sorted({kept[p.key] for p in parameters})
    names = f"{parameters[0].name} and the parameters wrapped with it"
    if len(dtypes) > 1:
        raise LlmemError(
            f"FSDP1 cannot flatten {' and '.join(dtypes)} together ({names}); load the model in one "
            "dtype, or use --strategy fsdp2"
        )
    if len({p.trainable for p in parameters}) > 1:
        raise LlmemError(
            f"FSDP1 would make gradients of frozen parameters too ({names} are partly trained), "
            "which is not modelled; use --strategy fsdp2"
        )
    pieces: list[Piece] = []
    aligned = ALIGNMENT // ITEMSIZE[computed or dtypes[0]] if use_orig_params else 1
    for parameter in parameters:
        _pad(pieces, aligned)
        pieces.append(Piece(parameter.numel, parameter))
    if use_orig_params:
        _pad(pieces, ranks)
    return FlatParameter(
        tuple(pieces), ranks, dtypes[0], computed or dtypes[0], reduced or computed or dtypes[0]
    )


def _pad(pieces: list[Piece], multiple: int) -> None:
    missing = -sum(piece.numel for piece in pieces) % multiple
    if missing:
        pieces.append(Piece(missing, None))
