"""What the rows of a traced step are to the stages that repeat it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmem.lifetimes import NEVER, Category, Ints, Touch
from llmem.parallel.pipeline.stages import Stages, Window

Mask = NDArray[np.bool_]
EMBEDDED = "embedding_dense_backward"
"""The op that makes an embedding's gradient."""


class StageRows:
    """Masks and lists of the rows of ``stages.trace``."""

    def __init__(self, stages: Stages) -> None:
        self.stages = self._stages = stages
        self._source = stages.trace
        self._table = stages.trace.lifetimes
        self._added: dict[Window, list[tuple[int, int]]] = {}

    @cached_property
    def inputs(self) -> Mask:
        """The batch of the micro-batch: what is there when its forward begins."""
        table = self._table
        found = (table.category == Category.INPUT) & (table.birth > self._source.step_ticks[0])
        forward = self._stages.prelude.start
        return found & (table.birth <= forward) & (table.death > forward)  # type: ignore[no-any-return]

    @cached_property
    def kept(self) -> Mask:
        """What stays once it is there (cuBLAS' workspaces): made by whoever comes first.

        Activations and gradients do not: whatever outlives the traced step is a buffer of its code
        (Megatron-LM's global memory buffer).
        """
        passing = (Category.GRADIENT, Category.ACTIVATION_GRADIENT, Category.INPUT)
        born = self._table.birth > self._source.step_ticks[0]
        return born & (self._table.death == NEVER) & ~np.isin(self._table.category, passing)  # type: ignore[no-any-return]

    @cached_property
    def embedded(self) -> Mask:
        """What the first stage alone makes before its layers: embeddings and what is made of them."""
        trace, table = self._source, self._table
        found = np.zeros(len(table), np.bool_)
        found[[p.row for p in trace.parameters if 0 in self._stages.holders[p.key]]] = True
        born = self._stages.prelude.holds(table.birth)
        window = [self._stages.prelude.start, self._stages.prelude.end]
        first, last = np.searchsorted(trace.ops.tick, window).tolist()
        for op in range(first, last):
            read = trace.touch_row[(trace.touch_op == op) & (trace.touch_kind == Touch.READ)]
            if found[read].any():
                found |= born & (table.birth_op == op)
        return found & born  # type: ignore[no-any-return]

    @cached_property
    def tied(self) -> dict[int, int]:
        """Parameters on two stages: key -> bytes."""
        return {
            p.key: int(self._table.nbytes[p.row])
            for p in self._source.parameters
            if len(self._stages.holders[p.key]) > 1 and p.trainable
        }

    def sent(self, stage: int) -> Ints:
        """The stage's output, if it is sent."""
        outputs = self._stages.outputs
        return outputs[stage] if stage < len(outputs) else np.empty(0, np.int64)

    def added_to(self, backward: Window) -> list[tuple[int, int]]:
        """(row, tick) of gradients that arrive at a stage, where it first adds to them.

        Autograd adds in place to what nobody else holds (``InputBuffer::accumulate``), as in the
        whole model; what a stage received is in its buffer, and the sum becomes a new storage.
        """
        if backward not in self._added:
            self._added[backward] = self._find_added(backward)
        return self._added[backward]

    def _find_added(self, backward: Window) -> list[tuple[int, int]]:
        table, trace = self._table, self._source
        there = (table.birth <= backward.start) & (table.death > backward.start)
        there &= table.category == Category.ACTIVATION_GRADIENT
        there &= table.nbytes == self._stages.hidden
        ticks = trace.ops.tick[trace.touch_op]
        inside = (ticks >= backward.start) & (ticks < backward.end)
        written = inside & (trace.touch_kind == Touch.WRITE)
        found = []
        for row in np.flatnonzero(there).tolist():
            at = ticks[written & (trace.touch_row == row)]
            if len(at):
                found.append((row, int(at.min())))
        return found

    def gradient_keys(self, rows: NDArray[np.int64], stage: int) -> NDArray[np.int64]:
        """The parameter whose gradient each row is, -1 for others.

        A tied parameter's gradient is made twice: on the last stage where the head's part is left
        over for the embedding's backward, on the first by the embedding itself (DTensor's is as
        large as the whole vocabulary, of which the gradient is a view).
        """
        table = self._table
        keys = np.where(table.category[rows] == Category.GRADIENT, table.key[rows], -1).astype(
            np.int64
        )
        if self._stages.cut:  # where each part has been told from the other
            return keys
        for key, nbytes in self.tied.items():
            keys[keys == key] = -1
            if stage == self._stages.number - 1:
                same = np.flatnonzero(table.nbytes[rows] == nbytes)
                mine = same[~self._stages.backward[stage].holds(table.death[rows[same]])]
            else:
                made = [self._source.op_name(int(op)) == EMBEDDED for op in table.birth_op[rows]]
                mine = np.flatnonzero(made & (table.nbytes[rows] >= nbytes))
            keys[mine[:1]] = key
        return keys

    def only_summed(self, rows: NDArray[np.int64], keys: NDArray[np.int64]) -> Mask:
        """The sum of a tied parameter's two gradients, which no stage makes, and its operand.

        The operand is the rank's own part of a DTensor's gradient, copied (``clone``) to be added.
        """
        table, tied = self._table, {} if self._stages.cut else self.tied
        found = np.isin(table.key[rows], list(tied)) & (keys < 0)
        found &= table.category[rows] == Category.GRADIENT
        for key, nbytes in tied.items():
            for gradient in rows[keys == key].tolist():
                if table.nbytes[gradient] > nbytes:
                    after = (table.birth[rows] > table.birth[gradient]) & (keys < 0)
                    found |= after & (table.nbytes[rows] == nbytes) & (
                        table.module[rows] == table.module[gradient]
                    )
        return found  # type: ignore[no-any-return]

    def ready_ticks(
        self, rows: NDArray[np.int64], keys: NDArray[np.int64], window: Window
    ) -> NDArray[np.int64]:
        """When each row that is a gradient has been accumulated, and let go of."""
        born, death = self._table.birth[rows], self._table.death[rows]
        ready = np.where(window.holds(death), death, born + 1)
        for i in np.flatnonzero(keys >= 0).tolist():
            tick = self._source.gradient_ready.get((self._stages.step, int(keys[i])))
            if tick is not None and born[i] < tick <= window.end:
                ready[i] = tick
        return ready
