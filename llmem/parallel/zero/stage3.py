"""ZeRO stage 3, as DeepSpeed 0.19 runs it.

Read in runtime/zero: ``partition_parameters.py`` (``Init``, ``_all_gather_coalesced``,
``_all_gather_sequential``, ``AllGatherCoalescedHandle``), ``parameter_offload.py`` (hooks),
``partitioned_param_coordinator.py`` (see ``stage3_coordinator``), ``stage3.py`` and
runtime/comm/coalesced_collectives.py:

* every parameter, frozen or not, is kept as ceil(numel/N) elements; those of the trained ones lie
  in one buffer, beside fp32 masters, a buffer of reduce_bucket_size elements and one of all
  gradient partitions, which all stay;
* several parameters gathered at once go through a flat buffer and are then copied out one by one;
  the flat buffer lives until each of them has been asked for. A single one is used where it lies;
* a finished gradient is copied into the bucket's buffer and freed (a larger one stays); to reduce,
  the bucket is written once more, padded and interleaved by rank (``reduce_scatter_coalesced``);
* linear layers keep their weight's id, not the weight (``LinearFunctionForZeroStage3``), and their
  input even if the weight is frozen;
* after the step the small, persistent parameters are gathered again.
"""

from __future__ import annotations

import itertools
from collections import deque
from math import ceil

import numpy as np

from llmem.lifetimes import TICK, Category, HostWait, Parameter, Phase, Recorded, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.fsdp.fsdp2_shards import ITEMSIZE
from llmem.parallel.gradients import gradient_rows
from llmem.parallel.zero.layout import in_model_order
from llmem.parallel.zero.options import ZeroOptions
from llmem.parallel.zero.ready import Backward, backwards_of
from llmem.parallel.zero.stage3_coordinator import Coordinator, Gathered, Group, Limits
from llmem.parallel.zero.stage3_hooks import Hook, Kind, backward_hooks, forward_hooks
from llmem.parallel.zero.stage3_linear import (
    compute_last_layers_again,
    keep_inputs_of_frozen_linears,
)
from llmem.parallel.zero.stage3_owned import gathered_by_key, owned_by_module
from llmem.parallel.zero.stage3_whole import partition_whole_model
from llmem.parallel.zero.step import GroupStep

FP32 = 4
GATHER_STREAM, REDUCE_STREAM = 1, 2
IN_FLIGHT = 2  # max_param_reduce_events


def shard(numel: int, ranks: int) -> int:
    """Elements of a parameter that each rank keeps.

    >>> shard(7, 2)
    4
    """
    return ceil(numel / ranks)


