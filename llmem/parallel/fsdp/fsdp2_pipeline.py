"""FSDP2 around pipeline stages, as torch.distributed.pipelining 2.13 drives it.

Each stage is ``fully_shard``-ed like a model of its own: its layers, then the stage with what is
left. Read in torch/distributed/pipelining (stage.py: ``backward_maybe_with_nosync`` and
``perform_reduce_grad``; schedules.py: ``_add_unshard_reshard``, ``_add_reduce_grad``):

* backward of a micro-batch neither frees parameters (``set_reshard_after_backward(False)``) nor
  reduces gradients: they stay whole, in the reduce dtype, until the stage's last backward is done;
* then the stage's units are freed and reduced one after the other, the stage itself first, its
  layers in the model's order; an input of reduce-scatter lives until the next unit has begun;
* without ``reshard_after_forward`` (torchtitan's habit under pipelines) the first micro-batch's
  forward gathers all that the step needs; with it, each forward frees its layers, and the next
  backward gathers them again;
* interleaved schedules gather a stage's units at once before the rank gets there (the next three
  stages that it will work on, ``max_active_stages``), copy them out when it does, the stage's own
  first, and free a stage that is not among the next three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmem.errors import LlmemError
from llmem.lifetimes import Category, Parameter, Phase, Trace
from llmem.parallel import RankTable
from llmem.parallel.fsdp.fsdp2 import Fsdp2Pass
from llmem.parallel.fsdp.fsdp2_hooks import Group, Hook, hooks_of
from llmem.parallel.fsdp.fsdp2_ranks import options_of, tables
from llmem.parallel.fsdp.fsdp2_shards import Fsdp2Options
from llmem.parallel.pipeline.action import Action
from llmem.parallel.pipeline.places import Copy
from llmem.parallel.pipeline.stages import Stages
from llmem.parallel.units import Unit, Window, units_of
from llmem.spec import RunSpec

MAX_ACTIVE_STAGES = 3
"""``_add_unshard_reshard``'s default: stages of a rank that are gathered at a time."""
RESHARD, UNSHARD, WAIT, REDUCE = "reshard", "unshard", "wait", "reduce"

Placed = list[dict[Action, list[Copy]]]


def ranks(
    trace: Trace, spec: RunSpec, stages: Stages, order: list[Action], placed: Placed
) -> list[RankTable]:
    """The tables of one pipeline rank's replicas; ``spec`` is that of the data-parallel ranks.

    ``trace`` is the rank's, ``placed`` says where each step's actions are in it. Raises LlmemError
    for what is not modelled.
    """
    if spec.offload != "none" or spec.reshards not in (True, False) or spec.fsdp_units != "blocks":
        raise LlmemError(
            "--pp with --strategy fsdp2 takes --reshard-after-forward true or false, and neither "
            "--offload nor --fsdp-units accelerate"
        )
    options = options_of(spec)
    if spec.keep_last_block:
        options = replace(options, kept=frozenset(stages.trace.wrapped[-1:]))
    runtime = spec.pp_schedule not in ("gpipe", "1f1b")
    mine = sorted({action.stage for action in order})
    parts = [StagePart(_units(trace, stages, placed, stage), stage) for stage in mine]
    notes = [
        f"fsdp2: each stage's layers and what is left of the stage are units, {options.shard_size} "
        f"ranks share a copy, reshard_after_forward {str(options.reshard).lower()}; gathered until "
        "and reduced after the last micro-batch, as torch.distributed.pipelining does"
    ]
    return tables(
        trace, spec, options, notes,
        lambda: PipelinedPass(trace, parts, options, order, placed, runtime=runtime),
    )  # fmt: skip


@dataclass(frozen=True)
class StagePart:
    """One stage of a rank: its units, root first."""

    units: list[Unit]
    stage: int


