"""Record a training step as ops and storage lifetimes.

``Recorder`` is a dispatch mode: it sees every op below autograd, with the tensors it makes. A
storage is born when an op returns a tensor over memory not seen before, and dies when the last
reference to it goes away, exactly when Python and autograd let go of it in a real run: a weak
reference to the storage fires at that moment. Each op costs a constant amount of work.

The same recorder watches real CPU tensors, which is how predictions are checked.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from llmem.gpu.scratch import BRIEF, DURING, PERSISTENT, Scratch, has_scratch
from llmem.lifetimes import (
    COLUMNS,
    NEVER,
    OP_COLUMNS,
    TICK,
    Category,
    Lifetimes,
    Ops,
    Parameter,
    Phase,
    Span,
    Touch,
    Trace,
)
from llmem.trace.inplace import InPlace

_ROW = ("nbytes", "birth", "death", "birth_op", "death_op", "category", "module", "key")
"""Columns of a lifetime while it is recorded."""
_DEATH, _BIRTH_OP, _DEATH_OP, _CATEGORY, _KEY = (
    _ROW.index(name) for name in ("death", "birth_op", "death_op", "category", "key")
)

ScratchFn = Callable[[str, Any, Any, str], list[Scratch]]
"""(op name, args, outputs, "main" or "autograd") -> what the op's kernel allocates besides."""


_SCALAR = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")
"""Ops of ``_c10d_functional`` that return the tensor they were given."""


_READ, _WRITE = int(Touch.READ), int(Touch.WRITE)

