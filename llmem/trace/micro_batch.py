"""What is traced for a pipeline: one micro-batch, forward and backward, without the optimizer.

Each stage has an optimizer of its own parameters, which the pipeline pass traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.spec import RunSpec
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


class _Idle(torch.optim.Optimizer):
    """Drops gradients like any optimizer, and changes nothing."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None