class PipelinedPass(Fsdp2Pass):
    """Plays FSDP2's hooks over the micro-batches of one pipeline rank."""

    def __init__(
        self,
        trace: Trace,
        parts: Sequence[StagePart],
        options: Fsdp2Options,
        order: list[Action],
        placed: Placed,
        *,
        runtime: bool,
    ) -> None:
        """``runtime``: the schedule has actions that gather and free whole stages."""
        super().__init__(trace, [u for part in parts for u in part.units], trace.masters, options)
        unit_of = {id(group.unit): group for group in self.groups}
        self._stage_groups = {
            part.stage: [unit_of[id(unit)] for unit in part.units] for part in parts
        }
        self._order, self._placed, self._runtime = order, placed, runtime
        self._gradient_rows, self._added = _gradients(trace, order, placed)

    def _play(self, step: int) -> None:
        placed = self._placed[step]
        hooks = [hook for stage in self._stage_groups for hook in self._hooks(stage, step)]
        if self._runtime:
            hooks += self._stage_actions(placed)
        for stage, groups in self._stage_groups.items():
            end = max(c[-1].end for a, c in placed.items() if a.stage == stage and not a.forward)
            hooks.append(Hook(end, 20, REDUCE, groups[0]))
        for hook in sorted(hooks, key=lambda hook: (hook.tick, hook.order, hook.place)):
            self._run(hook, step)

    def _hooks(self, stage: int, step: int) -> Iterator[Hook]:
        for hook in hooks_of(
            self._stage_groups[stage], step, inputs_require_grad=self.options.inputs_require_grad
        ):
            # ``end_backward`` belongs to ``is_last_backward``, which comes with the reduction.
            if hook.name != "end_backward":
                yield replace(hook, last_micro_batch=False)

    def _stage_actions(self, placed: dict[Action, list[Copy]]) -> list[Hook]:
        """UNSHARD, RESHARD and the wait for what was gathered, where the runtime has them."""
        found: list[Hook] = []
        active: list[int] = []
        waiting: set[int] = set()
        for index, action in enumerate(self._order):
            following = list(dict.fromkeys(later.stage for later in self._order[index:]))
            following = following[:MAX_ACTIVE_STAGES]
            tick = placed[action][0].base
            evicted = [stage for stage in active if stage not in following]
            fetched = [stage for stage in following if stage not in active]
            for name, stages in ((RESHARD, evicted), (UNSHARD, fetched)):
                for stage in stages:
                    found.append(Hook(tick, -2, name, self._stage_groups[stage][0], len(found)))
            active = [stage for stage in active if stage in following] + fetched
            waiting.update(fetched)
            if action.stage in waiting:
                waiting.remove(action.stage)
                found.append(Hook(tick, -1, WAIT, self._stage_groups[action.stage][0]))
        return found

    def _run(self, hook: Hook, step: int) -> None:
        group, tick = hook.group, hook.tick
        if hook.name == "pre_forward":
            self._pre_forward(group, tick, step)
        elif hook.name == "post_forward":
            self._post_forward(group, tick, step)
        elif hook.name == "end_forward":
            self._release_held_output(tick)
        elif hook.name == "pre_backward":
            self._pre_backward(group, tick, step)
        elif hook.name == "post_backward":
            self._accumulate(hook, self._mine(group, step), step)
        elif hook.name == REDUCE:
            self._reduce_stage(self._siblings(group), tick, step)
        else:
            self._whole_stage(hook.name, self._siblings(group), tick, step)

    def _whole_stage(self, name: str, groups: list[Group], tick: int, step: int) -> None:
        for group in groups:
            if name == UNSHARD:
                self._unshard(group, tick, Phase.FORWARD, step)
            elif name == RESHARD:
                self._reshard(group, tick)
            elif group.all_gather_output is not None:
                self._copy_out(group, tick)
                self.editor.free(group.all_gather_output, tick)
                group.all_gather_output = None
            else:
                self._copy_alone(group, tick)

    def _reduce_stage(self, groups: list[Group], tick: int, step: int) -> None:
        """``perform_reduce_grad``: every unit's ``post_backward``, then the final callback."""
        for group in groups:
            mine = self._mine(group, step)
            self._take_own_parts(group, mine, tick)
            self._reshard(group, tick)
            self._release_reduce_inputs(tick)
            if mine:
                self._reduce(group, mine, tick, step)
        self.editor.free(self._all_reduced, tick)
        self._all_reduced = []
        self._release_reduce_inputs(tick)

    def _mine(self, group: Group, step: int) -> list[tuple[Parameter, int]]:
        rows = self._gradient_rows
        return [(p, rows[step, p.key]) for p in group.unit.trainable if (step, p.key) in rows]

    def _siblings(self, group: Group) -> list[Group]:
        return next(groups for groups in self._stage_groups.values() if group in groups)

    def _group_before(self, group: Group, step: int) -> Group | None:
        before = super()._group_before(group, step)
        return before if before in self._siblings(group) else None


