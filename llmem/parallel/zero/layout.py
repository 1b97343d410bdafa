"""How ZeRO lays parameters out: the order of ``model.parameters()``, flat buffers, partitions.

DeepSpeed 0.19, runtime/zero/stage_1_and_2.py: ``DeepSpeedZeroOptimizer.__init__``,
``_round_robin_reorder``, ``get_partition_info``, ``initialize_gradient_partition``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd

from llmem.lifetimes import Parameter, Trace

ALIGNMENT = 2
"""``nccl_start_alignment_factor``: a flat buffer is a multiple of this times the world size."""


def in_model_order(trace: Trace) -> list[Parameter]:
    """Parameters as ``model.parameters()`` gives them: a module's own before its children's.

    The trace lists children before their parents (``Module._apply``); the order of siblings is
    the same in both.
    """
    homes = {p.key: home_of(trace, p) for p in trace.parameters}
    rank: dict[str, int] = {}
    for parameter in trace.parameters:
        path = ""
        for part in homes[parameter.key].split("."):
            path = f"{path}.{part}" if path else part
            rank.setdefault(path, len(rank))

    def key(item: tuple[int, Parameter]) -> tuple[int, ...]:
        index, parameter = item
        home, path, ranks = homes[parameter.key], "", []
        for part in home.split(".") if home else []:
            path = f"{path}.{part}" if path else part
            ranks.append(rank[path] + 1)
        return (*ranks, 0, index)

    return [p for _, p in sorted(enumerate(trace.parameters), key=key)]


def home_of(trace: Trace, parameter: Parameter) -> str:
    """Name of the first module that owns a parameter (tied ones have their last one's name)."""
    return trace.modules[int(trace.lifetimes.module[parameter.row])]


def owners_of(trace: Trace, parameter: Parameter) -> list[str]:
    """Names of the modules that own a parameter: one, or the first and last of those tied."""
    named = parameter.name.rpartition(".")[0]
    return list(dict.fromkeys([home_of(trace, parameter), named]))


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of a parameter that one rank's partition holds."""

    parameter: Parameter
    start: int
    count: int


@dataclass(frozen=True)
class FlatGroup:
    """The trained parameters in one padded buffer, cut into equal partitions, one for each rank.

    ``offsets`` are the elements at which the parameters start; all sizes in elements.
    """

    parameters: list[Parameter]
    offsets: list[int]
    numel: int
    partition: int

    @cached_property
    def _offset_of(self) -> dict[int, int]:
        return {p.key: offset for p, offset in zip(self.parameters, self.offsets, strict=True)}

    def pieces(self, rank: int) -> list[Piece]:
        """What of each parameter lies in the partition of ``rank``."""
        low, high = rank * self.partition, (rank + 1) * self.partition
        found = []
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            start = max(low - offset, 0)
            count = min(high - offset, parameter.numel) - start
            if count > 0:
                found.append(Piece(parameter, start, count))
        return found

    def gaps(self, rank: int) -> list[int]:
        """Elements of the padding inside and after the partition's pieces."""
        low, high = rank * self.partition, (rank + 1) * self.partition
        at, found = low, []
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            if offset + parameter.numel <= low or offset >= high:
                continue
            if offset > at:
                found.append(offset - at)
            at = min(offset + parameter.numel, high)
        return found + ([high - at] if at < high else [])

    def ranks_of(self, parameter: Parameter) -> list[tuple[int, int]]:
        """(rank, elements) of the partitions that a parameter falls into, in order."""
        offset = self._offset_of[parameter.key]
        found, at = [], offset
        while at < offset + parameter.numel:
            rank = at // self.partition
            count = min((rank + 1) * self.partition, offset + parameter.numel) - at
            found.append((rank, count))
            at += count
        return found


def flat_group(
    parameters: list[Parameter],
    ranks: int,
    itemsize: int,
    *,
    round_robin: bool = False,
    aligned: bool = False,
) -> FlatGroup:
    """The flat buffer of ``parameters`` on ``ranks`` ranks.

    ``round_robin`` is round_robin_gradients; ``aligned`` (parameter_alignment) starts each
    parameter at a multiple of 16 bytes.

    >>> p = [Parameter(i, str(i), (5,), "float32", 4, True, i) for i in range(3)]
    >>> flat_group(p, 2, 4).numel, flat_group(p, 2, 4).offsets
    (16, [0, 5, 10])
    >>> [(x.parameter.key, x.start, x.count) for x in flat_group(p, 2, 4).pieces(1)]
    [(1, 3, 2), (2, 0, 5)]
    """
    if round_robin:
        parameters = [p for first in range(ranks) for p in parameters[first::ranks]]
    multiple = 16 // gcd(16, itemsize) if aligned else 1
    offsets, at = [], 0
    for parameter in parameters:
        at = ceil(at / multiple) * multiple
        offsets.append(at)
        at += parameter.numel
    whole = ALIGNMENT * ranks
    numel = ceil(at / whole) * whole
    return FlatGroup(parameters, offsets, numel, numel // ranks)
