"""``--strategy zero1|zero2|zero3``: DeepSpeed ZeRO, one table for each kind of rank."""

from __future__ import annotations

from llmem.lifetimes import Trace
from llmem.parallel import RankTable
from llmem.parallel.host_step import step_on_host
from llmem.parallel.sharded_step import device_of
from llmem.parallel.zero.layout import FlatGroup, flat_group, in_model_order
from llmem.parallel.zero.options import ZeroOptions, options_of
from llmem.parallel.zero.stage12 import Zero12Pass
from llmem.parallel.zero.step import trace_step
from llmem.spec import RunSpec

MANY_RANKS = 8
"""Up to so many ranks every one gets a table of its own."""


def compute_dtype(spec: RunSpec) -> str | None:
    """DeepSpeed casts the parameters themselves (``_cast_module_mixed_precision``)."""
    return spec.autocast_dtype


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """The tables of the ranks that differ. Raises LlmemError for impossible settings."""
    options = options_of(trace, spec)
    if options.stage == 3:
        from llmem.parallel.zero.stage3_ranks import stage3_ranks

        return stage3_ranks(trace, spec, options)
    return _stage12(trace, spec, options)


def _stage12(trace: Trace, spec: RunSpec, options: ZeroOptions) -> list[RankTable]:
    zero = options.zero
    group = flat_group(
        [p for p in in_model_order(trace) if p.trainable],
        options.world,
        options.itemsize,
        round_robin=zero.round_robin_gradients,
        aligned=zero.parameter_alignment,
    )
    tables = []
    for members in kinds_of_rank(group, options.world):
        engine = Zero12Pass(
            trace,
            group,
            options,
            members[0],
            flatten_on_host=_too_large_twice(trace, group, spec),
        )
        editor = engine.run()
        if options.offload_optimizer != "none":
            optimizer = step_on_host(editor)
        else:
            step = trace_step(
                [engine.group_step()],
                options,
                spec,
                steps=len(trace.step_ticks) - 1,
                gradient_dtype=engine.gradient_dtype,
            )
            released = step.splice(editor)
            for number, end in engine.until_step:
                end(released[number][0])
            optimizer = step.trace.optimizer
        lifetimes, named = editor.finish()
        notes = list(options.notes)
        if len(members) > 1:
            notes.append(
                f"zero{options.stage}: ranks {members[1]} to {members[-1]} hold no more "
                f"gradients than rank {members[0]}, and are shown as alike"
            )
        tables.append(RankTable(members[0], lifetimes, named, optimizer, notes, members))
    return tables


def kinds_of_rank(group: FlatGroup, world: int) -> list[tuple[int, ...]]:
    """Every rank for itself; of many, the one that holds most gradients stands for all."""
    if world <= MANY_RANKS:
        return [(rank,) for rank in range(world)]

    def held(rank: int) -> int:
        return sum(piece.parameter.numel for piece in group.pieces(rank))

    worst = max(range(world), key=held)
    return [(worst, *(rank for rank in range(world) if rank != worst))]


def _too_large_twice(trace: Trace, group: FlatGroup, spec: RunSpec) -> bool:
    """Whether DeepSpeed flattens on the host, as the GPU has no room for a copy beside it."""
    capacity = device_of(spec).capacity if spec.gpu else 0
    there = sum(trace.lifetimes.nbytes[sorted({p.row for p in trace.parameters})].tolist())
    flat = group.numel * group.parameters[0].itemsize
    return bool(capacity) and there + flat > capacity