def _units(trace: Trace, stages: Stages, placed: Placed, stage: int) -> list[Unit]:
    """The stage's units, root first, with their windows in every micro-batch of every step."""
    source = {unit.name: unit for unit in units_of(stages.trace, stages.trace.wrapped)}
    names = stages.names[stage]
    root = Unit("", [], True)
    units = {name: Unit(name, [], False) for name in names}
    layers = {p.key: name for name in names for p in source[name].parameters}
    for parameter in trace.parameters:
        if stage in stages.holders[parameter.key]:
            layer = layers.get(parameter.key)
            (root if layer is None else units[layer]).parameters.append(parameter)
    for step, actions in enumerate(placed):
        for action, copies in actions.items():
            if action.stage != stage:
                continue
            whole = Window(copies[0].base, copies[-1].end)
            (root.forward if action.forward else root.backward).setdefault(step, []).append(whole)
            for name, unit in units.items():
                _place(unit, source[name], step, copies[-1], forward=action.forward)
    return [root, *units.values()]


def _place(unit: Unit, source: Unit, step: int, copy: Copy, *, forward: bool) -> None:
    """Add the windows of ``source`` (of one micro-batch) to ``unit``, moved to ``copy``."""
    pairs = (
        [(unit.forward, source.forward)]
        if forward
        else [(unit.backward, source.backward), (unit.again, source.again)]
    )
    for mine, theirs in pairs:
        for window in theirs.get(0, []):
            start = max(int(copy.move(window.start)), copy.base)
            end = min(int(copy.move(window.end)), copy.end)
            mine.setdefault(step, []).append(Window(start, end))


def _gradients(
    trace: Trace, order: list[Action], placed: Placed
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int, int], list[int]]]:
    """Rows of the gradients of each step's first backward, and of those that are added to them.

    (step, key) -> row; (step, number of the stage's backward, key) -> rows.
    """
    table = trace.lifetimes
    first: dict[tuple[int, int], int] = {}
    added: dict[tuple[int, int, int], list[int]] = {}
    made = (table.category == Category.GRADIENT) & (table.key >= 0)
    numbers = {action: n for n, action in _numbered(order)}
    for step, actions in enumerate(placed):
        for action in (a for a in order if not a.forward):
            [copy] = actions[action]
            inside = made & (table.birth > copy.base) & (table.birth <= copy.end)
            for row in np.flatnonzero(inside).tolist():
                key = int(table.key[row])
                if first.setdefault((step, key), row) != row:
                    added.setdefault((step, numbers[action], key), []).append(row)
    return first, added


def _numbered(order: list[Action]) -> Iterator[tuple[int, Action]]:
    """Each backward with its number among those of its stage."""
    counts: dict[int, int] = {}
    for action in order:
        if not action.forward:
            counts[action.stage] = counts.get(action.stage, -1) + 1
            yield counts[action.stage], action
