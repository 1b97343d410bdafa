"""Repeat a pipeline rank's share of a traced step in the order of its schedule.

Time is cut into windows (see ``Stages``); each action of the schedule copies its windows' births,
deaths and ops to the next free ticks. Within a copy all distances stay.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmem.lifetimes import (
    COLUMNS,
    NEVER,
    OP_COLUMNS,
    TICK,
    Category,
    Lifetimes,
    Ops,
    Phase,
    Trace,
)
from llmem.parallel.pipeline.action import Action, Kind, closing
from llmem.parallel.pipeline.handed_over import HandedOver
from llmem.parallel.pipeline.places import Copy, Plan
from llmem.parallel.pipeline.stage_rows import StageRows
from llmem.parallel.pipeline.stages import Stages, Window
from llmem.spec import RunSpec

STEPS = 2
"""Optimizer steps: the first one makes the optimizer's states, the second one finds them there."""


class StageReplay:
    """One rank's trace without its optimizer; ``order`` is its schedule for one step.

    ``stages`` are those of the trace; ``whole``, if given, those of micro-batches whose backward is
    not parted, where others' is.
    """

    def __init__(
        self, stages: Stages, spec: RunSpec, order: list[Action], whole: Stages | None = None
    ) -> None:
        self._stages = stages
        self._spec = spec
        self._order = order
        self._closing = closing(order)
        self._megatron = spec.strategy == "megatron"
        self._held = HandedOver(spec.pp_schedule, order, stages.number, megatron=self._megatron)
        self._mine = {action.stage for action in order}
        self._source = stages.trace
        self._holders = stages.holders
        self._now = (self._source.step_ticks[0] // TICK + 1) * TICK
        self._columns: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self._op_columns: list[list[NDArray[Any]]] = [[] for _ in OP_COLUMNS]
        self._number_of_ops = 0
        self._phases: list[tuple[int, Phase, int]] = [(0, Phase.SETUP, 0)]
        self._ready: dict[tuple[int, int], int] = {}
        self._rows = StageRows(stages)
        self._whole = self._rows if whole is None else StageRows(whole)
        self._step, self._dropped = 0, int(NEVER)
        self._following: Plan | None = None
        self._summed: set[int] = set()  # parameters whose first gradient of the step has been made
        self.placed: list[dict[Action, list[Copy]]] = []
        """Of each step, after ``trace``: where the windows of each action went."""

    def trace(self) -> Trace:
        """Parameters, receive buffers and all steps."""
        self._existing()
        buffers = self._receive_buffers()
        step_ticks = [self._now]
        plans: list[Plan] = []
        for step in range(STEPS):
            plans.append(self._plan(step))
            step_ticks.append(self._now)
        self.placed = [plan.copies for plan in plans]
        for birth, buffer in buffers:
            death = self._held.buffer(*buffer, plans[0])
            self._add_one(self._stages.hidden, birth, death, Category.COMMUNICATION)
        for step, plan in enumerate(plans):
            self._fill(plan, plans[step + 1] if step + 1 < STEPS else None, step)
        kinds: list[Any] = list(OP_COLUMNS)
        ops: list[NDArray[Any]] = [
            np.concatenate(parts).astype(kind)
            for parts, kind in zip(self._op_columns, kinds, strict=True)
        ]
        order = np.argsort(ops[4], kind="stable")
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        table = {name: np.concatenate(self._columns[name]).astype(COLUMNS[name]) for name in COLUMNS}
        known = table["birth_op"] >= 0
        table["birth_op"][known] = position[table["birth_op"][known]]
        nothing = np.empty(0, np.int64)
        parameters = [p for p in self._source.parameters if self._here(p.key)]
        return replace(
            self._source,
            ops=Ops(*(column[order] for column in ops)),
            lifetimes=Lifetimes(**table),
            touch_op=nothing, touch_row=nothing, touch_kind=nothing.astype(np.int8), spans=[],
            parameters=parameters, gradient_ready=self._ready, step_ticks=step_ticks,
            phase_ticks=self._phases,
        )  # fmt: skip

    # -- what is there before the first step -----------------------------------------------------

    def _here(self, key: int) -> bool:
        return any(stage in self._mine for stage in self._holders[key])

    def _existing(self) -> None:
        """This rank's parameters, and the buffers of its layers and of no layer."""
        table = self._source.lifetimes
        keys = [p.key for p in self._source.parameters if not self._here(p.key)]
        others = [
            f"{layer}." for stage, names in enumerate(self._stages.names)
            if stage not in self._mine for layer in names
        ]  # fmt: skip
        away = np.array([m.startswith(tuple(others)) for m in self._source.modules], np.bool_)
        there = table.birth <= self._source.step_ticks[0]
        dropped = np.isin(table.key, keys) & (table.category == Category.PARAMETER)
        dropped |= away[table.module] & (table.category == Category.BUFFER)
        dropped |= table.category == Category.GRADIENT  # of earlier micro-batches
        self._add(np.flatnonzero(there & ~dropped), table.birth, table.death, None)

    def _receive_buffers(self) -> list[tuple[int, tuple[int, int, bool]]]:
        """The birth of each, and what it is for."""
        made = []
        for buffer in self._held.buffers(self._spec.pipeline_micro_batches):
            made.append((self._now, buffer))
            self._now += TICK
        return made

    # -- one step: places first, then rows -------------------------------------------------------

    def _plan(self, step: int) -> Plan:
        """Give every action of the step its ticks."""
        plan = Plan(self._now, self._order)
        self._phase(Phase.ZERO_GRAD, step)
        self._phase(Phase.BATCH, step)
        plan.batch = self._now
        self._now += (len(np.flatnonzero(self._rows.inputs)) + 1) * TICK
        plan.begin = self._now - 1
        for action in self._order:
            self._phase(Phase.FORWARD if action.forward else Phase.BACKWARD, step)
            copies = []
            for window in self._rows_of(action).stages.windows(action):
                copies.append(Copy(window, self._now))
                self._now += len(window)
            plan.copies[action] = copies
            self._now += TICK
        plan.end = self._now
        self._phase(Phase.OPTIMIZER, step)
        plan.tail = self._now
        self._phase(Phase.OTHER, step)
        return plan

    def _phase(self, phase: Phase, step: int) -> None:
        self._phases.append((self._now + 1, phase, step))
        self._now += TICK

    def _rows_of(self, action: Action) -> StageRows:
        """Those of the traced micro-batch whose backward is as that of ``action``'s."""
        is_whole = self._closing[action.stage, action.micro][0].kind is Kind.BACKWARD
        return self._whole if is_whole else self._rows

    def _fill(self, plan: Plan, following: Plan | None, step: int) -> None:
        """Copy ops and rows of every action to the places of the plan."""
        self._step, self._following = step, following
        self._summed.clear()
        self._dropped = self._gradients_dropped(plan, following)
        self._batch(plan)
        first = next(a for a in self._order if not a.forward)
        for action in self._order:
            if action.forward:
                self._forward(action, plan, first=step == 0 and action == self._order[0])
            else:
                self._backward(action, plan, first=step == 0 and action == first)

    def _gradients_dropped(self, plan: Plan, following: Plan | None) -> int:
        """Tick at which the loop drops this step's gradients."""
        if self._spec.zero_grad == "after_step":
            return plan.tail
        if following is None:
            return int(NEVER)
        if self._spec.zero_grad == "before_forward":
            return following.start + TICK // 2
        first = next(a for a in self._order if not a.forward)
        return following.copies[first][0].base

    def _batch(self, plan: Plan) -> None:
        """The whole batch of the step, all micro-batches of it, on every rank."""
        table = self._source.lifetimes
        micro = self._spec.pipeline_micro_batches
        for number, row in enumerate(np.flatnonzero(self._rows.inputs).tolist()):
            birth = plan.batch + number * TICK
            self._add_one(int(table.nbytes[row]) * micro, birth, plan.end, Category.INPUT)

    def _forward(self, action: Action, plan: Plan, first: bool) -> None:
        table, stage, these = self._source.lifetimes, action.stage, self._rows_of(action)
        prelude, body = plan.copies[action]
        backward = plan.backward(action)
        for copy in (prelude, body):
            births = copy.window.holds(table.birth) & ~these.kept
            if copy is prelude and stage > 0:
                births &= ~these.embedded
            rows = np.flatnonzero(births)
            death = table.death[rows]
            # What dies in another stage's part (masks, positions) dies when this one's ends.
            in_backward = death > these.stages.forward[-1].end
            later = np.where(in_backward, backward[-1].end, body.end)
            for inside in (prelude, body, *backward):
                here = inside.window.holds(death)
                later[here] = inside.move(death[here])
            sent = np.isin(rows, these.sent(stage))
            later[sent] = self._held.output(action, plan, self._following)
            if copy is prelude and stage > 0 and self._megatron:
                self._receive(copy.base, backward[-1].end)
            self._add(rows, copy.move(table.birth), later, copy, full=False)
            self._copy_ops(copy, Phase.FORWARD)
        if first:
            self._persist(self._stages.prelude.start, self._stages.forward[-1].end, prelude)

    def _backward(self, action: Action, plan: Plan, first: bool) -> None:
        table, these = self._source.lifetimes, self._rows_of(action)
        [copy] = plan.copies[action]
        window, sent = copy.window, self._held.gradient(action, plan, self._following)
        rows = np.flatnonzero(window.holds(table.birth) & ~these.kept)
        keys = these.gradient_keys(rows, action.stage)
        needed = ~these.only_summed(rows, keys)
        rows, keys = rows[needed], keys[needed]
        gradient = keys >= 0
        death = table.death[rows]
        later = np.full(len(rows), sent, np.int64)
        for inside in (copy, *plan.backward(action)):
            here = inside.window.holds(death) & ~gradient
            later[here] = inside.move(death[here])
        ready = these.ready_ticks(rows, keys, window)
        later[gradient] = copy.move(ready[gradient])
        if not self._megatron:  # whose buffer has the sum
            later[gradient & ~np.isin(keys, list(self._summed))] = self._dropped
        self._summed.update(keys[gradient].tolist())
        for key, tick in zip(keys[gradient].tolist(), ready[gradient].tolist(), strict=True):
            self._ready[self._step, key] = int(copy.move(tick))
        self._add(rows, copy.move(table.birth), later, copy, full=False, keys=keys)
        self._arriving_gradients(these, copy, sent)
        if self._megatron and action.stage < self._stages.number - 1:
            self._receive(copy.base, self._next_receive(action, plan))
        self._copy_ops(copy, Phase.BACKWARD)
        if first:
            self._persist(self._stages.forward[-1].end, int(NEVER) - 1, copy)

    def _receive(self, base: int, until: int) -> None:
        """What Megatron-LM receives before an action (``_communicate`` makes it)."""
        self._add_one(self._stages.hidden, base, until, Category.COMMUNICATION)

    def _next_receive(self, action: Action, plan: Plan) -> int:
        """``output_tensor_grad`` holds one gradient until the next has been received."""
        following = Action(Kind.BACKWARD, action.stage, action.micro + 1)
        return plan.copies[following][0].base + 1 if following in plan.copies else plan.end

    def _arriving_gradients(self, these: StageRows, copy: Copy, sent: int) -> None:
        table, window = self._source.lifetimes, copy.window
        for row, tick in these.added_to(window):
            death = int(table.death[row])
            later = int(copy.move(death)) if death <= window.end else sent
            birth = int(copy.move(tick))
            self._add_one(int(table.nbytes[row]), birth, later, Category.ACTIVATION_GRADIENT)

    def _persist(self, start: int, end: int, copy: Copy) -> None:
        table = self._source.lifetimes
        kept = self._rows.kept & Window(start, end).holds(table.birth)
        for row in np.flatnonzero(kept).tolist():
            self._add_one(int(table.nbytes[row]), copy.base + 1, int(NEVER), Category.WORKSPACE)

    # -- adding ----------------------------------------------------------------------------------

    def _copy_ops(self, copy: Copy, phase: Phase) -> None:
        ops = self._source.ops
        first, last = np.searchsorted(ops.tick, [copy.window.start, copy.window.end])
        parts: tuple[NDArray[Any], ...] = (ops.name, ops.module, ops.phase, ops.step, ops.tick, ops.recompute)
        for column, values in zip(self._op_columns, parts, strict=True):
            column.append(values[first:last].copy())
        self._op_columns[2][-1][:] = int(phase)
        self._op_columns[3][-1][:] = self._step
        self._op_columns[4][-1] = copy.move(ops.tick[first:last])
        self._number_of_ops += int(last - first)

    def _add(
        self,
        rows: NDArray[np.int64],
        birth: Any,
        death: Any,
        copy: Copy | None,
        *,
        full: bool = True,
        keys: NDArray[np.int64] | None = None,
    ) -> None:
        """Rows of the source with other births and deaths; ``death`` is of all rows if ``full``."""
        table = self._source.lifetimes
        for name in COLUMNS:
            self._columns[name].append(getattr(table, name)[rows].copy())
        self._columns["birth"][-1] = birth[rows]
        self._columns["death"][-1] = death[rows] if full else death
        self._columns["death_op"][-1] = np.full(len(rows), -1)
        if copy is None:
            self._columns["birth_op"][-1] = np.full(len(rows), -1)
        else:
            first = int(np.searchsorted(self._source.ops.tick, copy.window.start))
            moved = table.birth_op[rows] - first + self._number_of_ops
            self._columns["birth_op"][-1] = np.where(table.birth_op[rows] >= 0, moved, -1)
        if keys is not None:
            category = self._columns["category"][-1]
            category[(category == Category.GRADIENT) & (keys < 0)] = Category.ACTIVATION_GRADIENT
            category[keys >= 0] = Category.GRADIENT
            self._columns["key"][-1] = keys

    def _add_one(self, nbytes: int, birth: int, death: int, category: Category) -> None:
        values = {"nbytes": nbytes, "birth": birth, "death": death, "category": int(category)}
        for name in COLUMNS:
            default = -1 if name in ("birth_op", "death_op", "key") else 0
            self._columns[name].append(np.array([values.get(name, default)]))
