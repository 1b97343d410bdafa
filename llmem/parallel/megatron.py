"""Megatron-LM's data parallelism and mixed-precision optimizer, without its distributed optimizer.

Read in megatron/model/distributed.py, megatron/optimizer/optimizer.py and megatron/arguments.py of
NVIDIA/Megatron-LM at b387fadfa7 (July 2023):

* one contiguous buffer holds the gradients of all parameters: fp32 for bf16 parameters
  (``accumulate_allreduce_grads_in_fp32`` is set then), else their own dtype. A finished gradient is
  added to its part of it and freed; the buffer is divided and all-reduced in place;
* 16-bit parameters have fp32 masters (``Float16OptimizerWithFloat16Params``). The step makes an fp32
  gradient of each from the buffer, unless the buffer is fp32; they stay until the next step's
  ``zero_grad``;
* apex's FusedAdam has two fp32 states, made in the first step; clipping and the search for
  infinities write a few numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmem.errors import LlmemError
from llmem.lifetimes import Category, Phase, Trace
from llmem.parallel import RankTable
from llmem.parallel.editor import Editor
from llmem.parallel.gradients import gradient_rows
from llmem.spec import RunSpec

FULL, STATES = 4, 2
"""Bytes of an element in fp32; exp_avg and exp_avg_sq."""


def compute_dtype(spec: RunSpec) -> str | None:
    """Parameters have the dtype that they were loaded in (``--fp16`` and ``--bf16`` of Megatron)."""
    return None


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """One table: all ranks are alike. Raises LlmemError for what is not modelled."""
    if spec.offload != "none":
        raise LlmemError("--strategy megatron offloads nothing; leave --offload out")
    if not all(p.trainable for p in trace.parameters):
        raise LlmemError("--strategy megatron trains all parameters; use --method full")
    editor = Editor(trace)
    wide = any(p.dtype == "bfloat16" for p in trace.parameters)
    itemsizes = [FULL if wide else p.itemsize for p in trace.parameters]
    buffer = sum(p.numel * size for p, size in zip(trace.parameters, itemsizes, strict=True))
    editor.add(buffer, editor.at(0), category=Category.GRADIENT)
    halves = [p.numel for p in trace.parameters if p.itemsize < FULL]
    for numel in halves:
        editor.add(FULL * numel, editor.at(0), category=Category.PARAMETER)
    _end_gradients(editor, accumulates=spec.gradient_accumulation_steps > 1)
    optimizer = _optimizer_step(editor, [p.numel for p in trace.parameters], halves, wide=wide)
    lifetimes, named = editor.finish()
    notes = [
        f"megatron: gradients in one buffer of {'fp32' if wide else 'their dtype'}, fp32 masters of "
        "16-bit parameters, FusedAdam; no distributed optimizer"
    ]
    return [RankTable(0, lifetimes, named, optimizer, notes, tuple(range(spec.gpus)))]


def _end_gradients(editor: Editor, *, accumulates: bool) -> None:
    """``param_hook``: what backward makes goes into the buffer, in every micro-batch.

    Where micro-batches accumulate, the recorded gradient is that of the first, which the hook takes
    as soon as it is there.
    """
    trace = editor.trace
    for at, row in gradient_rows(trace).items():
        taken = int(trace.lifetimes.birth[row]) if accumulates else trace.gradient_ready[at]
        editor.end(row, editor.at(taken))


def _optimizer_step(
    editor: Editor, numels: list[int], halves: list[int], *, wide: bool
) -> dict[str, Any]:
    """Main gradients and states in place of the recorded clipping and optimizer."""
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
