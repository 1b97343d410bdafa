"""Megatron-LM's data parallelism and mixed-precision optimizer.

``--use-distributed-optimizer`` is ``llmem.parallel.megatron_distributed``; this is what is there without.

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

from llmem.errors import LlmemError
from llmem.lifetimes import Category, Trace
from llmem.parallel import RankTable, megatron_distributed
from llmem.parallel.editor import Editor
from llmem.parallel.megatron_step import FULL, end_gradients, optimizer_step
from llmem.spec import RunSpec


def compute_dtype(spec: RunSpec) -> str | None:
    """Parameters have the dtype that they were loaded in (``--fp16`` and ``--bf16`` of Megatron)."""
    return None


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    """One table where all ranks are alike. Raises LlmemError for what is not modelled."""
    if spec.offload != "none":
        raise LlmemError("--strategy megatron offloads nothing; leave --offload out")
    if not all(p.trainable for p in trace.parameters):
        raise LlmemError("--strategy megatron trains all parameters; use --method full")
    wide = any(p.dtype == "bfloat16" for p in trace.parameters)
    if spec.use_distributed_optimizer:
        return megatron_distributed.ranks(trace, spec, wide=wide)
    editor = Editor(trace)
    itemsizes = [FULL if wide else p.itemsize for p in trace.parameters]
    buffer = sum(p.numel * size for p, size in zip(trace.parameters, itemsizes, strict=True))
    editor.add(buffer, editor.at(0), category=Category.GRADIENT)
    halves = [p.numel for p in trace.parameters if p.itemsize < FULL]
    for numel in halves:
        editor.add(FULL * numel, editor.at(0), category=Category.PARAMETER)
    end_gradients(editor, accumulates=spec.gradient_accumulation_steps > 1)
    optimizer = optimizer_step(editor, [p.numel for p in trace.parameters], halves, wide=wide)
    lifetimes, named = editor.finish()
    notes = [
        f"megatron: gradients in one buffer of {'fp32' if wide else 'their dtype'}, fp32 masters of "
        "16-bit parameters, FusedAdam; no distributed optimizer"
    ]
    return [RankTable(0, lifetimes, named, optimizer, notes, tuple(range(spec.gpus)))]
