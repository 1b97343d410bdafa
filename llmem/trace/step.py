"""The training step itself, the same whether it is traced on meta or run for real.

It follows ``transformers.Trainer``: batch to the device, forward with labels, loss, backward,
gradient clipping, optimizer step; the model's outputs are dropped before backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from llmem.lifetimes import Phase
from llmem.spec import ZeroGrad


class Watcher(Protocol):
    """What a step tells whoever watches it."""

    def start_step(self, step: int) -> None: ...
    def in_phase(self, phase: Phase) -> AbstractContextManager[None]: ...
    def after_backward(self) -> None: ...
    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...


class NoWatcher:
    """Runs a step bare."""

    def start_step(self, step: int) -> None:
        return None

    def in_phase(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self) -> None:
        return None

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        return None


@contextmanager
def whole_batches() -> Iterator[Callable[[Any], Any]]:
    """Around a micro-batch of which this rank gets everything."""
    yield lambda batch: batch


def at_once(loss: torch.Tensor, watch: Watcher) -> None:
    """The whole backward."""
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass
class TrainingStep:
    """One optimizer step of fine-tuning, callable any number of times.

    ``make_batch`` returns the keyword arguments of the model, already on its device;
    ``clip_foreach`` is passed to ``clip``, whose own choice depends on the device.
    ``zero_grad`` says when old gradients go; with ``hold_outputs`` the batch, the model's outputs
    and the loss of a step are locals of the loop, alive until the next step rebinds each of them.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    make_batch: Callable[[], dict[str, Any]]
    max_grad_norm: float = 1.0
    clip_foreach: bool | None = None
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_
    accumulation: int = 1
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    micro_batch_context: Callable[[], AbstractContextManager[Callable[[Any], Any]]] = whole_batches
    """Around a micro-batch's forward and backward; yields what takes this rank's part of a batch."""
    outputs_of: Callable[[Any], Any] = lambda outputs: outputs
    """What the model's outputs become before anything is done with them."""
    scaler: torch.amp.GradScaler | None = None
    watcher: Watcher = field(default_factory=NoWatcher)
    loss_of: Callable[[Any], torch.Tensor] = lambda outputs: outputs.loss
    backward_of: Callable[[torch.Tensor, Watcher], None] = at_once
    zero_grad: ZeroGrad = "before_forward"
    hold_outputs: bool = False
    outputs_of_call: Callable[[dict[str, Any]], Any] = field(init=False)
    """What calls the model with a batch; torch.compile may take its place."""
    _held: dict[str, Any] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.outputs_of_call = self._call_model

    def __call__(self) -> None:
        watch = self.watcher
        watch.start_step(self._count)
        self._count += 1
        self._zero_grad("before_forward")
        for number in range(self.accumulation):
            with self.micro_batch_context() as mine:
                self._micro_batch(mine, first=number == 0)
        if self.max_grad_norm:
            with watch.in_phase(Phase.CLIP):
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                parameters = [p for p in self.model.parameters() if p.requires_grad]
                self.clip(parameters, self.max_grad_norm, foreach=self.clip_foreach)
        with watch.in_phase(Phase.OPTIMIZER):
            self._update()
            watch.after_optimizer(self.optimizer)
        self._zero_grad("after_step")

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _zero_grad(self, moment: ZeroGrad) -> None:
        if self.zero_grad == moment:
            with self.watcher.in_phase(Phase.ZERO_GRAD):
                self.optimizer.zero_grad()

    def _micro_batch(self, mine: Callable[[Any], Any], *, first: bool) -> None:
        watch = self.watcher
        with watch.in_phase(Phase.BATCH):
            batch = self._hold("batch", mine(self.make_batch()))
        with watch.in_phase(Phase.FORWARD):
            loss = self._loss(batch)
        del batch
        if first:
            self._zero_grad("before_backward")
        with watch.in_phase(Phase.BACKWARD):
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            self.backward_of(loss, watch)
            watch.after_backward()

    def rehearse(self) -> None:
        """Forward and backward of one micro-batch, unwatched; leaves no gradients behind."""
        watcher, self.watcher = self.watcher, NoWatcher()
        try:
            with self.micro_batch_context() as mine:
                self._micro_batch(mine, first=True)
        finally:
            self.watcher = watcher
        self._held.clear()
        self.optimizer.zero_grad()

    def _call_model(self, batch: dict[str, Any]) -> Any:
        return self.outputs_of(self.model(**batch))

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        with self.forward_context():
            outputs = self._hold("outputs", self.outputs_of_call(batch))
            loss = self.loss_of(outputs)
        del outputs
        return self._hold("loss", loss / self.accumulation if self.accumulation > 1 else loss)

    def _hold(self, name: str, value: Any) -> Any:
        """``value``, which takes the place of the one that the loop's local held."""
        if self.hold_outputs:
            self._held[name] = value
        return value
