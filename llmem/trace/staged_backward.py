"""Backward of a micro-batch stage by stage, for pipeline schedules that part it.

Elsewhere a pipeline's trace is that of the whole model, cut afterwards. What lives between the gradient
of a stage's input (dI) and those of its parameters (dW) is decided by which autograd nodes can still be
reached, so here each stage has a graph of its own, and torch's own ``stage_backward_input`` and
``stage_backward_weight`` (torch/distributed/pipelining/_backward.py) run on it as
``backward_one_chunk`` and ``backward_weight_one_chunk`` (stage.py) call them: the stage's output is
held until dW is done, and the first stage has nothing to do for dI and a whole backward for dW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.lifetimes import Phase
from llmem.parallel.pipeline.stages import split_layers
from llmem.trace.recorder import Recorder


class StagedBackward:
    """A backward that begins anew at each of ``stages``, the last one first.

    To be called with the loss, after a forward inside ``cut``. The first call parts backward: its
    phases inside the step's own phase of backward are dI and dW of every stage but the first, then
    the first's whole backward. Later calls do a whole backward of each stage, in as many phases.
    """

    def __init__(self, model: torch.nn.Module, layers: list[str], stages: int) -> None:
        self._model = model
        self._borders = [_Border() for _ in range(stages - 1)]
        self._starts = [names[0] for names in split_layers(layers, stages)[1:]]
        self._parameters = _as_on_last_stage(model)
        self.earlier = [torch.empty_like(p) for p in self._parameters]
        """Gradients of earlier micro-batches, to which those of this one are added."""
        self._split = True

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Let the model's layers take what the stage before made as a leaf."""
        with ExitStack() as stack:
            for border, name in zip(self._borders, self._starts, strict=True):
                stack.enter_context(border.before(self._model.get_submodule(name)))
            yield

    def __call__(self, loss: torch.Tensor, watch: Any) -> None:
        backward = self._in_parts if self._split else self._at_once
        for parameter, gradient in zip(self._parameters, self.earlier, strict=True):
            parameter.grad = gradient if self._split else None
        self._split = False
        output, arrived = loss, None
        for border in reversed(self._borders):
            made, given = border.take()
            arrived = backward(watch, output, arrived, given)
            output = made
            del made, given
        for parameter in self._parameters:  # a tied one has been on the last stage
            parameter.grad = None
        self._at_once(watch, output, arrived, None)

    def _in_parts(
        self, watch: Recorder, output: Any, arrived: torch.Tensor | None, given: torch.Tensor
    ) -> torch.Tensor | None:
        """dI, then dW; returns the gradient of what the stage was given."""
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )

        gradients: Any = None if arrived is None else [arrived]
        with watch.in_phase(Phase.BACKWARD):
            (sent,), groups = stage_backward_input(
                [output], gradients, [given], iter(self._parameters)
            )
        with watch.in_phase(Phase.BACKWARD):
            with _named_gradients(watch):
                stage_backward_weight(iter(self._parameters), groups)
            del groups
        return sent

    def _at_once(
        self, watch: Recorder, output: Any, arrived: torch.Tensor | None, given: torch.Tensor | None
    ) -> torch.Tensor | None:
        from torch.distributed.pipelining._backward import stage_backward

        with watch.in_phase(Phase.BACKWARD):
            (sent,) = stage_backward(output, arrived, [given])
            watch.after_backward()
        return sent


class _Border:
    """Between two stages: what the first one made, and the leaf that the second one was given."""

    def __init__(self) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def before(self, layer: Any) -> Iterator[None]:
        """Cut the graph outside of ``layer``, and so of its checkpoint."""
        border, plain = self, type(layer)

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = border._cut(args, kwargs)
            return plain.__call__(layer, *args, **kwargs)

        layer.__class__ = type(plain.__name__, (plain,), {"__call__": call})
        try:
            yield
        finally:
            layer.__class__ = plain

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        every = (*args, *kwargs.values())
        handed = [v for v in every if isinstance(v, torch.Tensor) and v.requires_grad]
        if len(handed) != 1:
            raise LlmemError(
                f"a stage of this model is given {len(handed)} tensors with gradients, and schedules "
                "that part backward are known for one; use --pp-schedule 1f1b"
            )
        [made] = handed
        if made._is_view():
            raise LlmemError(
                "a stage of this model makes a view, whose graph torch's stage_backward_input cannot "
                "drop (detach_); use --pp-schedule 1f1b"
            )
        given = made.detach().requires_grad_()
        self._pair = (made, given)
        named = {key: given if value is made else value for key, value in kwargs.items()}
        return tuple(given if value is made else value for value in args), named

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(made, given) of the forward that has run."""
        if self._pair is None:
            raise LlmemError("a stage of this model did not run; use --pp-schedule 1f1b")
        pair, self._pair = self._pair, None
        return pair


def _as_on_last_stage(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters in the order of a stage's own: a tied one at its last place, the head."""
    named = list(model.named_parameters(remove_duplicate=False))
    last = {id(parameter): parameter for _, parameter in reversed(named)}
    return [parameter for parameter in reversed(last.values()) if parameter.requires_grad]


@contextmanager
def _named_gradients(watch: Recorder) -> Iterator[None]:
    """Tell ``watch`` whose gradients ``torch.autograd.grad`` gives to ``stage_backward_weight``."""
    original: Callable[..., Any] = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(outputs, inputs, *args, **kwargs)
        for edge, gradient in zip(inputs, made, strict=True):
            watch.label_gradient(edge.node.variable, gradient)
        return made

    torch.autograd.grad = grad
    try:
        yield
    finally:
        torch.autograd.grad = original
