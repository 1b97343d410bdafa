"""What Megatron-LM's backward and optimizer step do with gradients, with and without its distributed
optimizer (megatron/core/optimizer/optimizer.py, distrib_optimizer.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmem.lifetimes import Category, Phase
from llmem.parallel.editor import Editor
from llmem.parallel.gradients import gradient_rows

FULL, STATES = 4, 2
"""Bytes of an element in fp32; exp_avg and exp_avg_sq."""


def end_gradients(editor: Editor, *, accumulates: bool) -> None:
    """``param_hook``: what backward makes goes into the buffer, in every micro-batch.

    Where micro-batches accumulate, the recorded gradient is that of the first, which the hook takes
    as soon as it is there.
    """
    trace = editor.trace
    for at, row in gradient_rows(trace).items():
        taken = int(trace.lifetimes.birth[row]) if accumulates else trace.gradient_ready[at]
        editor.end(row, editor.at(taken))


def optimizer_step(
    editor: Editor, numels: list[int], halves: list[int], *, wide: bool
) -> dict[str, Any]:
    """Main gradients and states in place of the recorded clipping and optimizer.

    ``numels``: elements of what this rank updates; ``halves``: of those in 16 bits; ``wide``: gradients
    are collected in fp32, so that these need no fp32 gradient of their own. Returns Trace's ``optimizer``.
    """
    trace = editor.trace
    ticks = np.array([tick for tick, _, _ in trace.phase_ticks])
    phases = np.array([int(phase) for _, phase, _ in trace.phase_ticks])
    born = phases[np.searchsorted(ticks, trace.lifetimes.birth, side="right") - 1]
    editor.drop(np.isin(born, [int(Phase.CLIP), int(Phase.OPTIMIZER)]))
    starts = [t for t, phase, _ in trace.phase_ticks if phase in (Phase.CLIP, Phase.OPTIMIZER)]
    first_of_step = {
        int(np.searchsorted(trace.step_ticks, t, side="right")) - 1: t for t in reversed(starts)
    }
    for number, (step, tick) in enumerate(sorted(first_of_step.items())):
        grads = [] if wide else [
            editor.add(FULL * n, editor.at(tick), category=Category.GRADIENT) for n in halves
        ]  # fmt: skip
        if step + 1 < len(trace.step_ticks) - 1:
            editor.free(grads, trace.step_ticks[step + 1])
        for numel in numels if number == 0 else ():
            for _ in range(STATES):
                editor.add(FULL * numel, editor.at(tick), category=Category.OPTIMIZER_STATE)
    elements = STATES * sum(numels)
    return {"name": "FusedAdam", "state_elements": elements, "state_bytes": FULL * elements}
