"""Ranks that are traced one by one, tensor- and context-parallel ones, under everything else.

Passes compose from the inside out: a rank is traced with its part of tensors and of sequences, in a
group of cp x tp ranks, then a pipeline repeats its stages' parts of that trace, then the data-parallel
engine plays its hooks. Parameters are sharded, and gradients reduced, over all dp x cp ranks (accelerate's
``dp_shard_cp`` mesh, torchtitan's ``fsdp``), so the engine takes context-parallel ranks for replicas. Global
ranks are numbered as on ``process_group.rank_mesh``: ((pp * dp + replica) * cp + cp_rank) * tp + tp_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from llmem.lifetimes import Trace
from llmem.parallel import RankTable, compute_dtype, context, tensor
from llmem.spec import RunSpec


def ranks(
    trace: Trace, spec: RunSpec, make: Callable[[Trace, RunSpec], list[RankTable]]
) -> list[RankTable]:
    """One table for each kind of rank; ``trace`` is that of rank 0 of cp x tp.

    ``make`` gives the tables of the ranks that share a part: the engine's ``ranks``, perhaps within a
    pipeline. Ranks with other local shapes, or that see other blocks of keys, are traced here.
    """
    inner = spec.model_copy(update={"gpus": spec.gpus // spec.tp, "tp": 1, "cp": 1})
    tables: list[RankTable] = []
    for shapes, blocks in product(tensor.kinds(trace, spec.tp), context.kinds(spec)):
        mine = _trace_as(shapes[0], blocks[0], trace, spec)
        for table in make(mine, inner):
            alike = [rank for rank in table.ranks if rank % spec.cp in blocks]
            if alike:
                everyone = sorted(rank * spec.tp + tp_rank for rank in alike for tp_rank in shapes)
                notes = [*table.assumptions, *context.said(blocks)]
                tables.append(
                    replace(
                        table, rank=everyone[0], ranks=tuple(everyone), base=mine, assumptions=notes
                    )
                )
    return sorted(tables, key=lambda table: table.rank)


def _trace_as(tp_rank: int, cp_rank: int, trace: Trace, spec: RunSpec) -> Trace:
    """The trace of another rank of the same run."""
    from llmem.trace.run import trace_spec

    if tp_rank == cp_rank == 0:
        return trace
    return trace_spec(
        spec,
        steps=len(trace.step_ticks) - 1,
        compute_dtype=compute_dtype(spec),
        tp_rank=tp_rank,
        cp_rank=cp_rank,
    )
