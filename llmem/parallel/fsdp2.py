"""FSDP2 (``torch.distributed.fsdp.fully_shard``), as torch 2.6 to 2.13 runs it.

Read in torch/distributed/fsdp/_fully_shard (``_fsdp_param_group.py`` for the order of events,
``_fsdp_collectives.py`` for the buffers, ``_fsdp_param.py`` for the shards):

* a parameter's shard is its chunk along dim 0, padded to ceil(d0/N) rows, in one storage;
* unsharding a group allocates, on the copy-in stream, a flat input (only to change the dtype) and
  an all-gather output of N padded shards; waiting for it allocates one buffer per parameter on the
  compute stream and copies out. In forward the all-gather output lives until after the next
  group's copy-out (or the root's end); in backward it is freed right after its own;
* backward unshards the group, then prefetches the one that ran before it in forward;
* after backward of a group its parameters are freed, the gradients are copied into one
  reduce-scatter input (reduce dtype, padded) and freed; the output, allocated on the
  reduce-scatter stream, is cast to the original dtype and its views become the gradients. The
  input lives until the next group reduces (or backward ends);
* the root group (embedding, final norm, head) is not resharded after forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, prod

import numpy as np

from llmem.lifetimes import NEVER, Category, Parameter, Phase, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.gradients import added_gradients, gradient_rows
from llmem.parallel.units import Unit

COPY_IN_STREAM, REDUCE_SCATTER_STREAM, ALL_REDUCE_STREAM = 1, 2, 3


@dataclass(frozen=True)
class Fsdp2Options:
    """Arguments of ``fully_shard``; dtypes as torch names, None keeps the parameters' own.

    ``shard_size`` ranks share one copy (the world, or fewer for HSDP). ``reshard`` is
    ``reshard_after_forward`` of the blocks, ``root_reshard`` that of the root.
    """

    shard_size: int
    replicas: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard: bool | int = True
    root_reshard: bool = False
    kept: frozenset[str] = frozenset()
    """Names of units with ``reshard_after_forward=False`` whatever the others have."""


ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1, "uint8": 1}


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


@dataclass
class _Group:
    """A unit's buffers while the step is played through."""

    unit: Unit
    gathered: list[int] = field(default_factory=list)
    all_gather_output: int | None = None
    unsharded: bool = False
    post_forward: list[int] = field(default_factory=list)
    accumulated: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Hook:
    """A hook of FSDP2 at a tick; ``order`` sorts those at the same one."""

    tick: int
    order: int
    name: str
    group: _Group
    micro_batch: int = 0
    last_micro_batch: bool = True