class Zero3Pass:
    """Plays ZeRO-3's hooks over a trace. All ranks are alike but for padding they ignore."""

    def __init__(self, trace: Trace, options: ZeroOptions) -> None:
        self.editor = Editor(trace)
        self.trace = trace
        self.options = options
        self.parameters = in_model_order(trace)
        self.trained = [p for p in self.parameters if p.trainable]
        self.gathered = gathered_by_key(self.parameters, options)
        zero = options.zero
        limits = Limits(options.prefetch_bucket, zero.max_live_parameters, zero.max_reuse_distance)
        self.coordinator = Coordinator(
            owned_by_module(trace, self.parameters, self.gathered), limits, self
        )
        self._by_key = {p.key: p for p in self.parameters}
        self._rows = gradient_rows(trace)
        self._alive: dict[int, int] = {}
        """Parameter key -> handle of its gathered copy."""
        self._flat: dict[int, list[int]] = {}
        self._bucket: list[Parameter] = []
        self._large: dict[int, int] = {}
        self._reductions: deque[int] = deque()
        self._tick, self._phase, self._step = 0, Phase.SETUP, 0
        self._now = Backward(0, 0, True, 0, 0)

    # -- the whole run ---------------------------------------------------------------------------

    def run(self) -> Editor:
        """Rewrite all but the optimizer's step, which the caller puts in."""
        self._setup()
        if self.options.zero.memory_efficient_linear:
            keep_inputs_of_frozen_linears(self.editor, self.trace)
            compute_last_layers_again(self.editor, self.trace)
        for backward in backwards_of(self.trace):
            self._forward(backward)
            self._backward(backward)
            if backward.last:
                self._tick = backward.end
                self.coordinator.release_everything()
                self._gather_persistent(backward.step)
        return self.editor

    def sub_groups(self) -> list[list[Parameter]]:
        """``_create_fp16_sub_groups``: sub_group_size partition elements each."""
        limit, numel = self.options.zero.sub_group_size, 0
        groups: list[list[Parameter]] = []
        for parameter in self.trained:
            if not groups or numel >= limit:
                groups.append([])
                numel = 0
            groups[-1].append(parameter)
            numel += self._shard(parameter)
        return groups

    def group_steps(self) -> list[GroupStep]:
        """What the optimizer's step works on, one sub-group after the other."""
        steps = []
        for group in self.sub_groups():
            sizes = tuple(self._shard(p) for p in group)
            steps.append(GroupStep(sum(sizes), sizes, sizes))
        return steps

    def _shard(self, parameter: Parameter) -> int:
        return shard(parameter.numel, self.options.world)

    # -- before the first step -------------------------------------------------------------------

    def _setup(self) -> None:
        editor, options = self.editor, self.options
        at = int(self.trace.step_ticks[0]) - TICK
        editor.drop(np.unique(np.array([p.row for p in self.parameters], np.int64)))
        on_gpu = options.offload_param == "none"
        if options.zero_init:
            for parameter in self.parameters:
                if not parameter.trainable and (nbytes := self._part_on_gpu(parameter)):
                    place, category = editor.at(at), Category.PARAMETER
                    editor.add(nbytes, place, category=category, key=parameter.key)
        else:
            partition_whole_model(editor, self.parameters, self._part_on_gpu, at)
        numel = sum(self._shard(p) for p in self.trained)
        if on_gpu:
            editor.add(numel * options.itemsize, editor.at(at), category=Category.PARAMETER)
        sizes = [sum(self._shard(p) for p in group) for group in self.sub_groups()]
        if options.offload_optimizer == "none":
            self._make_masters(sizes, at)
        if options.zero.contiguous_gradients:
            nbytes = options.reduce_bucket * options.communication_itemsize
            editor.add(nbytes, editor.at(at))
        if options.offload_optimizer == "none":
            nbytes = numel * options.accumulation_itemsize
            editor.add(nbytes, editor.at(at), category=Category.GRADIENT)
        if options.world > 1:
            for parameter in self.trained:  # create_reduce_and_remove_grad_hooks
                editor.free(editor.add(self._whole(parameter), editor.at(at)), at)

    def _part_on_gpu(self, parameter: Parameter) -> int:
        """Bytes of the part that this rank keeps there."""
        there = self.options.offload_param == "none" or self._persists(parameter)
        return self._shard(parameter) * parameter.itemsize if there else 0

    def _persists(self, parameter: Parameter) -> bool:
        return self.gathered[parameter.key].persistent

    def _make_masters(self, sizes: list[int], at: int) -> None:
        editor = self.editor
        converted: int | None = None
        for size in sizes:
            if self.options.itemsize != FP32:
                fresh = editor.add(size * FP32, editor.at(at))
                if converted is not None:
                    editor.free(converted, at)
                converted = fresh
            editor.add(size * FP32, editor.at(at), category=Category.OPTIMIZER_STATE)
        if converted is not None:
            editor.free(converted, at)
        editor.free(editor.add(max(sizes) * FP32, editor.at(at)), at)

    # -- a micro-batch -----------------------------------------------------------------------------

    def _forward(self, backward: Backward) -> None:
        starts = [
            (tick, end)
            for (tick, phase, step), (end, _, _) in zip(
                self.trace.phase_ticks, self.trace.phase_ticks[1:], strict=False
            )
            if phase is Phase.FORWARD and step == backward.step and tick < backward.start
        ]
        start, end = starts[-1]
        self._tick, self._phase, self._step = start, Phase.FORWARD, backward.step
        self.coordinator.start_forward()
        for hook in forward_hooks(self.trace, backward.step, start, end):
            self._play(hook)

    def _backward(self, backward: Backward) -> None:
        self._phase = Phase.BACKWARD
        self._now = backward
        waiting = list(backward.ready)
        for hook in backward_hooks(self.trace, backward):
            while waiting and waiting[0][0] // TICK <= hook.tick // TICK:
                self._collect(waiting[0][1], waiting[0][0])
                waiting.pop(0)
            self._play(hook)
        for tick, parameter in waiting:
            self._collect(parameter, tick)
        self._tick = backward.end
        self._reduce(backward.end)
        self.coordinator.release_leftovers()

    def _play(self, hook: Hook) -> None:
        self._tick = hook.tick
        forward = hook.kind in (Kind.PRE_FORWARD, Kind.POST_FORWARD)
        if hook.kind in (Kind.PRE_FORWARD, Kind.PRE_BACKWARD):
            self.coordinator.fetch(hook.module, forward=forward, recompute=hook.recompute)
        else:
            self.coordinator.release(hook.module, forward=forward)

    # -- what the coordinator asks for -------------------------------------------------------------

    def gather(self, group: Group) -> None:
        """An all-gather is launched; partitions on the host come by way of the GPU."""
        if self.options.world == 1:
            return
        editor, members = self.editor, [self._by_key[m.key] for m in group.members]
        module = members[0].name.rpartition(".")[0]
        op = editor.op("all_gather", module, self._phase, self._step, editor.at(self._tick))
        self._flat[id(group)] = []
        if len(members) == 1 or self.options.zero.allgather_sequential:
            for parameter in members:
                self._copy(parameter, op, GATHER_STREAM)
            return
        staged = [
            editor.add(self._shard(p) * p.itemsize, editor.at(self._tick), op=op)
            for p in members
            if self.options.offload_param != "none" and not self._persists(p)
        ]
        for dtype in dict.fromkeys(p.dtype for p in members):
            mine = sum(self._shard(p) for p in members if p.dtype == dtype) * ITEMSIZE[dtype]
            self._flat[id(group)].append(
                editor.add(
                    mine * self.options.world,
                    editor.at(self._tick),
                    op=op,
                    module=module,
                    stream=self._gather_stream,
                )
            )
        editor.free(staged, self._tick)

    def unpack(self, group: Group) -> None:
        """The all-gather's result is needed: it is copied out of the flat buffer."""
        for member in group.members:
            if self.options.world > 1 and member.key not in self._alive:
                self._copy(self._by_key[member.key], -1, self._gather_stream, padded=False)

    def drop(self, group: Group) -> None:
        """All of a group have been waited for."""
        for handle in self._flat.pop(id(group), []):
            self.editor.free(handle, self._tick)

    def free(self, parameter: Gathered) -> None:
        """A gathered parameter is released."""
        handle = self._alive.pop(parameter.key, None)
        if handle is not None:
            if self.options.overlap:
                self.editor.record_stream(handle, Recorded(on_compute=True))
            self.editor.free(handle, self._tick)

    @property
    def _gather_stream(self) -> int:
        return GATHER_STREAM if self.options.overlap else 0

    def _whole(self, parameter: Parameter) -> int:
        """Bytes of a gathered parameter with its padding."""
        return self._shard(parameter) * self.options.world * parameter.itemsize

    def _copy(self, parameter: Parameter, op: int, stream: int, *, padded: bool = True) -> None:
        nbytes = self._whole(parameter) if padded else parameter.nbytes
        self._alive[parameter.key] = self.editor.add(
            nbytes,
            self.editor.at(self._tick),
            op=op,
            module=parameter.name.rpartition(".")[0],
            key=parameter.key,
            stream=stream if self.options.overlap else 0,
        )

    def _gather_persistent(self, step: int) -> None:
        """``_post_step``: the persistent parameters, each into a buffer of its own."""
        ticks = self.trace.phase_ticks
        self._tick = next(
            after
            for (_, phase, number), (after, _, _) in itertools.pairwise(ticks)
            if phase is Phase.OPTIMIZER and number == step
        )
        for parameter in self.parameters:
            state = self.gathered[parameter.key]
            if state.persistent:
                state.available = True
                if self.options.world > 1:
                    self._copy(parameter, -1, 0)

    # -- gradients -------------------------------------------------------------------------------

    def _collect(self, parameter: Parameter, tick: int) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``, ``__add_grad_to_ipg_bucket``."""
        editor, size = self.editor, self.options.reduce_bucket
        elements = sum(p.numel for p in self._bucket)
        if self._bucket and elements + parameter.numel > size:
            self._reduce(tick)
            elements = 0
        row = self._rows.get((self._now.step, parameter.key))
        if self.options.zero.contiguous_gradients and elements + parameter.numel <= size:
            if self._now.micro == 0 and row is not None:
                self._end_gradient(row, tick)
        elif self._now.micro:
            nbytes = parameter.numel * parameter.itemsize
            self._large[parameter.key] = editor.add(
                nbytes, editor.at(tick), category=Category.GRADIENT, key=parameter.key
            )
        else:
            self._large[parameter.key] = -1
        self._bucket.append(parameter)

    def _reduce(self, tick: int) -> None:
        """``__reduce_and_partition_ipg_grads``."""
        if not self._bucket:
            return
        editor, options, bucket = self.editor, self.options, self._bucket
        op = editor.op("reduce_scatter", "", Phase.BACKWARD, self._now.step, editor.at(tick))
        if len(self._reductions) > IN_FLIGHT:
            done = self._reductions.popleft()
            editor.host_wait(HostWait(editor.at(tick), done, done))
        whole = sum(p.numel for p in bucket)
        in_buffer = options.zero.contiguous_gradients and whole <= options.reduce_bucket
        if in_buffer and not options.zero.reduce_scatter:
            temporary = self._all_reduced(tick, op)
        else:
            temporary = self._scattered(tick, op)
        for parameter in bucket:
            if options.offload_optimizer != "none":
                self._offload(parameter, tick, op)
            large = self._large.pop(parameter.key, None)
            if large == -1:
                self._end_gradient(self._rows[self._now.step, parameter.key], tick)
            elif large is not None:
                editor.free(large, tick)
        editor.free(temporary, tick)
        bucket.clear()
        self._reductions.append(editor.at(tick))

    def _end_gradient(self, row: int, tick: int) -> None:
        """It has been copied on the reducing stream."""
        if self.options.overlap:
            self.editor.record_row(row, Recorded())
        self.editor.end(row, self.editor.at(tick))

    def _temporary(self, nbytes: int, tick: int, op: int) -> int:
        stream = REDUCE_STREAM if self.options.overlap else 0
        return self.editor.add(nbytes, self.editor.at(tick), op=op, stream=stream)

    def _scattered(self, tick: int, op: int) -> list[int]:
        """``__avg_scatter_grads``: cast, interleave with padding, cast the partitions back."""
        options, bucket = self.options, sorted(self._bucket, key=lambda p: p.key)
        size, alive = options.communication_itemsize, []
        if options.communication_dtype != options.param_dtype:
            alive = [self._temporary(p.numel * size, tick, op) for p in bucket]
        interleaved = sum(self._shard(p) for p in bucket) * options.world
        if len(bucket) > 1 or interleaved != bucket[0].numel:
            padding = interleaved - sum(p.numel for p in bucket)
            pads = [self._temporary(padding * size, tick, op)] if padding else []
            alive.append(self._temporary(interleaved * size, tick, op))
            self.editor.free(pads, tick)
        if options.communication_dtype != options.accumulation_dtype:
            nbytes = sum(self._shard(p) for p in bucket) * options.accumulation_itemsize
            cast = self._temporary(nbytes, tick, op)
            self.editor.free(alive, tick)
            alive = [cast]
        return alive

    def _all_reduced(self, tick: int, op: int) -> list[int]:
        """``__avg_scatter_contiguous_grads``: a scaled copy of the bucket."""
        options, bucket = self.options, self._bucket
        whole, alive = sum(p.numel for p in bucket), []
        alive.append(self._temporary(whole * options.communication_itemsize, tick, op))
        if options.communication_dtype != options.accumulation_dtype:
            cast = self._temporary(whole * options.accumulation_itemsize, tick, op)
            self.editor.free(alive, tick)
            alive = [cast]
        return alive

    def _offload(self, parameter: Parameter, tick: int, op: int) -> None:
        """``partition_grads``: the partition goes to the host by way of the GPU."""
        numel = self._shard(parameter)
        on_gpu = self._temporary(numel * self.options.accumulation_itemsize, tick, op)
        if self._now.last:
            part = min(numel, 250_000_000)  # _constant_buffered_norm2
            self.editor.free(self._temporary(part * 8, tick, op), tick)
            if self.options.accumulation_itemsize != FP32:
                self.editor.free(self._temporary(numel * FP32, tick, op), tick)
        self.editor.free(on_gpu, tick)
