"""Pipeline parallelism: each rank's micro-batches in the order of its schedule.

The pass takes the trace of one micro-batch through the whole model (perhaps a tensor-parallel
rank's) and repeats each stage's forward and backward as torch.distributed.pipelining 2.13 runs
them (stage.py, schedules.py):

* what a stage's forward keeps for backward lives until that micro-batch's backward on that stage;
  the stage's output lives until that backward returns (``fwd_cache``), and as long as the handle of
  its send is kept, which holds the tensor (ProcessGroupNCCL's ``outputs_``, gloo's ``SendWork``):
  GPipe and interleaved schedules keep all handles until the step is done, 1F1B the last one of its
  warm-up until all forwards are done;
* a stage has one receive buffer per micro-batch for its input (which autograd then keeps, no copy
  is made) and one for its output's gradient, allocated before the first step and kept; autograd
  does not add to a received gradient in place: the first sum is a storage of its own;
* the gradient of a stage's input lives until the rank's next backward is done, when the list of
  sends that holds it is replaced (GPipe, interleaved: until the step is done);
* parameters get their gradient from the first micro-batch, later ones are added in place;
* where the schedule parts backward, the trace is made stage by stage (``trace/staged_backward.py``),
  and what a V-shaped one hands to the same rank replaces the receive buffer (``handed_over.py``);
* the loss is computed in the last stage's forward and logits are dropped before backward; clipping
  and the optimizer see the rank's own parameters, and run for each rank.

Megatron-LM's own 1F1B (``--strategy megatron``; ``deallocate_output_tensor`` and
``forward_backward_pipelining_without_interleaving`` in megatron/core/pipeline_parallel/schedules.py,
read at 00611e6e) has the same order and other buffers: each receive allocates, an input lives until
its backward, a gradient until the next is received; an output is let go of when it has been sent; every
gradient goes into the buffer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from llmem.errors import LlmemError
from llmem.lifetimes import Category, Parameter, Trace
from llmem.parallel import RankTable
from llmem.parallel.dtensor_shards import Part
from llmem.parallel.editor import Editor
from llmem.parallel.fsdp import fsdp2_pipeline
from llmem.parallel.pipeline.action import Action
from llmem.parallel.pipeline.replay_stages import STEPS, StageReplay
from llmem.parallel.pipeline.schedule import SPLIT, actions, in_flight, stages_per_rank
from llmem.parallel.pipeline.stages import Stages, staged, stages_of
from llmem.parallel.sharded_step import Shard, device_of, splice_optimizer, trace_optimizer
from llmem.spec import RunSpec


def ranks(
    trace: Trace, spec: RunSpec, make: Callable[[Trace, RunSpec], list[RankTable]]
) -> list[RankTable]:
    """One table for each kind of rank, numbered ``pp_rank * replicas + replica``.

    ``trace`` is one step of one micro-batch without optimizer; ``make`` is the data-parallel
    engine's ``ranks``, called with each pipeline rank's own trace.
    """
    if spec.strategy == "megatron" and spec.pp_schedule != "1f1b":
        raise LlmemError(
            f"--strategy megatron with --pp-schedule {spec.pp_schedule} is not modelled; use 1f1b"
        )
    if spec.pp_schedule in SPLIT and spec.strategy != "none":
        raise LlmemError(
            f"--pp-schedule {spec.pp_schedule} with --strategy {spec.strategy} is not modelled; use "
            "--strategy none, or another schedule"
        )
    per_rank = stages_per_rank(spec.pp_schedule, spec.virtual_stages)
    stages, whole = _cut(trace, spec, spec.pp * per_rank)
    replicas = spec.gpus // spec.pp
    tables, optimizers = [], _Optimizers(spec)
    for rank in range(spec.pp):
        order = actions(spec.pp_schedule, spec.pp, rank, spec.pipeline_micro_batches, per_rank)
        notes = [_note(spec, stages, in_flight(order), per_rank)]
        replay = StageReplay(stages, spec, order, whole)
        for table in _rank_tables(stages, spec, rank, order, replay, optimizers, make):
            everyone = tuple(rank * replicas + replica for replica in table.ranks)
            told = [*notes, *table.assumptions]
            tables.append(replace(table, rank=everyone[0], ranks=everyone, assumptions=told))
    return tables


def _cut(trace: Trace, spec: RunSpec, number: int) -> tuple[Stages, Stages | None]:
    """The stages, and those of micro-batches whose backward is whole where others' is parted."""
    if spec.pp_schedule not in SPLIT:
        return stages_of(trace, number), None
    whole = staged(trace, number, 1, parted=False) if spec.pp_schedule == "dualpipev" else None
    return staged(trace, number), whole


