"""What is traced for a pipeline: one micro-batch, forward and backward, without the optimizer.

Each stage has an optimizer of its own parameters, which the pipeline pass traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.lifetimes import Category
from llmem.parallel.fsdp.wrapping import wrapped_names
from llmem.parallel.pipeline.schedule import SPLIT, stages_per_rank
from llmem.spec import RunSpec
from llmem.trace.checkpointing import is_reentrant
from llmem.trace.recorder import Recorder
from llmem.trace.staged_backward import StagedBackward
from llmem.trace.step import TrainingStep


def one_micro_batch(spec: RunSpec) -> RunSpec:
    """``spec`` with the sequences of one micro-batch. Raises LlmemError if they do not divide."""
    if spec.gradient_accumulation_steps > 1:
        raise LlmemError(
            "--pp accumulates gradients itself; use --micro-batches in place of "
            "--gradient-accumulation-steps"
        )
    batch, number = spec.per_device_train_batch_size, spec.pipeline_micro_batches
    if batch % number:
        raise LlmemError(
            f"{batch} sequences cannot be cut into {number} micro-batches; give "
            "--per-device-train-batch-size a multiple of --micro-batches"
        )
    return spec.model_copy(update={"per_device_train_batch_size": batch // number})


def without_optimizer(step: TrainingStep) -> None:
    """Let ``step`` end with backward."""
    step.max_grad_norm = 0.0
    step.optimizer = _Idle(step.model.parameters())


def traced_passes(spec: RunSpec) -> int:
    """Micro-batches to trace: DualPipeV runs some backwards whole and parts others."""
    return 2 if spec.pp_schedule == "dualpipev" else 1


def cut_backward(
    step: TrainingStep, spec: RunSpec, recorder: Recorder
) -> AbstractContextManager[None]:
    """Let ``step`` go backward stage by stage, if its schedule parts backward; enter this around it.

    Gradients of earlier micro-batches are there when ``recorder`` begins. Raises LlmemError where torch cannot part it.
    """
    if spec.pp_schedule not in SPLIT:
        return nullcontext()
    if spec.gradient_checkpointing and is_reentrant(spec):
        raise LlmemError(
            f"--pp-schedule {spec.pp_schedule} calls autograd.grad, which torch refuses in reentrant "
            "checkpoints; add --no-use-reentrant"
        )
    stages = spec.pp * stages_per_rank(spec.pp_schedule, spec.virtual_stages)
    backward = StagedBackward(step.model, wrapped_names(step.model, spec), stages)
    step.backward_of = backward
    for gradient in backward.earlier:
        recorder.add_existing(gradient, Category.GRADIENT)
    return backward.cut()


class _Idle(torch.optim.Optimizer):
    """Drops gradients like any optimizer, and changes nothing."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None
