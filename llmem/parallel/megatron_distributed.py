"""Megatron-LM's distributed optimizer: ``--strategy megatron --use-distributed-optimizer``.

Read in megatron/core/distributed/param_and_grad_buffer.py and megatron/core/optimizer/distrib_optimizer.py of
NVIDIA/Megatron-LM at d98e8a64dd (August 2026):

* per dtype one buffer of parameters and one of gradients are made beside the model, whose parameters then
  become views of the first, one after the other (``_ParamAndGradBuffer``);
* gradients are reduce-scattered and updated parameters gathered in place, each rank's part of a bucket
  within its buffer, with or without overlap: neither has a buffer of its own;
* a rank's parts of 16-bit parameters have fp32 masters (``shard_model_param.clone().float()``), made before
  the first step; fp32 ones are updated where they lie;
* the step makes an fp32 gradient of each part, unless the gradients' buffer is fp32 already; it lives until the
  next step's ``zero_grad``. FusedAdam has two fp32 states per part.

The shared embedding's bucket of its own under ``--pp`` is left out: at most a few hundred elements of padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmem.lifetimes import TICK, Category, Parameter, Trace
from llmem.parallel import RankTable
from llmem.parallel.editor import Editor
from llmem.parallel.megatron_layout import Layout, default_bucket_size, lay_out
from llmem.parallel.megatron_step import FULL, end_gradients, optimizer_step
from llmem.spec import RunSpec


def ranks(trace: Trace, spec: RunSpec, *, wide: bool) -> list[RankTable]:
    """One table for each kind of rank; ``wide``: gradients are collected in fp32."""
    size = default_bucket_size(spec.gpus) if spec.overlap_grad_reduce else None
    buffers = [
        (group, lay_out([p.numel for p in group], spec.gpus, size)) for group in _by_dtype(trace)
    ]
    return [
        _table(trace, spec, buffers, members, wide=wide) for members in _kinds(buffers, spec.gpus)
    ]


Buffers = list[tuple[list[Parameter], Layout]]


def _by_dtype(trace: Trace) -> list[list[Parameter]]:
    """The parameters of each pair of buffers."""
    dtypes = dict.fromkeys(p.dtype for p in trace.parameters)
    return [[p for p in trace.parameters if p.dtype == dtype] for dtype in dtypes]


def _kinds(buffers: Buffers, number: int) -> list[tuple[int, ...]]:
    """Ranks that own parts of the same sizes."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(number):
        owned = tuple(count for _, layout in buffers for count in layout.owned(rank))
        found.setdefault(owned, []).append(rank)
    return [tuple(members) for members in found.values()]


def _table(
    trace: Trace, spec: RunSpec, buffers: Buffers, members: tuple[int, ...], *, wide: bool
) -> RankTable:
    editor = Editor(trace)
    _make_buffers(editor, buffers, wide=wide)
    parts = list(_parts(buffers, members[0]))
    halves = [count for parameter, count in parts if parameter.itemsize < FULL]
    _make_masters(editor, parts)
    end_gradients(editor, accumulates=spec.gradient_accumulation_steps > 1)
    optimizer = optimizer_step(editor, [count for _, count in parts], halves, wide=wide)
    lifetimes, named = editor.finish()
    padding = sum(layout.numel - sum(p.numel for p in group) for group, layout in buffers)
    number = sum(len(layout.buckets) for _, layout in buffers)
    notes = [
        f"megatron: distributed optimizer over {spec.gpus} ranks, buffers of parameters and of gradients "
        f"in {'fp32' if wide else 'their dtype'} with {number} bucket{'s' if number > 1 else ''} and "
        f"{padding:,} elements of padding, fp32 masters and FusedAdam's states of this rank's part"
    ]
    return RankTable(members[0], lifetimes, named, optimizer, notes, members)


def _parts(buffers: Buffers, rank: int) -> Iterator[tuple[Parameter, int]]:
    """What ``rank`` updates, in the order of the buffers."""
    for group, layout in buffers:
        for parameter, count in zip(reversed(group), reversed(layout.owned(rank)), strict=True):
            if count:
                yield parameter, count


def _make_buffers(editor: Editor, buffers: Buffers, *, wide: bool) -> None:
    """The parameters as the model has them, then the buffers, into which they are copied."""
    at = int(editor.trace.step_ticks[0]) - TICK
    parameters = [p for group, _ in buffers for p in group]
    editor.drop(np.unique(np.array([p.row for p in parameters], np.int64)))
    kind = Category.PARAMETER
    originals = {
        p.key: editor.add(p.nbytes, editor.at(at), category=kind, key=p.key) for p in parameters
    }
    for group, layout in buffers:
        itemsize = group[0].itemsize
        editor.add(layout.numel * itemsize, editor.at(at), category=kind)
        grad = FULL if wide else itemsize
        editor.add(layout.numel * grad, editor.at(at), category=Category.GRADIENT)
        editor.free([originals[p.key] for p in reversed(group)], at)


def _make_masters(editor: Editor, parts: list[tuple[Parameter, int]]) -> None:
    at = int(editor.trace.step_ticks[0]) - TICK
    for parameter, count in parts:
        if parameter.itemsize < FULL:
            clone = editor.add(count * parameter.itemsize, editor.at(at))
            editor.add(count * FULL, editor.at(at), category=Category.PARAMETER)
            editor.free(clone, at)
