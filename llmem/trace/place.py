"""Where in the program an op runs: step, phase, module; and in backward, whose formula it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from llmem.lifetimes import TICK, Category, Phase, Span
from llmem.trace.tape import Tape

_CATEGORY_OF_PHASE = {
    Phase.BATCH: Category.INPUT,
    Phase.BACKWARD: Category.ACTIVATION_GRADIENT,
    Phase.CLIP: Category.OPTIMIZER_TEMPORARY,
    Phase.OPTIMIZER: Category.OPTIMIZER_TEMPORARY,
}
"""What an op makes outside forward and outside the nodes of backward."""


class Place(Tape):
    """A tape that knows where the program is; it watches steps, phases and module calls."""

    def __init__(self, devices: frozenset[str]) -> None:
        super().__init__(devices)
        self.phase = Phase.SETUP
        self.step = 0
        self._module_stack: list[int] = [0]
        self._open_spans: list[int] = []
        self._head_modules: set[int] = set()
        self._in_head = False
        self._sequence_module: dict[int, int] = {}
        self._sequence_head: set[int] = set()
        self.compiled: int | None = None
        """The module that a compiled program is in, while one runs."""
        self._region = 0
        self._program_modules: dict[tuple[int, str], int] = {}

    def start_step(self, step: int) -> None:
        self.step = step
        # Half a tick later than the last event: what passes add before the step stays before it.
        self._step_ticks.append(self._events * TICK + TICK // 2)
        self._sequence_module.clear()
        self._sequence_head.clear()
        self._in_head = False

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Everything recorded inside belongs to ``phase``."""
        before = self.phase
        self._set_phase(phase)
        try:
            yield
        finally:
            self._set_phase(before)

    def _set_phase(self, phase: Phase) -> None:
        self.phase = phase
        self._phase_ticks.append((self._events * TICK + 1, phase, self.step))
        if phase is not Phase.FORWARD:
            self._in_head = False

    def current_module(self) -> str:
        """Name of the module that is running ('' outside any)."""
        return list(self._modules)[self._module_stack[-1]]

    def _from(self, node: Any) -> tuple[int, Category]:
        """Module and category of what a formula of backward makes: those of its forward op."""
        sequence = node._sequence_nr()
        head = sequence in self._sequence_head
        category = Category.LOGITS_AND_LOSS if head else Category.ACTIVATION_GRADIENT
        return self._sequence_module.get(sequence, 0), category

    def _here(self, node: Any) -> tuple[int, Category]:
        """The module that is running, and what an op makes there."""
        module = self._module_stack[-1]
        if self.phase is not Phase.FORWARD and node is None:
            return module, _CATEGORY_OF_PHASE.get(self.phase, Category.OTHER)
        if module == 0 and node is not None:  # transformers recomputes a layer's bare forward
            module = self._sequence_module.get(node._sequence_nr(), 0)
        # An op that makes no node shares the number of the last one that did.
        sequence = torch._C._autograd._get_sequence_nr() - 1
        self._sequence_module.setdefault(sequence, module)
        if self._in_head or module in self._head_modules:  # a head may be computed again
            self._sequence_head.add(sequence)
            return module, Category.LOGITS_AND_LOSS
        return module, Category.ACTIVATION

    def run_program(self, call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a compiled program, which says by ``enter_program`` where it is.

        The program of a region's backward runs where that of its forward did.
        """
        node = torch._C._current_autograd_node() if self.phase is Phase.BACKWARD else None
        if node is None:
            region = self._module_stack[-1]
            self._sequence_module[torch._C._autograd._get_sequence_nr() - 1] = region
        else:
            region = self._sequence_module.get(node._sequence_nr(), 0)
        before = self.compiled, self._region
        self.compiled = self._region = region
        try:
            return call(args)
        finally:
            self.compiled, self._region = before
            self._events += 1  # its last kernel makes nothing, and what comes next comes after it

    def enter_program(self, path: str) -> None:
        """The compiled program that runs is in the module at ``path``, as Dynamo writes it.

        ``L['self'].mlp.up_proj`` or longer, from whatever holds the region's own module.
        """
        known = self._program_modules.get((self._region, path))
        if known is None:
            region = list(self._modules)[self._region]
            prefix, parts = f"{region}." if region else "", path.split(".")
            names = (prefix + ".".join(parts[start:]) for start in range(len(parts)))
            found = next((name for name in names if name in self._modules), region)
            known = self._program_modules[self._region, path] = self._modules[found]
        self.compiled = known

    def _in_program(self) -> tuple[int, Category]:
        """Where a compiled program is, and what an op makes there."""
        module = self.compiled
        assert module is not None
        head = module in self._head_modules
        if self.phase is Phase.FORWARD:
            self._in_head = head = self._in_head or head
        if head:
            return module, Category.LOGITS_AND_LOSS
        return module, _CATEGORY_OF_PHASE.get(self.phase, Category.ACTIVATION)

    # -- watching the program --------------------------------------------------------------------------

    def watch_modules(self, model: torch.nn.Module, head: set[str]) -> ExitStack:
        """Attribute what happens from here on to the modules of ``model``.

        ``head`` names the modules that make logits: from the first call of one until forward
        ends, everything counts as logits and loss.
        """
        ids = {id(m): self._module_id(n) for n, m in reversed(list(model.named_modules()))}
        self._head_modules = {self._module_id(name) for name in head}
        original = torch.nn.Module.__call__
        recorder = self

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            ident = ids.get(id(module))
            if ident is None:
                return original(module, *args, **kwargs)
            recorder._enter_module(ident)
            try:
                return original(module, *args, **kwargs)
            finally:
                recorder._exit_module()

        stack = ExitStack()
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        stack.callback(setattr, torch.nn.Module, "__call__", original)
        return stack

    def _enter_module(self, module: int) -> None:
        if module in self._head_modules and self.phase is Phase.FORWARD:
            self._in_head = True
        self._module_stack.append(module)
        self._spans.append(
            Span(
                module,
                self.step,
                self.phase,
                self.phase is Phase.BACKWARD,
                self._events * TICK + 1,
                -1,
            )
        )
        self._open_spans.append(len(self._spans) - 1)

    def _exit_module(self) -> None:
        self._module_stack.pop()
        index = self._open_spans.pop()
        span = self._spans[index]
        self._spans[index] = Span(
            span.module,
            span.step,
            span.phase,
            span.recompute,
            span.enter,
            self._events * TICK + 1,
        )

    def watch_gradients(self) -> ExitStack:
        """Note when backward has finished accumulating each parameter's gradient."""
        stack = ExitStack()
        for parameter, tensor in zip(self._parameters, self._parameter_tensors, strict=True):
            if not tensor.requires_grad:
                continue

            def ready(_: torch.Tensor, key: int = parameter.key) -> None:
                self._gradient_ready[self.step, key] = self._events * TICK + 1

            stack.callback(tensor.register_post_accumulate_grad_hook(ready).remove)
        return stack

    def watch_phases(self, optimizer: torch.optim.Optimizer | None) -> ExitStack:
        """Recognise backward and the optimizer's step in code that does not announce them."""
        stack = ExitStack()
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            with self.in_phase(Phase.BACKWARD):
                original(*args, **kwargs)
                self.after_backward()

        torch.autograd.backward = backward
        stack.callback(setattr, torch.autograd, "backward", original)
        if optimizer is not None:

            def before(*_: Any) -> None:
                self._set_phase(Phase.OPTIMIZER)

            def after(*_: Any) -> None:
                self.after_optimizer(optimizer)
                self._set_phase(Phase.FORWARD)

            stack.callback(optimizer.register_step_pre_hook(before).remove)
            stack.callback(optimizer.register_step_post_hook(after).remove)
        return stack

    def after_backward(self) -> None:
        self.label_gradients()

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.label_optimizer(optimizer)
