"""ZeRO stages 1 and 2, as DeepSpeed 0.19 runs them.

Read in runtime/zero/stage_1_and_2.py (class ``DeepSpeedZeroOptimizer``):

* ``__init__``: the trained parameters become views of one flat buffer (first a copy beside the
  originals); a rank's partition is cloned into an fp32 master;
* ``setup_buckets``: at the first gradient of a backward, one buffer of reduce_bucket_size elements
  (two with overlap_comm), freed in ``independent_gradient_partition_epilogue``;
* ``reduce_independent_p_g_buckets_and_remove_grads``: a gradient is copied into the buffer and
  freed; one that is larger than the buffer stays. Stage 2 does so in gradient hooks, stage 1 at
  the end of the last micro-batch's backward (with overlap_comm in its hooks);
* ``average_tensor``: the slices for different ranks are flattened into one tensor to reduce;
* ``copy_grads_in_partition``: gradients that this rank's partition touches are copied, whole, into
  a buffer of their own (``grads_in_partition``). With another accumulation dtype they are added to
  a flat fp32 partition instead (``_build_compact_grad_partition_buffer``);
* ``step``: see ``step``; frozen parameters are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llmem.lifetimes import TICK, Category, Parameter, Phase, Recorded, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.gradients import gradient_rows
from llmem.parallel.zero.layout import FlatGroup
from llmem.parallel.zero.options import ZeroOptions
from llmem.parallel.zero.ready import Backward, backwards_of
from llmem.parallel.zero.step import GroupStep

FP32, FP64 = 4, 8
REDUCTION_STREAM = 1

End = Callable[[int], None]
"""Ends a storage: at a place after the tick given, or (until the step) at that very tick."""


@dataclass
class _Bucket:
    """What is collected for the next reduction, and the buffers it is collected in."""

    parameters: list[Parameter] = field(default_factory=list)
    elements: int = 0
    buffers: list[int] = field(default_factory=list)

    def clear(self) -> None:
        self.parameters.clear()
        self.elements = 0


class Zero12Pass:
    """Plays the hooks of stages 1 and 2 over a trace; one instance per rank."""

    def __init__(
        self,
        trace: Trace,
        group: FlatGroup,
        options: ZeroOptions,
        rank: int,
        *,
        flatten_on_host: bool = False,
    ) -> None:
        """``flatten_on_host``: the flat copy does not fit beside the parameters."""
        self.editor = Editor(trace)
        self.trace = trace
        self.group = group
        self.options = options
        self.rank = rank
        self.flatten_on_host = flatten_on_host
        self.mine = {piece.parameter.key: piece for piece in group.pieces(rank)}
        self.until_step: list[tuple[int, End]] = []
        """(step, how to end it) of the storages that the optimizer's step lets go of."""
        self._rows = gradient_rows(trace)
        self._bucket = _Bucket()
        self._own: dict[int, End] = {}
        """Parameter key -> how to free its gradient, if that has a storage of its own."""
        self._has_holder = self._has_partition = False
        self._fresh: int | None = None
        self._now = Backward(0, 0, True, 0, 0)

    def run(self) -> Editor:
        """Rewrite parameters and gradients; the optimizer's step is put in by the caller."""
        self._setup()
        for backward in backwards_of(self.trace):
            self._now = backward
            for tick, parameter in backward.ready:
                self._hook(parameter, tick)
            self._epilogue(backward.end)
        return self.editor

    def group_step(self) -> GroupStep:
        """What the optimizer's step of this rank works on."""
        counts = tuple(piece.count for piece in self.mine.values())
        partition = self.group.partition
        if self._compact:
            return GroupStep(partition, counts, held=partition)
        if not counts:
            return GroupStep(partition, (), held=partition)
        parts = (*counts, *self.group.gaps(self.rank))
        return GroupStep(partition, counts, parts, held=self._held_numel)

    @property
    def gradient_dtype(self) -> str:
        """dtype of the gradients when the step begins."""
        return "float32" if self._compact else self.options.param_dtype

    # -- sizes and kinds -------------------------------------------------------------------------

    @property
    def _offloaded(self) -> bool:
        """Masters, optimizer states and the gradients' partition are on the host."""
        return self.options.offload_optimizer != "none"

    @property
    def _compact(self) -> bool:
        """``_use_compact_grad_partition_buffer``."""
        return self.options.separate and self.options.accumulation_dtype == "float32"

    @property
    def _apart(self) -> bool:
        """``use_grad_accum_attribute``: gradients move to ``grad_accum`` as they come."""
        return self.options.separate and self.options.stage == 1

    @property
    def _held_numel(self) -> int:
        return sum(piece.parameter.numel for piece in self.mine.values())

    @property
    def _itemsize(self) -> int:
        """Bytes of an element to reduce (``_gradient_reduction_buffer_dtype``)."""
        return self.options.accumulation_itemsize if self._apart else self.options.itemsize

    # -- before the first step -------------------------------------------------------------------

    def _setup(self) -> None:
        editor, at = self.editor, int(self.trace.step_ticks[0]) - TICK
        itemsize, partition = self.options.itemsize, self.group.partition
        # Recorded births reach into the first step's tick; what DeepSpeed replaces is added anew.
        editor.drop(np.array([p.row for p in self.group.parameters], np.int64))
        originals = [
            editor.add(p.nbytes, editor.at(at), category=Category.PARAMETER, key=p.key)
            for p in self.group.parameters
        ]
        if self.flatten_on_host:
            editor.free(originals, at)
        editor.add(self.group.numel * itemsize, editor.at(at), category=Category.PARAMETER)
        if not self.flatten_on_host:
            editor.free(originals, at)
        if self._offloaded:  # temp_grad_buffer_for_gpu_offload
            largest = max(p.numel for p in self.group.parameters)
            editor.free(editor.add(partition * itemsize, editor.at(at)), at)
            editor.add(largest * itemsize, editor.at(at), category=Category.GRADIENT)
            return
        clone = editor.add(partition * itemsize, editor.at(at)) if itemsize != FP32 else None
        editor.add(partition * FP32, editor.at(at), category=Category.OPTIMIZER_STATE)
        if clone is not None:
            editor.free(clone, at)
        editor.free(editor.add(partition * FP32, editor.at(at)), at)

    # -- gradient hooks --------------------------------------------------------------------------

    def _hook(self, parameter: Parameter, tick: int) -> None:
        """``process_gradients``."""
        self._open_buffers(tick)
        self._take(parameter, tick)
        if self.options.stage == 2 or (self.options.overlap and self._now.last):
            self._collect(parameter, tick)

    def _open_buffers(self, tick: int) -> None:
        if self._bucket.buffers or not self.options.zero.contiguous_gradients:
            return
        at = self.editor.at(tick)
        op = self.editor.op("setup_buckets", "", Phase.BACKWARD, self._now.step, at)
        for _ in range(2 if self.options.overlap else 1):
            nbytes = self.options.reduce_bucket * self._itemsize
            if self._apart:  # grad_accum, views of the buffers, outlives the epilogue
                self._keep(nbytes, tick, Category.COMMUNICATION)
                self._bucket.buffers.append(-1)
            else:
                self._bucket.buffers.append(self.editor.add(nbytes, self.editor.at(tick), op=op))

    def _take(self, parameter: Parameter, tick: int) -> None:
        """Note where a finished gradient lies."""
        editor, key, row = self.editor, parameter.key, self._rows[self._now.step, parameter.key]
        first = self._now.micro == 0
        if self._apart:
            nbytes = parameter.numel * self.options.accumulation_itemsize
            accum = editor.add(nbytes, editor.at(tick), category=Category.GRADIENT, key=key)
            if first:
                editor.end(row, editor.at(tick))
                self._own[key] = lambda tick: editor.free(accum, tick)
            else:
                editor.free(accum, tick)
        elif self.options.stage == 1 or first:
            self._own[key] = lambda tick: editor.end(row, editor.at(tick))
        elif not self._fits(parameter):
            nbytes = parameter.numel * self.options.itemsize
            own = editor.add(nbytes, editor.at(tick), category=Category.GRADIENT, key=key)
            self._own[key] = lambda tick: editor.free(own, tick)

    def _fits(self, parameter: Parameter) -> bool:
        """Whether a gradient is copied into the bucket's buffer."""
        contiguous = self.options.zero.contiguous_gradients
        return contiguous and parameter.numel <= self.options.reduce_bucket

    def _release(self, parameter: Parameter, tick: int) -> None:
        end = self._own.pop(parameter.key, None)
        if end is not None:
            end(tick)

    def _collect(self, parameter: Parameter, tick: int) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        if self._bucket.elements + parameter.numel > self.options.reduce_bucket:
            self._reduce(tick)
        if self._fits(parameter):
            self._release(parameter, tick)
        self._bucket.parameters.append(parameter)
        self._bucket.elements += parameter.numel

    # -- reduction -------------------------------------------------------------------------------

    def _reduce(self, tick: int) -> None:
        """``reduce_ipg_grads``."""
        if not self._bucket.parameters:
            return
        self._average(tick)
        for parameter in self._bucket.parameters:
            if parameter.key not in self.mine:
                if self.options.stage == 2:
                    self._release(parameter, tick)
            elif self._offloaded:
                self._offload(parameter, tick)
            elif self._compact:
                if self._apart:
                    self._release(parameter, tick)
            elif self.options.zero.contiguous_gradients:
                self._open_holder(tick)
                self._release(parameter, tick)
            elif self._now.micro == 0 or self.options.stage == 1:
                self._own.pop(parameter.key)
                self._keep_row(self._rows[self._now.step, parameter.key])
        self._bucket.clear()

    def _offload(self, parameter: Parameter, tick: int) -> None:
        """``copy_grads_in_partition`` with cpu_offload: norm in fp64, cast, copy to the host."""
        editor, count = self.editor, self.mine[parameter.key].count
        if self._now.last:
            editor.free(editor.add(count * FP64, editor.at(tick)), tick)
            if self._itemsize != FP32:
                editor.free(editor.add(count * FP32, editor.at(tick)), tick)
            self._release(parameter, tick)

    def _open_holder(self, tick: int) -> None:
        """``grads_in_partition``: whole gradients of the parameters this rank has a part of."""
        nbytes = self._held_numel * self.options.itemsize
        if self.options.stage == 2 and self._now.micro:
            if self._fresh is None:
                self._fresh = self.editor.add(
                    nbytes, self.editor.at(tick), category=Category.GRADIENT
                )
        elif not self._has_holder:
            self._has_holder = True
            self._keep(nbytes, tick)

    def _open_partition(self, tick: int) -> None:
        """The flat fp32 gradient of this rank's partition."""
        if not self._has_partition:
            self._has_partition = True
            self._keep(self.group.partition * FP32, tick)

    def _keep(self, nbytes: int, tick: int, category: Category = Category.GRADIENT) -> None:
        """Allocate what the optimizer's step will free."""
        editor, birth = self.editor, self.editor.at(tick)

        def end(death: int) -> None:
            editor.add(nbytes, birth, category=category, death=death)

        self.until_step.append((self._now.step, end))

    def _keep_row(self, row: int) -> None:
        """A gradient of the trace that the optimizer's step will free."""
        self.until_step.append((self._now.step, lambda death: self.editor.end(row, death)))

    def _average(self, tick: int) -> None:
        """``average_tensor``: the temporaries of one reduction."""
        editor = self.editor
        op = editor.op("reduce", "", Phase.BACKWARD, self._now.step, editor.at(tick))
        for slices in self._messages(tick):
            total = sum(count for count, _ in slices)
            alive = []
            if len(slices) > 1:
                alive.append(self._temporary(total * self._itemsize, tick, op))
            if self._communicates_apart:
                nbytes = total * self.options.communication_itemsize
                alive.append(self._temporary(nbytes, tick, op))
            for count, is_mine in slices:
                if is_mine and self.options.communication_dtype != "float32":
                    editor.free(self._temporary(count * FP32, tick, op), tick)
            editor.free(alive, tick)

    @property
    def _communicates_apart(self) -> bool:
        reduced = self.options.accumulation_dtype if self._apart else self.options.param_dtype
        return self.options.communication_dtype != reduced

    def _temporary(self, nbytes: int, tick: int, op: int) -> int:
        stream = REDUCTION_STREAM if self.options.overlap else 0
        made = self.editor.add(nbytes, self.editor.at(tick), op=op, stream=stream)
        self.editor.record_stream(made, Recorded(by_nccl=True))
        return made

    def _messages(self, tick: int) -> list[list[tuple[int, bool]]]:
        """What is flattened into one tensor: (elements, added to this rank's fp32 partition)."""
        zero, bucket = self.options.zero, self._bucket
        if not zero.contiguous_gradients:
            return [[(p.numel, False) for p in bucket.parameters]]
        slices = self._slices(tick)
        if not zero.reduce_scatter:
            mine = [(count, True) for count, _, is_mine in slices if is_mine]
            whole = (sum(count for count, _, _ in slices), False)
            return [[whole], *[[one] for one in mine]]
        if not zero.use_multi_rank_bucket_allreduce:
            ranks = list(dict.fromkeys(rank for _, rank, _ in slices))
            by_rank = [[(c, m) for c, r, m in slices if r == rank] for rank in ranks]
            return [part for one in by_rank for part in self._cut(one)]
        return self._cut([(count, is_mine) for count, _, is_mine in slices])

    def _cut(self, slices: list[tuple[int, bool]]) -> list[list[tuple[int, bool]]]:
        """Messages end once they exceed reduce_bucket_size (``allreduce_and_scatter``)."""
        messages: list[list[tuple[int, bool]]] = [[]]
        for item in slices:
            messages[-1].append(item)
            if sum(count for count, _ in messages[-1]) > self.options.reduce_bucket:
                messages.append([])
        return [message for message in messages if message]

    def _slices(self, tick: int) -> list[tuple[int, int, bool]]:
        """(elements, rank, added to this rank's fp32 partition), neighbours merged."""
        found: list[tuple[int, int, bool]] = []
        for parameter in self._bucket.parameters:
            for rank, count in self.group.ranks_of(parameter):
                is_mine = self._compact and rank == self.rank and not self._offloaded
                if is_mine:
                    self._open_partition(tick)
                if found and not is_mine and found[-1][1] == rank:
                    count += found.pop()[0]
                found.append((count, rank, is_mine))
        return found

    # -- the end of backward ---------------------------------------------------------------------

    def _epilogue(self, tick: int) -> None:
        """``reduce_gradients`` (stage 1) and ``independent_gradient_partition_epilogue``."""
        now = self._now
        if self.options.stage == 1 and not now.last:
            return
        if self.options.stage == 1 and not self.options.overlap:
            got = {parameter.key for _, parameter in now.ready}
            for parameter in self.group.parameters:
                if parameter.key in got:
                    self._collect(parameter, tick)
        self._reduce(tick)
        if now.last:
            self._close(tick)
        if not self._apart:
            self.editor.free(self._bucket.buffers, tick)
        self._bucket.buffers = []
        if self._fresh is not None:
            self.editor.free(self._fresh, tick)
            self._fresh = None
        for end in self._own.values():
            end(tick)
        self._own.clear()

    def _close(self, tick: int) -> None:
        """What the last micro-batch adds to this rank's gradients (``get_flat_partition``)."""
        self._has_holder = False
        if self._offloaded:
            return
        if self._compact:
            self._open_partition(tick)
            self._has_partition = False
        elif not self.mine:
            self._keep(self.group.partition * self.options.accumulation_itemsize, tick)
        else:
            for gap in self.group.gaps(self.rank):
                self._keep(gap * self.options.accumulation_itemsize, tick)
