"""The tables that a recorder fills: ops, storages, and who touches what."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
from llmem.trace.optimizers import size_of_state

_ROW = ("nbytes", "birth", "death", "birth_op", "death_op", "category", "module", "key")
"""Columns of a lifetime while it is recorded."""
_DEATH, BIRTH_OP, _DEATH_OP, _CATEGORY, _KEY = (
    _ROW.index(name) for name in ("death", "birth_op", "death_op", "category", "key")
)
READ, WRITE = int(Touch.READ), int(Touch.WRITE)


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that remembers its row."""

    __slots__ = ("cdata", "row")
    row: int
    cdata: int


class Tape:
    """Ops, storages and touches as they happen; ``finish`` turns them into a Trace."""

    def __init__(self, devices: frozenset[str]) -> None:
        self._devices = devices
        self._names: dict[str, int] = {}
        self._modules: dict[str, int] = {"": 0}
        self._live: dict[int, _StorageRef] = {}
        self._events = 0
        self._clock = time.perf_counter()
        self._rows: list[list[int]] = []  # as _ROW says
        self._ops: list[tuple[int, int, int, int, int, bool]] = []  # as the fields of Ops
        self._touch: list[int] = []  # flat: op, row, kind
        self._phase_ticks: list[tuple[int, Phase, int]] = [(0, Phase.SETUP, 0)]
        self._step_ticks: list[int] = []
        self._spans: list[Span] = []
        self._parameters: list[Parameter] = []
        self._parameter_tensors: list[torch.Tensor] = []
        self._gradient_ready: dict[tuple[int, int], int] = {}
        self._optimizer: dict[str, Any] = {}
        self._first_state: dict[str, int] | None = None
        self.assumptions: list[str] = []

    # -- what exists before the step -------------------------------------------------------------------

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

    def add_optimizer_state(self, state: dict[str, Any]) -> None:
        """Register the state that an optimizer already has for one parameter."""
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.device.type in self._devices:
                self.add_existing(value, Category.OPTIMIZER_STATE)

    # -- births, deaths and touches --------------------------------------------------------------------

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

    def _free_row(self, row: int, op: int) -> None:
        self._events += 1
        lifetime = self._rows[row]
        lifetime[_DEATH] = self._events * TICK
        lifetime[_DEATH_OP] = op

    def _touch_all(self, op: int, args: Iterable[Any]) -> None:
        """Note that ``op`` reads the tensors among ``args``."""
        for item in args:
            if isinstance(item, torch.Tensor):
                ref = self._live.get(item.untyped_storage()._cdata)
                if ref is not None:
                    self._touch += (op, ref.row, READ)
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
        self._touch += (op, row, WRITE)

    # -- names and labels ------------------------------------------------------------------------------

    def _name_id(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _module_id(self, name: str) -> int:
        return self._modules.setdefault(name, len(self._modules))

    def _made_by(self, op: int) -> str:
        return list(self._names)[self._ops[op][0]] if op >= 0 else ""

    def _inputs_made_by(self, op: int) -> set[str]:
        """Names of the ops that made what ``op``, a recent one, reads."""
        names, touch = set(), self._touch
        for at in range(len(touch) - 3, -1, -3):
            if touch[at] < op:
                break
            if touch[at] == op and touch[at + 2] == READ:
                names.add(self._made_by(self._rows[touch[at + 1]][BIRTH_OP]))
        return names

    def last_op(self) -> str:
        """Name of the op recorded last."""
        return self._made_by(len(self._ops) - 1)

    def note(self, sentence: str) -> None:
        """Add to what was assumed, once."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def label(self, tensor: torch.Tensor, category: Category, key: int = -1) -> None:
        """Change what a living tensor's storage is for."""
        ref = self._live.get(local_of(tensor).untyped_storage()._cdata)
        if ref is not None:
            self._rows[ref.row][_CATEGORY] = category
            self._rows[ref.row][_KEY] = key

    def label_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Mark the storage of a gradient that has not become, or will never be, a ``.grad``."""
        for known, tensor in zip(self._parameters, self._parameter_tensors, strict=True):
            if tensor is parameter:
                self.label(gradient, Category.GRADIENT, known.key)

    def label_gradients(self) -> None:
        """Mark the storages that are now some parameter's ``.grad``."""
        for parameter, tensor in zip(self._parameters, self._parameter_tensors, strict=True):
            if tensor.grad is not None:
                self.label(tensor.grad, Category.GRADIENT, parameter.key)

    def label_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the storages that the optimizer now keeps."""
        pairs = zip(self._parameters, self._parameter_tensors, strict=True)
        keys = {id(tensor): parameter.key for parameter, tensor in pairs}
        for tensor, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.label(value, Category.OPTIMIZER_STATE, keys.get(id(tensor), -1))
        size = size_of_state(optimizer, local_of).to_json()
        if len(self._step_ticks) <= 1:
            self._first_state = size
        self._optimizer = {"name": type(optimizer).__name__, **size}
        if self._first_state not in (None, size):
            self._optimizer["first"] = self._first_state

    # -- the result ------------------------------------------------------------------------------------

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
