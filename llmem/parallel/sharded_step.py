"""Clipping and the optimizer's step on a rank's shards, traced with the real optimizer.

The unsharded trace's clip and optimizer phases are taken out and those of the shards put in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from llmem.gpu.devices import DeviceProfile, get_device
from llmem.lifetimes import NEVER, TICK, Category, Phase, Trace
from llmem.parallel.dtensor_shards import Part, gradient_of, group_of, mesh_of, parameter_of
from llmem.parallel.editor import Editor
from llmem.spec import RunSpec


@dataclass(frozen=True)
class Shard:
    """What the optimizer sees of a parameter on this rank."""

    key: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    part: Part | None = None
    """Of what it is a part on a tensor-parallel rank, where that is a DTensor."""


def trace_optimizer(
    shards: Sequence[Shard],
    spec: RunSpec,
    device: DeviceProfile,
    *,
    steps: int,
    clip: Callable[[list[Any], float], Any] | None = None,
) -> Trace:
    """Trace ``steps`` clip-and-step rounds of ``spec``'s optimizer on meta shards.

    ``clip`` is called with the parameters and the norm (default: torch's, with foreach). No batch is in
    it: a plan, which asks at every batch size, is given the same trace again.
    """
    return _known(tuple(shards), spec.optim, spec.max_grad_norm, device, steps, clip)


@lru_cache(maxsize=16)
def _known(
    shards: tuple[Shard, ...],
    optim: str,
    max_grad_norm: float,
    device: DeviceProfile,
    steps: int,
    clip: Callable[[list[Any], float], Any] | None,
) -> Trace:
    parts = [shard.part for shard in shards if shard.part is not None]
    with group_of(parts):
        return _trace_optimizer(shards, optim, max_grad_norm, device, steps, clip, mesh_of(parts))


def _trace_optimizer(
    shards: Sequence[Shard],
    optim: str,
    max_grad_norm: float,
    device: DeviceProfile,
    steps: int,
    clip: Callable[[list[Any], float], Any] | None,
    mesh: Any,
) -> Trace:
    import torch

    from llmem.trace.kernels import kernels_of, scratch_of
    from llmem.trace.optimizers import multi_tensor_ops_on_meta, plan_optimizer
    from llmem.trace.recorder import Recorder
    from llmem.trace.run import frees_by_reference_count
    from llmem.trace.split.tensor_parallel import by_mesh, clip_by_mesh
    from llmem.trace.tape import local_of

    plan = plan_optimizer(optim, cuda=device.is_cuda)
    holder = torch.nn.Module()
    for index, shard in enumerate(shards):
        tensor = torch.empty(shard.shape, dtype=getattr(torch, shard.dtype), device="meta")
        holder.register_parameter(f"p{index}", parameter_of(tensor, shard.part, mesh))
    parameters = list(holder.parameters())
    recorder = Recorder(
        devices=frozenset({"meta"} if device.is_cuda else {"meta", "cpu"}),
        scratch=scratch_of(device) if device.is_cuda else None,
    )
    recorder.add_model(holder)
    optimizer = plan.build({"params": group} for group in by_mesh(parameters))
    for parameter, shard in zip(parameters, shards, strict=True):
        parameter.grad = gradient_of(local_of(parameter), shard.part, mesh)
        recorder.add_existing(parameter.grad, Category.GRADIENT)
    with kernels_of(device, recorder.note), multi_tensor_ops_on_meta(), frees_by_reference_count():
        with recorder:
            for step in range(steps):
                recorder.start_step(step)
                if max_grad_norm:
                    with recorder.in_phase(Phase.CLIP):
                        if clip is not None:
                            clip(parameters, max_grad_norm)
                        else:
                            norm: Any = torch.nn.utils.clip_grad_norm_ if mesh is None else clip_by_mesh
                            norm(parameters, max_grad_norm, foreach=True)
                with recorder.in_phase(Phase.OPTIMIZER):
                    optimizer.step()
                    recorder.after_optimizer(optimizer)
    trace = recorder.finish()
    trace.optimizer = {
        "name": type(optimizer).__name__,
        **{k: v for k, v in trace.optimizer.items() if k != "name"},
    }
    return trace


def splice_optimizer(
    editor: Editor, shards: Sequence[Shard], step_trace: Trace
) -> Callable[[int], int]:
    """Replace the clip and optimizer phases of ``editor``'s trace by those of ``step_trace``.

    Returns where a tick of ``step_trace`` went.
    """
    base = editor.trace
    born = _phase_of_births(base)
    editor.drop(np.isin(born, [int(Phase.CLIP), int(Phase.OPTIMIZER)]))
    starts = _optimizer_starts(base)
    table = step_trace.lifetimes
    # What was there before the first step has been born by its first tick.
    new = np.flatnonzero(table.birth > step_trace.step_ticks[0])
    ticks = step_trace.step_ticks
    first = [
        editor.reserve(start, (end - begin) // TICK + 2)
        for start, begin, end in zip(starts, ticks[:-1], ticks[1:], strict=True)
    ]

    def place(tick: int) -> int:
        """Tick of the shards' trace -> tick in the base's step."""
        step = min(int(np.searchsorted(ticks, tick, side="right")) - 1, len(starts) - 1)
        return first[step] + (tick - ticks[step]) // TICK

    ops = step_trace.ops
    handles: dict[int, int] = {}
    for op in range(len(ops)):
        step = int(ops.step[op])
        handles[op] = editor.op(
            step_trace.op_name(op), "", Phase(int(ops.phase[op])), step, place(int(ops.tick[op]))
        )
    for row in new:
        death = int(table.death[row])
        key = int(table.key[row])
        editor.add(
            int(table.nbytes[row]),
            place(int(table.birth[row])),
            category=Category(int(table.category[row])),
            key=shards[key].key if 0 <= key < len(shards) else -1,
            op=handles.get(int(table.birth_op[row]), -1),
            death=place(death) if death != NEVER else death,
        )
    editor.set_phase_ticks(_phase_ticks(base, step_trace, place))
    return place


def _phase_of_births(trace: Trace) -> np.ndarray[Any, Any]:
    ticks = np.array([t for t, _, _ in trace.phase_ticks])
    phases = np.array([int(p) for _, p, _ in trace.phase_ticks])
    return phases[np.searchsorted(ticks, trace.lifetimes.birth, side="right") - 1]


def _optimizer_starts(trace: Trace) -> list[int]:
    """For each step, the tick at which clipping (or, without it, the optimizer) starts."""
    starts: dict[int, int] = {}
    for tick, phase, step in trace.phase_ticks:
        if phase in (Phase.CLIP, Phase.OPTIMIZER):
            starts.setdefault(step, tick)
    return [starts[step] for step in sorted(starts)]


def _phase_ticks(base: Trace, step_trace: Trace, place: Any) -> list[tuple[int, Phase, int]]:
    kept = [
        item for item in base.phase_ticks if item[1] not in (Phase.CLIP, Phase.OPTIMIZER)
    ]
    shown: list[tuple[int, Phase, int]] = [
        (place(tick), phase, step)
        for tick, phase, step in step_trace.phase_ticks
        if phase in (Phase.CLIP, Phase.OPTIMIZER)
    ]
    return sorted(kept + shown, key=lambda item: item[0])


def device_of(spec: RunSpec) -> DeviceProfile:
    from llmem.trace.run import DEFAULT_GPU

    return get_device(spec.gpu or DEFAULT_GPU)