class _Optimizers:
    """The traced optimizers; ranks whose parameters have the same shapes share one."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._known: dict[tuple[tuple[tuple[int, ...], str, Part | None], ...], Trace] = {}

    def of(self, shards: list[Shard]) -> Trace:
        shapes = tuple((shard.shape, shard.dtype, shard.part) for shard in shards)
        if shapes not in self._known:
            device = device_of(self._spec)
            self._known[shapes] = trace_optimizer(shards, self._spec, device, steps=STEPS)
        return self._known[shapes]


def _rank_tables(
    stages: Stages,
    spec: RunSpec,
    rank: int,
    order: list[Action],
    replay: StageReplay,
    optimizers: _Optimizers,
    make: Callable[[Trace, RunSpec], list[RankTable]],
) -> list[RankTable]:
    """The tables of the replicas of one pipeline rank, numbered from 0."""
    base = replay.trace()
    shards = [
        Shard(p.key, p.name, p.shape, p.dtype, _part(base, p, spec))
        for p in base.parameters
        if p.trainable
    ]
    if not shards:
        raise LlmemError(f"pipeline rank {rank} has nothing to train; use another --method or --pp")
    inner = spec.model_copy(
        update={"gpus": spec.gpus // spec.pp, "pp": 1, "reshard_after_forward": spec.reshards}
    )
    if spec.strategy == "fsdp2":  # which gathers and reduces between micro-batches
        return fsdp2_pipeline.ranks(_with_rows(base), inner, stages, order, replay.placed)
    if spec.strategy == "megatron":  # which has an optimizer of its own
        return make(_with_rows(base), inner)
    step = optimizers.of(shards)
    editor = Editor(base)
    splice_optimizer(editor, shards, step)
    lifetimes, named = editor.finish()
    named = replace(named, lifetimes=lifetimes, optimizer=step.optimizer)
    return make(_with_rows(named), inner)


def _part(trace: Trace, parameter: Parameter, spec: RunSpec) -> Part | None:
    """What of a DTensor the parameter is; only two of the plans have them."""
    if not trace.sharded or spec.tp_plan not in ("transformers", "torchtitan"):
        return None
    if parameter.key not in trace.sharded:
        return Part(*trace.tensor_rank) if spec.sp else None
    dimension, size = trace.sharded[parameter.key]
    table = trace.lifetimes
    gradients = table.take((table.category == Category.GRADIENT) & (table.key == parameter.key))
    local = int(np.prod(parameter.shape)) * parameter.itemsize
    # The first of the step, to which others are added (a tied one's of both ends of a V).
    whole = len(gradients) > 0 and gradients.nbytes[np.argmin(gradients.birth)] > local
    return Part(*trace.tensor_rank, dimension, size, bool(whole))


def _with_rows(trace: Trace) -> Trace:
    """Point each parameter at its row (nothing is dropped before the parameters)."""
    table = trace.lifetimes
    keys = np.flatnonzero((table.category == 0) & (table.key >= 0))
    rows = {int(table.key[row]): int(row) for row in keys}
    return replace(trace, parameters=[replace(p, row=rows[p.key]) for p in trace.parameters])


def _note(spec: RunSpec, stages: Stages, most: int, per_rank: int) -> str:
    size = spec.per_device_train_batch_size // spec.pipeline_micro_batches
    virtual = f", {per_rank} stages per rank" if per_rank > 1 else ""
    whose = "Megatron-LM" if spec.strategy == "megatron" else "torch.distributed.pipelining"
    return (
        f"pipeline: {spec.pp_schedule} of {whose} over {spec.pp} ranks"
        f"{virtual}, {spec.pipeline_micro_batches} micro-batches of {size} sequences, up to {most} "
        f"of them in flight on this rank, {stages.hidden:,} bytes sent per micro-batch"
    )
