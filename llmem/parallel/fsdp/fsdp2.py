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
* the root group (embedding, final norm, head) is not resharded after forward;
* HSDP all-reduces the output among the replicas before the cast, on a stream of its own, and holds
  what it all-reduced until backward ends (``AllReduceState``);
* ``reshard_after_forward=N`` copies a part of each gathered parameter, from which backward gathers;
* ``CPUOffloadPolicy`` keeps shards, and gradients once they are reduced, on the host: a shard is
  copied to the copy-in stream and cast there, parameter by parameter, before it is gathered;
* a rank that shares with nobody copies (and casts) its parameters instead of gathering them.
"""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import NEVER, Category, Parameter, Phase, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.fsdp.fsdp2_hooks import Group, Hook, hooks_of
from llmem.parallel.fsdp.fsdp2_shards import ITEMSIZE, Fsdp2Options, padded_shard
from llmem.parallel.gradients import added_gradients, gradient_rows
from llmem.parallel.units import Unit

COPY_IN_STREAM, REDUCE_SCATTER_STREAM, ALL_REDUCE_STREAM = 1, 2, 3


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
        # The root of which the units took all parameters still has its hooks.
        self.groups = [Group(unit) for unit in units if unit.parameters or unit.is_root]
        self._held_output: int | None = None
        self._reduce_inputs: list[int] = []
        self._all_reduced: list[int] = []
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
        for group in [] if self.options.offload else self.groups:
            for parameter in group.unit.parameters:
                self.editor.add(
                    padded_shard(parameter, self.options.ranks(parameter))
                    * ITEMSIZE[self.masters[parameter.key]],
                    self.editor.at(0),
                    category=Category.PARAMETER,
                    module=group.unit.name,
                    key=parameter.key,
                )

    def _play(self, step: int) -> None:
        """All hooks of one step, in program order."""
        required = self.options.inputs_require_grad
        for hook in hooks_of(self.groups, step, inputs_require_grad=required):
            if hook.name == "pre_forward":
                self._pre_forward(hook.group, hook.tick, step)
            elif hook.name == "post_forward":
                self._post_forward(hook.group, hook.tick, step)
            elif hook.name == "end_forward":
                self._release_held_output(hook.tick)
            elif hook.name == "pre_backward":
                self._pre_backward(hook.group, hook.tick, step)
            elif hook.name == "post_backward":
                self._post_backward(hook, step)
            else:
                self._end_backward(hook.tick)

    # -- hooks -----------------------------------------------------------------------------------

    def _pre_forward(self, group: Group, tick: int, step: int) -> None:
        self._unshard(group, tick, Phase.FORWARD, step)
        if self._copy_alone(group, tick):
            self._release_held_output(tick)
        if group.all_gather_output is None:
            return
        # ``wait_for_unshard`` drops the one held before, but its own local keeps it to the end.
        self._copy_out(group, tick)
        self._release_held_output(tick)
        self._held_output, group.all_gather_output = group.all_gather_output, None

    def _post_forward(self, group: Group, tick: int, step: int) -> None:
        reshard = self.options.root_reshard if group.unit.is_root else self.options.reshard
        if group.unit.name in self.options.kept:
            reshard = False
        if reshard is not False:
            if reshard is not True and not group.unit.is_root:
                self._keep_smaller_shard(group, tick)
            self._reshard(group, tick)
        if group.unit.is_root:
            self._release_held_output(tick)  # _post_forward of iter_forward_root

    def _pre_backward(self, group: Group, tick: int, step: int) -> None:
        self._unshard(group, tick, Phase.BACKWARD, step)
        self._copy_alone(group, tick)
        if group.all_gather_output is not None:
            self._copy_out(group, tick)
            self.editor.free(group.all_gather_output, tick)
            group.all_gather_output = None
        before = self._group_before(group, step)
        if before is not None:
            self._unshard(before, tick, Phase.BACKWARD, step)

    def _post_backward(self, hook: Hook, step: int) -> None:
        group, tick = hook.group, hook.tick
        mine = [
            (p, row)
            for p in group.unit.trainable
            if (row := self._gradient_rows.get((step, p.key))) is not None
        ]
        self._accumulate(hook, mine, step)
        if hook.last_micro_batch:
            self._take_own_parts(group, mine, tick)
        self._reshard(group, tick)
        if not hook.last_micro_batch or not group.unit.parameters:  # no_sync: reduced after the last micro-batch only
            return
        self._release_reduce_inputs(tick)
        if mine:
            self._reduce(group, mine, tick, step)

    def _end_backward(self, tick: int) -> None:
        """The end of ``_root_post_backward_final_callback``, with ``finalize_backward``."""
        for group in self.groups:
            if group.all_gather_output is not None:  # prefetched, but backward did not come there
                self.editor.free(group.all_gather_output, tick)
                group.all_gather_output = None
        self.editor.free(self._all_reduced, tick)
        self._all_reduced = []
        self._release_reduce_inputs(tick)

    def _accumulate(self, hook: Hook, mine: list[tuple[Parameter, int]], step: int) -> None:
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
                numel = int(self.trace.lifetimes.nbytes[row]) // self._itemsize(parameter)
                nbytes = numel * ITEMSIZE[reduced]
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

    def _take_own_parts(self, group: Group, mine: list[tuple[Parameter, int]], tick: int) -> None:
        """``_get_grad_inner_tensor``: a tensor-parallel rank's part is copied, the whole dropped.

        DTensor makes the gradient of an embedding with the rows of the whole vocabulary.
        """
        editor, table = self.editor, self.trace.lifetimes
        for index, (parameter, row) in enumerate(mine):
            itemsize = self._itemsize(parameter)
            if table.nbytes[row] <= parameter.numel * itemsize:
                continue
            if group.accumulated:
                itemsize = ITEMSIZE[self.options.reduce_dtype or self._gather_dtype(parameter)]
            part = editor.add(
                parameter.numel * itemsize, editor.at(tick), category=Category.GRADIENT,
                module=group.unit.name, key=parameter.key,
            )  # fmt: skip
            if group.accumulated:
                editor.free(group.accumulated[index], tick)
                group.accumulated[index] = part
            else:
                editor.end(row, editor.at(tick))
                group.own_parts[row] = part

    # -- buffers ---------------------------------------------------------------------------------

    def _unshard(self, group: Group, tick: int, phase: Phase, step: int) -> None:
        there = group.unsharded or group.all_gather_output is not None
        if there or not group.unit.parameters or self._ranks(group) == 1:
            return
        editor, name = self.editor, group.unit.name
        op = editor.op("all_gather", name, phase, step, editor.at(tick))
        inputs = self._gather_inputs(group, tick, op)
        group.all_gather_output = editor.add(
            sum(self._gathered_bytes(p) for p in group.unit.parameters),
            editor.at(tick), module=name, op=op, stream=COPY_IN_STREAM,
        )  # fmt: skip
        editor.free(inputs, tick)

    def _gather_inputs(self, group: Group, tick: int, op: int) -> list[int]:
        """What ``_get_param_all_gather_inputs`` allocates: copies from the host, or one flat cast."""
        if self.options.offload:
            shards = [] if group.post_forward else group.unit.parameters
            return [
                made
                for p in shards
                if (made := self._input_of(p, group, tick, COPY_IN_STREAM, op)) is not None
            ]
        ranks = int(self.options.reshard) if group.post_forward else self._ranks(group)
        cast = [
            p
            for p in group.unit.parameters
            if self._gather_dtype(p) != self.masters[p.key]
        ]
        flat = sum(self._gathered_bytes(p) for p in cast) // ranks
        if not flat:
            return []
        name = group.unit.name
        return [self.editor.add(flat, self.editor.at(tick), module=name, op=op, stream=COPY_IN_STREAM)]

    def _input_of(
        self, parameter: Parameter, group: Group, tick: int, stream: int = 0, op: int = -1
    ) -> int | None:
        """``FSDPParam.all_gather_inputs``: the shard from the host, then in the computed dtype."""
        editor, kept = self.editor, self.masters[parameter.key]
        numel = padded_shard(parameter, self.options.ranks(parameter))
        made = None
        dtypes = [kept] if self.options.offload else []
        for dtype in [*dtypes, *[d for d in [self._gather_dtype(parameter)] if d != kept]]:
            new = editor.add(
                numel * ITEMSIZE[dtype], editor.at(tick), module=group.unit.name, stream=stream, op=op
            )
            if made is not None:
                editor.free(made, tick)
            made = new
        return made

    def _copy_alone(self, group: Group, tick: int) -> bool:
        """``wait_for_unshard`` of a rank that shares with nobody: copies in place of a gather."""
        if group.unsharded or not group.unit.parameters or self._ranks(group) > 1:
            return False
        last = None
        for parameter in group.unit.parameters:
            made = self._input_of(parameter, group, tick)
            if last is not None:
                self.editor.free(last, tick)
            last = made
            self._add_gathered(group, parameter, tick)
        if last is not None:
            self.editor.free(last, tick)
        group.unsharded = True
        return True

    def _copy_out(self, group: Group, tick: int) -> None:
        for parameter in group.unit.parameters:
            self._add_gathered(group, parameter, tick)
        group.unsharded = True
        self.editor.free(group.post_forward, tick)
        group.post_forward = []

    def _add_gathered(self, group: Group, parameter: Parameter, tick: int) -> None:
        nbytes, name = self._gathered_bytes(parameter), group.unit.name
        group.gathered.append(
            self.editor.add(nbytes, self.editor.at(tick), module=name, key=parameter.key)
        )

    def _reshard(self, group: Group, tick: int) -> None:
        self.editor.free(group.gathered, tick)
        group.gathered = []
        group.unsharded = False

    def _keep_smaller_shard(self, group: Group, tick: int) -> None:
        """``to_sharded_post_forward``: a part of each parameter is copied, then the whole freed."""
        for parameter, gathered in zip(group.unit.parameters, group.gathered, strict=True):
            nbytes = self._gathered_bytes(parameter) // int(self.options.reshard)
            name = group.unit.name
            group.post_forward.append(
                self.editor.add(nbytes, self.editor.at(tick), module=name, key=parameter.key)
            )
            self.editor.free(gathered, tick)
        group.gathered = []

    def _reduce(
        self, group: Group, mine: list[tuple[Parameter, int]], tick: int, step: int
    ) -> None:
        editor, ranks = self.editor, self._ranks(group)
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
                if row in group.own_parts:
                    editor.free(group.own_parts.pop(row), tick)
                else:
                    editor.end(row, editor.at(tick))
        outputs = []
        for dtype, stream in self._outputs(reduced, original):
            kind = Category.GRADIENT if dtype == original else Category.COMMUNICATION
            nbytes, at = elements * ITEMSIZE[dtype], editor.at(tick)
            outputs.append(editor.add(nbytes, at, module=name, op=op, stream=stream, category=kind))
            if dtype == reduced and ranks == 1 and self.options.experts:
                # Nobody to reduce with, but a gradient_divide_factor: divided in a copy.
                divided = editor.add(nbytes, editor.at(tick), module=name, op=op, stream=stream)
                editor.free(divided, tick)
        if not self.options.offload:
            dropped = int(self.trace.lifetimes.death[[row for _, row in mine]].max())
            if dropped != NEVER:  # when zero_grad lets go of the gradients
                editor.free(outputs[-1], dropped)
            del outputs[-1]
        if self.options.replicas > 1:
            self._all_reduced += outputs[:1]
            del outputs[:1]
        editor.free(outputs, tick)

    def _outputs(self, reduced: str, original: str) -> list[tuple[str, int]]:
        """Dtype and stream of what is reduced, and of the copy in the parameters' dtype."""
        last = ALL_REDUCE_STREAM if self.options.replicas > 1 else REDUCE_SCATTER_STREAM
        cast = [] if reduced == original else [(original, last)]
        return [(reduced, REDUCE_SCATTER_STREAM), *cast]

    # -- small questions -------------------------------------------------------------------------

    def _ranks(self, group: Group) -> int:
        """How many ranks share the shards of a group with parameters: one mesh for all of them."""
        return self.options.ranks(group.unit.parameters[0])

    def _gather_dtype(self, parameter: Parameter) -> str:
        kept = self.masters[parameter.key]
        return kept if kept in ("int8", "uint8") else self.options.param_dtype or kept

    def _itemsize(self, parameter: Parameter) -> int:
        return ITEMSIZE[self._gather_dtype(parameter)]

    def _gathered_bytes(self, parameter: Parameter) -> int:
        """Bytes of an unsharded parameter, padding included."""
        ranks, dtype = self.options.ranks(parameter), self._gather_dtype(parameter)
        return padded_shard(parameter, ranks) * ranks * ITEMSIZE[dtype]

    def _group_before(self, group: Group, step: int) -> Group | None:
        """The group whose forward ended just before this one's (what backward prefetches).

        Of a module that a forward calls several times (a head in chunks) it is itself, until backward
        comes to the first call, which is near the end of the module's window.
        """
        calls = self.groups[0].unit.forward.get(step, [])
        if len(group.unit.forward.get(step, [])) > len(calls):
            return None
        order = self._post_forward_order(step)
        index = order.index(group) if group in order else 0
        return order[index - 1] if index > 0 else None

    def _post_forward_order(self, step: int) -> list[Group]:
        ran = [g for g in self.groups if step in g.unit.forward and g.unit.parameters]
        return sorted(ran, key=lambda g: (g.unit.forward[step][-1].end, -len(g.unit.name)))

    def _release_reduce_inputs(self, tick: int) -> None:
        while self._reduce_inputs:
            self.editor.free(self._reduce_inputs.pop(0), tick)

    def _release_held_output(self, tick: int) -> None:
        if self._held_output is not None:
            self.editor.free(self._held_output, tick)
            self._held_output = None