class Fsdp2Pass:
    """Plays FSDP2's hooks over a trace; one instance per rank."""

    def __init__(
        self, trace: Trace, units: list[Unit], masters: dict[int, str], options: Fsdp2Options
    ) -> None:
        """``masters``: dtype of each parameter's shard by key (the trace has the compute dtype)."""
        self.editor = Editor(trace)
        self.trace = trace
        self.options = options
        self.masters = masters
        self.root = units[0]
        self.groups = [_Group(unit) for unit in units if unit.parameters]
        self._held_output: int | None = None
        self._reduce_inputs: list[int] = []
        self._gradient_rows = gradient_rows(trace)
        self._added = added_gradients(trace)

    # -- the whole step ------------------------------------------------------------------------

    def run(self) -> Editor:
        """Replace parameters and gradients by shards, and add what is gathered and reduced."""
        self._shard_parameters()
        for step in range(len(self.trace.step_ticks) - 1):
            self._play(step)
        return self.editor

    def _shard_parameters(self) -> None:
        rows = [p.row for p in self.trace.parameters]
        self.editor.drop(np.unique(np.array(rows, np.int64)))
        for group in self.groups:
            for parameter in group.unit.parameters:
                self.editor.add(
                    padded_shard(parameter, self.options.shard_size)
                    * ITEMSIZE[self.masters[parameter.key]],
                    self.editor.at(0),
                    category=Category.PARAMETER,
                    module=group.unit.name,
                    key=parameter.key,
                )

    def _play(self, step: int) -> None:
        """All hooks of one step, in program order."""
        hooks = sorted(self._hooks(step), key=lambda hook: (hook.tick, hook.order))
        for hook in hooks:
            if hook.name == "pre_forward":
                self._pre_forward(hook.group, hook.tick, step)
            elif hook.name == "post_forward":
                self._post_forward(hook.group, hook.tick, step)
            elif hook.name == "pre_backward":
                self._pre_backward(hook.group, hook.tick, step)
            else:
                self._post_backward(hook, step)
            if hook is hooks[-1]:  # the end of ``_root_post_backward_final_callback``
                self._release_reduce_inputs(hook.tick)

    def _hooks(self, step: int) -> Iterator[_Hook]:
        """Every hook of a step, in no particular order."""
        for group in self.groups:
            unit = group.unit
            # Where nothing is allocated between two blocks, one still ends before the next starts.
            before, after = (0, 3) if unit.is_root else (2, 1)
            for window in unit.forward.get(step, []):
                yield _Hook(window.start, before, "pre_forward", group)
                yield _Hook(window.end, after, "post_forward", group)
            windows = unit.backward.get(step, [])
            before, after = (5, 9) if unit.is_root else (6, 4)
            for micro, window in enumerate(windows):
                last = micro == len(windows) - 1
                end = window.end
                if not unit.is_root and end == self.root.backward[step][micro].end:
                    # Its inputs need no gradient, so it waits for the callback at the end of
                    # backward (``_root_post_backward_final_callback``), where the root is first.
                    after = 10
                yield _Hook(window.start, before, "pre_backward", group)
                yield _Hook(end, after, "post_backward", group, micro, last)

    # -- hooks -----------------------------------------------------------------------------------

    def _pre_forward(self, group: _Group, tick: int, step: int) -> None:
        self._unshard(group, tick, Phase.FORWARD, step)
        if group.all_gather_output is None:
            return
        # ``wait_for_unshard`` drops the one held before, but its own local keeps it to the end.
        self._copy_out(group, tick)
        self._release_held_output(tick)
        self._held_output, group.all_gather_output = group.all_gather_output, None

    def _post_forward(self, group: _Group, tick: int, step: int) -> None:
        reshard = self.options.root_reshard if group.unit.is_root else self.options.reshard
        if group.unit.name in self.options.kept:
            reshard = False
        if reshard is not False:
            if reshard is not True and not group.unit.is_root:
                self._keep_smaller_shard(group, int(reshard), tick)
            self._reshard(group, tick)
        if group.unit.is_root:
            self._release_held_output(tick)

    def _pre_backward(self, group: _Group, tick: int, step: int) -> None:
        self._unshard(group, tick, Phase.BACKWARD, step)
        if group.all_gather_output is not None:
            self._copy_out(group, tick)
            self.editor.free(group.all_gather_output, tick)
            group.all_gather_output = None
        before = self._group_before(group, step)
        if before is not None:
            self._unshard(before, tick, Phase.BACKWARD, step)

    def _post_backward(self, hook: _Hook, step: int) -> None:
        group, tick = hook.group, hook.tick
        mine = [
            (p, row)
            for p in group.unit.trainable
            if (row := self._gradient_rows.get((step, p.key))) is not None
        ]
        self._accumulate(hook, mine, step)
        self._reshard(group, tick)
        if not hook.last_micro_batch:  # no_sync: reduced after the last micro-batch only
            return
        self._release_reduce_inputs(tick)
        if mine:
            self._reduce(group, mine, tick, step)

    def _accumulate(self, hook: _Hook, mine: list[tuple[Parameter, int]], step: int) -> None:
        """Gradients kept between micro-batches have the reduce dtype.

        (``to_accumulated_grad_if_needed`` and ``accumulate_unsharded_grad_if_needed``: a copy per
        parameter after the first micro-batch, to which later gradients are added.)
        """
        group, tick, editor = hook.group, hook.tick, self.editor
        reduced = self.options.reduce_dtype
        if reduced is None or not mine or reduced == self._gather_dtype(mine[0][0]):
            return
        if hook.micro_batch == 0:
            if hook.last_micro_batch:
                return
            for parameter, row in mine:
                nbytes = parameter.numel * ITEMSIZE[reduced]
                kept = editor.add(
                    nbytes, editor.at(tick), category=Category.GRADIENT,
                    module=group.unit.name, key=parameter.key,
                )  # fmt: skip
                group.accumulated.append(kept)
                editor.end(row, editor.at(tick))
            return
        for parameter, _ in mine:
            for temporary in self._added.get((step, hook.micro_batch, parameter.key), []):
                editor.end(temporary, editor.at(tick))

    # -- buffers ---------------------------------------------------------------------------------

    def _unshard(self, group: _Group, tick: int, phase: Phase, step: int) -> None:
        if group.unsharded or group.all_gather_output is not None or self.options.shard_size == 1:
            return
        editor, name = self.editor, group.unit.name
        op = editor.op("all_gather", name, phase, step, editor.at(tick))
        flat = sum(
            padded_shard(p, self.options.shard_size) * ITEMSIZE[self._gather_dtype(p)]
            for p in group.unit.parameters
        )
        ranks = self.options.shard_size
        if group.post_forward:
            ranks = int(self.options.reshard)
            flat = ceil(flat * self.options.shard_size / ranks)
        temporary = None
        if self.options.param_dtype is not None:
            temporary = editor.add(flat, editor.at(tick), module=name, op=op, stream=COPY_IN_STREAM)
        group.all_gather_output = editor.add(
            flat * ranks, editor.at(tick), module=name, op=op, stream=COPY_IN_STREAM
        )
        if temporary is not None:
            editor.free(temporary, tick)

    def _copy_out(self, group: _Group, tick: int) -> None:
        editor = self.editor
        for parameter in group.unit.parameters:
            group.gathered.append(
                editor.add(
                    padded_shard(parameter, self.options.shard_size)
                    * self.options.shard_size
                    * ITEMSIZE[self._gather_dtype(parameter)],
                    editor.at(tick),
                    module=group.unit.name,
                    key=parameter.key,
                )
            )
        group.unsharded = True
        editor.free(group.post_forward, tick)
        group.post_forward = []

    def _reshard(self, group: _Group, tick: int) -> None:
        self.editor.free(group.gathered, tick)
        group.gathered = []
        group.unsharded = False

    def _keep_smaller_shard(self, group: _Group, ranks: int, tick: int) -> None:
        """``reshard_after_forward=int``: a copy of 1/int of each parameter stays for backward."""
        for parameter in group.unit.parameters:
            group.post_forward.append(
                self.editor.add(
                    padded_shard(parameter, ranks) * ITEMSIZE[self._gather_dtype(parameter)],
                    self.editor.at(tick),
                    module=group.unit.name,
                    key=parameter.key,
                )
            )

    def _reduce(
        self, group: _Group, mine: list[tuple[Parameter, int]], tick: int, step: int
    ) -> None:
        editor, ranks = self.editor, self.options.shard_size
        op = editor.op("reduce_scatter", group.unit.name, Phase.BACKWARD, step, editor.at(tick))
        computed = self._gather_dtype(mine[0][0])
        reduced = self.options.reduce_dtype or computed
        original = self.masters[mine[0][0].key]
        elements = sum(padded_shard(p, ranks) for p, _ in mine)
        name = group.unit.name
        self._reduce_inputs.append(
            editor.add(elements * ranks * ITEMSIZE[reduced], editor.at(tick), module=name, op=op)
        )
        if group.accumulated:
            editor.free(group.accumulated, tick)
            group.accumulated = []
        else:
            for _, row in mine:
                editor.end(row, editor.at(tick))
        output = editor.add(
            elements * ITEMSIZE[reduced],
            editor.at(tick),
            module=name,
            op=op,
            stream=REDUCE_SCATTER_STREAM,
            category=Category.GRADIENT if reduced == original else Category.COMMUNICATION,
        )
        if reduced != original:
            cast = editor.add(
                elements * ITEMSIZE[original],
                editor.at(tick),
                module=name,
                op=op,
                stream=REDUCE_SCATTER_STREAM,
                category=Category.GRADIENT,
            )
            editor.free(output, tick)
            output = cast
        dropped = int(self.trace.lifetimes.death[[row for _, row in mine]].max())
        if dropped != NEVER:  # when zero_grad lets go of the gradients
            editor.free(output, dropped)

    # -- small questions -------------------------------------------------------------------------

    def _gather_dtype(self, parameter: Parameter) -> str:
        return self.options.param_dtype or self.masters[parameter.key]

    def _group_before(self, group: _Group, step: int) -> _Group | None:
        """The group whose forward ended just before this one's (what backward prefetches)."""
        order = self._post_forward_order(step)
        index = order.index(group) if group in order else 0
        return order[index - 1] if index > 0 else None

    def _post_forward_order(self, step: int) -> list[_Group]:
        ran = [g for g in self.groups if step in g.unit.forward]
        return sorted(ran, key=lambda g: (g.unit.forward[step][-1].end, 1 if g.unit.is_root else 0))

    def _release_reduce_inputs(self, tick: int) -> None:
        while self._reduce_inputs:
            self.editor.free(self._reduce_inputs.pop(0), tick)

    def _release_held_output(self, tick: int) -> None:
        if self._held_output is not None:
            self.editor.free(self._held_output, tick)
            self._held_output = None
