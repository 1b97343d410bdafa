"""One optimizer per parameter, run while backward runs; the gradient is freed at once.

As torch's tutorial "How to save memory by fusing the optimizer step into the backward pass" and
torchtune's ``optimizer_in_bwd`` do it: a post-accumulate-grad hook steps the parameter's own
optimizer and then drops the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.lifetimes import Phase
from llmem.spec import RunSpec
from llmem.trace.optimizers import OptimizerPlan
from llmem.trace.step import TrainingStep


def check_in_backward(spec: RunSpec) -> None:
    """Raises LlmemError where gradients are needed after backward, or by somebody else."""
    if not spec.optimizer_in_backward:
        return
    reasons = {
        "clips no gradients; add --max-grad-norm 0": spec.max_grad_norm > 0,
        "updates at every backward; leave out --gradient-accumulation-steps": (
            spec.gradient_accumulation_steps > 1
        ),
        "cannot wait for GradScaler's verdict on all gradients; use --bf16": spec.fp16,
        "is for one GPU; leave out --strategy, --tp and --pp": (
            spec.strategy != "none" or spec.tp > 1 or spec.pp > 1
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise LlmemError(f"--optimizer-in-backward {reason}")


def in_backward(
    plan: OptimizerPlan, model: torch.nn.Module, parameters: Iterable[Any]
) -> InBackward:
    """An optimizer of ``plan`` for each of ``parameters``; they act once attached to a step."""
    optimizers = {parameter: plan.build([parameter]) for parameter in parameters}
    for optimizer in optimizers.values():
        plan.settle(model, optimizer)
    kind = type(next(iter(optimizers.values()))).__name__
    named: type[InBackward] = type(kind, (InBackward,), {})
    return named(optimizers)


class InBackward(torch.optim.Optimizer):
    """Stands where a step expects an optimizer, and has nothing left to do there.

    ``state`` holds the state of all parameters.
    """

    def __init__(self, optimizers: dict[Any, torch.optim.Optimizer]) -> None:
        super().__init__(optimizers, {})
        self.optimizers = optimizers
        for optimizer in optimizers.values():
            optimizer.state = self.state

    def attach(self, step: TrainingStep) -> None:
        """Update each parameter as soon as ``step`` has accumulated its gradient."""

        def update(parameter: torch.Tensor) -> None:
            step.watcher.after_backward()  # while the gradient is there to be recognised
            with step.watcher.in_phase(Phase.OPTIMIZER):
                optimizer = self.optimizers[parameter]
                optimizer.step()
                optimizer.zero_grad()

        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(update)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: backward has done it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: backward has done it."""