_CATEGORY_OF_PHASE = {
    Phase.BATCH: Category.INPUT,
    Phase.BACKWARD: Category.ACTIVATION_GRADIENT,
    Phase.CLIP: Category.OPTIMIZER_TEMPORARY,
    Phase.OPTIMIZER: Category.OPTIMIZER_TEMPORARY,
}
"""What an op makes outside forward and outside the nodes of backward."""


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that remembers its row."""

    __slots__ = ("row", "cdata")
    row: int
    cdata: int


class _Kind(NamedTuple):
    """What never changes about an op: looked up once per call, so kept together."""

    silent: bool
    """A view or a mark: it touches no memory and is not recorded."""
    name: int
    scratch: str
    """Its name in the table of kernel scratch, '' if it has none."""


def _touches_nothing(func: Any) -> bool:
    """True for views (outputs alias an input, nothing is written) and for profiler marks."""
    if func.namespace == "profiler" or func.overloadpacket.__name__ in _WAITS:
        return True
    if func is _LIFT:  # a view of what torch.tensor(data) has made unseen: its birth
        return False
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _whole_kernel(func: Any) -> Any:
    """The dispatch key at which to run a composite op so that it falls apart, or None.

    Autograd's keys take composite ops apart before a dispatch mode sees them; inference mode has
    no such keys and hands them over whole.
    """
    keys = torch._C.DispatchKey
    if not func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return None
    replaced = func.has_kernel_for_dispatch_key(keys.AutogradMeta)  # by llmem.trace.kernels alone
    return keys.Meta if replaced else keys.CompositeImplicitAutograd


class Recorder(TorchDispatchMode):
    """Collects the events of the code that runs under it; ``finish`` turns them into a Trace."""

    def __init__(
        self, devices: frozenset[str] = frozenset({"meta"}), scratch: ScratchFn | None = None
    ) -> None:
        """``devices``: the device types whose storages count (a scalar on the host does not)."""
        super().__init__()
        self._devices = devices
        self._scratch = scratch
        self._persistent: set[Any] = set()
        self._in_place = InPlace()
        self._in_subclass = False
        self._kinds: dict[Any, _Kind] = {}
        self._whole: dict[Any, Any] = {}
        self._names: dict[str, int] = {}
        self._modules: dict[str, int] = {"": 0}
        self._live: dict[int, _StorageRef] = {}
        self._events = 0
        self._clock = time.perf_counter()
        self._rows: list[list[int]] = []  # as _ROW says
        self._ops: list[tuple[int, int, int, int, int, bool]] = []  # as the fields of Ops
        self._touch: list[int] = []  # flat: op, row, kind
        # where we are
        self.phase = Phase.SETUP
        self.padding = False
        """Whether attention masks hold zeros."""
        self.step = 0
        self._module_stack: list[int] = [0]
        self._open_spans: list[int] = []
        self._phase_ticks: list[tuple[int, Phase, int]] = [(0, Phase.SETUP, 0)]
        self._step_ticks: list[int] = []
        self._spans: list[Span] = []
        self._parameters: list[Parameter] = []
        self._parameter_tensors: list[torch.Tensor] = []
        self._gradient_ready: dict[tuple[int, int], int] = {}
        self._head_modules: set[int] = set()
        self._in_head = False
        self._sequence_module: dict[int, int] = {}
        self._sequence_head: set[int] = set()
        self._optimizer: dict[str, Any] = {}
        self.assumptions: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper against torch.compile around the hook: it costs microseconds per op."""
        return False

    # -- registering what exists before the step ---------------------------------------------

    def add_existing(self, tensor: torch.Tensor, category: Category, module: str = "") -> int:
        """Give a tensor that already exists a row; returns the row (an old one if it is known)."""
        storage = local_of(tensor).untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            return known.row
        return self._born(storage, category, self._module_id(module), op=-1)

    def add_model(self, model: torch.nn.Module) -> None:
        """Register parameters and buffers in the order in which ``Module.to`` moves them."""
        seen: dict[int, int] = {}
        names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
        prefixes = {id(m): n for n, m in reversed(list(model.named_modules()))}
        for module in _apply_order(model):
            prefix = prefixes[id(module)]
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) in seen:
                    continue
                seen[id(parameter)] = len(self._parameters)
                row = self.add_existing(parameter, Category.PARAMETER, prefix)
                self._rows[row][_KEY] = len(self._parameters)
                self._parameters.append(
                    Parameter(
                        key=len(self._parameters),
                        name=names[id(parameter)],
                        shape=tuple(local_of(parameter).shape),
                        dtype=str(parameter.dtype).removeprefix("torch."),
                        itemsize=parameter.element_size(),
                        trainable=parameter.requires_grad,
                        row=row,
                    )
                )
                self._parameter_tensors.append(parameter)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.add_existing(buffer, Category.BUFFER, prefix)

    # -- the hook ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled():
            if func not in self._whole:
                self._whole[func] = _whole_kernel(func)
            if (key := self._whole[func]) is not None:
                with self:
                    return func._op_dk(key, *args, **(kwargs or {}))
        if types:
            return self._take_apart(func, args, kwargs or {})
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._kind_of(func)
        if kind.silent:
            return func(*args, **kwargs) if kwargs else func(*args)

        node = torch._C._current_autograd_node() if self.phase is Phase.BACKWARD else None
        # Recomputed forward code runs inside a node too: in a module, or keeping a graph.
        inside = len(self._module_stack) > 1
        formula = node is not None and not inside and not torch.is_grad_enabled()
        module, category = self._from(node) if formula else self._here(node)
        op = len(self._ops)
        recompute = node is not None and not formula
        self._ops.append((kind.name, module, self.phase, self.step, self._events * TICK, recompute))
        asked = (formula or self._in_place.in_composite) and not self._in_subclass
        out = self._in_place.act(func, args, node) if asked else None
        if out is None:
            if func is _SCALAR and args[0].is_meta:
                return self._answer(args[0])
            out = func(*args, **kwargs) if kwargs else func(*args)

        self._touch_all(op, args)
        if isinstance(out, torch.Tensor):
            self._see(op, out, category, module)
        elif out is not None:
            self._see_all(op, out, category, module)
        if formula:
            self._in_place.saw(node, out)
        if kind.scratch and self._scratch is not None:
            self._add_scratch(kind.scratch, args, out, op, module)
        return out

    def _take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on tensor subclasses (DTensor): let them run, and record what they do on plain ones.

        In a real run, too, autograd stays out of place on subclasses.
        """
        if self._in_subclass:
            return NotImplemented
        self._in_subclass = True
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._in_subclass = False

    def _kind_of(self, func: Any) -> _Kind:
        name = func.overloadpacket.__name__
        if _touches_nothing(func):
            return _Kind(True, -1, "")
        return _Kind(False, self._name_id(name), name if has_scratch(name) else "")

    def _answer(self, tensor: torch.Tensor) -> bool | float:
        """The value of a scalar that code branches on, which meta tensors do not have.

        ``x.all()``, also spelt ``x.sum() == x.numel()``, is True (False when the batch holds
        padding) and ``x.any()`` False: masks are full, positions run on. Norms that an optimizer
        reads (torch.optim.Adafactor) are 1: they scale, they decide nothing about memory. Any
        other question fails as it does without a recorder.
        """
        if self.phase is Phase.OPTIMIZER and tensor.is_floating_point():
            return 1.0
        ref = self._live.get(tensor.untyped_storage()._cdata)
        op = self._rows[ref.row][_BIRTH_OP] if ref is not None else -1
        question = self._made_by(op)
        if question == "eq" and "sum" in self._inputs_made_by(op):
            question = "all"
        if question not in ("all", "any"):
            return _SCALAR(tensor)  # type: ignore[no-any-return]
        answer = question == "all" and not self.padding
        where = self.current_module() or "the model"
        said = "yes" if answer else "no"
        self.note(f"{where} asks whether {question}() of a mask holds: assumed {said}")
        return answer

    def _made_by(self, op: int) -> str:
        return list(self._names)[self._ops[op][0]] if op >= 0 else ""

    def _inputs_made_by(self, op: int) -> set[str]:
        """Names of the ops that made what ``op``, a recent one, reads."""
        names, touch = set(), self._touch
        for at in range(len(touch) - 3, -1, -3):
            if touch[at] < op:
                break
            if touch[at] == op and touch[at + 2] == _READ:
                names.add(self._made_by(self._rows[touch[at + 1]][_BIRTH_OP]))
        return names

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
        if self._in_head:
            self._sequence_head.add(sequence)
            return module, Category.LOGITS_AND_LOSS
        return module, Category.ACTIVATION

    def _touch_all(self, op: int, args: Iterable[Any]) -> None:
        """Note that ``op`` reads the tensors among ``args``."""
        for item in args:
            if isinstance(item, torch.Tensor):
                ref = self._live.get(item.untyped_storage()._cdata)
                if ref is not None:
                    self._touch += (op, ref.row, _READ)
            elif isinstance(item, (list, tuple)):
                self._touch_all(op, item)

    def _see_all(self, op: int, out: Any, category: Category, module: int) -> None:
        if isinstance(out, torch.Tensor):
            self._see(op, out, category, module)
        elif isinstance(out, (list, tuple)):
            for item in out:
                self._see_all(op, item, category, module)

    def _see(self, op: int, tensor: torch.Tensor, category: Category, module: int) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            row = known.row
        elif tensor.device.type in self._devices:
            row = self._born(storage, category, module, op)
        else:
            return
        self._touch += (op, row, _WRITE)

    # -- births and deaths -----------------------------------------------------------------------

    def _new_row(self, nbytes: int, category: Category, module: int, op: int) -> int:
        self._events += 1
        self._rows.append([nbytes, self._events * TICK, NEVER, op, -1, category, module, -1])
        return len(self._rows) - 1

    def _born(self, storage: Any, category: Category, module: int, op: int) -> int:
        row = self._new_row(storage.nbytes(), category, module, op)
        ref = _StorageRef(storage, self._died)
        ref.row = row
        ref.cdata = storage._cdata
        self._live[ref.cdata] = ref
        return row

    def _died(self, ref: _StorageRef) -> None:
        self._free_row(ref.row, len(self._ops) - 1)
        self._live.pop(ref.cdata, None)

    def _add_scratch(self, name: str, args: Any, out: Any, op: int, module: int) -> None:
        """Give rows to what the op's kernel allocates below the dispatcher."""
        assert self._scratch is not None
        until_return: list[int] = []
        brief = -1
        thread = "autograd" if self.phase is Phase.BACKWARD else "main"
        for piece in self._scratch(name, args, out, thread):
            if brief >= 0:
                self._free_row(brief, op)
                brief = -1
            if piece.when == PERSISTENT:
                if piece.key in self._persistent:
                    continue
                self._persistent.add(piece.key)
            row = self._new_row(piece.nbytes, Category.WORKSPACE, module, op)
            if piece.when == DURING:
                until_return.append(row)
            elif piece.when == BRIEF:
                brief = row
        for row in ([brief] if brief >= 0 else []) + until_return[::-1]:
            self._free_row(row, op)

    def _free_row(self, row: int, op: int) -> None:
        self._events += 1
        lifetime = self._rows[row]
        lifetime[_DEATH] = self._events * TICK
        lifetime[_DEATH_OP] = op

    # -- where the program is --------------------------------------------------------------------

    def _name_id(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _module_id(self, name: str) -> int:
        return self._modules.setdefault(name, len(self._modules))

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

    def watch_composites(self, device: str) -> AbstractContextManager[None]:
        """Act out what composite ops do in place on tensors of ``device`` (``meta`` or ``cpu``)."""
        return self._in_place.composites(device)

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

    def label_gradients(self) -> None:
        """Mark the storages that are now some parameter's ``.grad``."""
        for parameter, tensor in zip(self._parameters, self._parameter_tensors, strict=True):
            if tensor.grad is not None:
                self.label(tensor.grad, Category.GRADIENT, parameter.key)

    def label_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the storages that the optimizer now keeps."""
        keys = {id(t): p.key for p, t in zip(self._parameters, self._parameter_tensors, strict=True)}
        elements = nbytes = 0
        for tensor, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    numel = local_of(value).numel()
                    elements += numel
                    nbytes += numel * value.element_size()
                    self.label(value, Category.OPTIMIZER_STATE, keys.get(id(tensor), -1))
        self._optimizer = {
            "name": type(optimizer).__name__,
            "state_elements": elements,
            "state_bytes": nbytes,
        }

    def add_optimizer_state(self, state: dict[str, Any]) -> None:
        """Register the state that an optimizer already has for one parameter."""
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.device.type in self._devices:
                self.add_existing(value, Category.OPTIMIZER_STATE)

    def after_backward(self) -> None:
        self.label_gradients()

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.label_optimizer(optimizer)

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

    def note(self, sentence: str) -> None:
        """Add to what was assumed, once."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def current_module(self) -> str:
        """Name of the module that is running ('' outside any)."""
        return list(self._modules)[self._module_stack[-1]]

    def last_op(self) -> str:
        """Name of the op recorded last."""
        return self._made_by(len(self._ops) - 1)

    def label(self, tensor: torch.Tensor, category: Category, key: int = -1) -> None:
        """Change what a living tensor's storage is for."""
        ref = self._live.get(local_of(tensor).untyped_storage()._cdata)
        if ref is not None:
            self._rows[ref.row][_CATEGORY] = category
            self._rows[ref.row][_KEY] = key

    # -- the result ------------------------------------------------------------------------------

    def finish(self) -> Trace:
        """The trace of everything recorded so far. Storages that are still alive never die."""
        self._step_ticks.append(self._events * TICK + TICK - 1)
        touch = np.array(self._touch, np.int64).reshape(-1, 3)
        return Trace(
            ops=Ops(*_columns(self._ops, OP_COLUMNS)),
            lifetimes=Lifetimes(
                **dict(zip(_ROW, _columns(self._rows, [COLUMNS[c] for c in _ROW]), strict=True)),
                stream=np.zeros(len(self._rows), np.int32),
            ),
            names=list(self._names),
            modules=list(self._modules),
            touch_op=touch[:, 0],
            touch_row=touch[:, 1],
            touch_kind=touch[:, 2].astype(np.int8),
            spans=self._spans,
            parameters=self._parameters,
            gradient_ready=self._gradient_ready,
            step_ticks=self._step_ticks,
            phase_ticks=self._phase_ticks,
            assumptions=self.assumptions,
            optimizer=self._optimizer,
            tracing_seconds=time.perf_counter() - self._clock,
        )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that has a tensor's memory on this rank (a DTensor's local one)."""
    for name in ("_local_tensor", "elem"):  # of DTensor and of AsyncCollectiveTensor
        tensor = getattr(tensor, name, tensor)
    return tensor


def _columns(rows: Sequence[Sequence[int]], kinds: Iterable[Any]) -> list[NDArray[Any]]:
    """The columns of a table given by rows, each of its own dtype."""
    kinds = list(kinds)
    table = np.array(rows, np.int64).reshape(-1, len(kinds))
    return [column.astype(kind) for column, kind in zip(table.T, kinds, strict=True)]


def _apply_order(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules in the order of ``Module._apply``: children before their parent."""
    for child in module.children():
        yield from _apply_order(child)
    yield module
