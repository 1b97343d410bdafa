"""Record a training step as ops and storage lifetimes.

``Recorder`` is a dispatch mode: it sees every op below autograd, with the tensors it makes. A
storage is born when an op returns a tensor over memory not seen before, and dies when the last
reference to it goes away, exactly when Python and autograd let go of it in a real run: a weak
reference to the storage fires at that moment. Each op costs a constant amount of work.

The same recorder watches real CPU tensors, which is how predictions are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmem.gpu.scratch import BRIEF, DURING, PERSISTENT, Scratch, has_scratch
from llmem.lifetimes import TICK, Category, Phase
from llmem.trace.inplace import InPlace
from llmem.trace.place import Place
from llmem.trace.shapes import KnownShapes
from llmem.trace.tape import BIRTH_OP

ScratchFn = Callable[[str, Any, Any, str], list[Scratch]]
"""(op name, args, outputs, "main" or "autograd") -> what the op's kernel allocates besides."""

_SCALAR = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default
_PLAIN = (torch.Tensor,)
"""What autograd's ``detach`` of what it saves has for types: no subclass."""

_FUSED = "llmem::fused"
"""A kernel of a compiled program (llmem/trace/compiled/program.py); its argument has its name."""

_WAITS = ("wait_tensor", "_wrap_tensor_autograd")
"""Ops of ``_c10d_functional`` that return the tensor they were given."""


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

    Autograd's keys take composite ops apart before a dispatch mode sees them. Inference mode has no
    such keys and hands them over whole, and so do handlers of tensor subclasses (DTensor's).
    """
    keys = torch._C.DispatchKey
    if not func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return None
    replaced = func.has_kernel_for_dispatch_key(keys.AutogradMeta)  # by llmem.trace.kernels alone
    return keys.Meta if replaced else keys.CompositeImplicitAutograd


class Recorder(Place, TorchDispatchMode):
    """Collects the events of the code that runs under it; ``finish`` turns them into a Trace."""

    def __init__(
        self, devices: frozenset[str] = frozenset({"meta"}), scratch: ScratchFn | None = None
    ) -> None:
        """``devices``: the device types whose storages count (a scalar on the host does not)."""
        Place.__init__(self, devices)
        TorchDispatchMode.__init__(self)
        self._scratch = scratch
        self._persistent: set[Any] = set()
        self._in_place = InPlace()
        self._shapes = KnownShapes()
        self._in_subclass = False
        self._kinds: dict[Any, _Kind] = {}
        self._whole: dict[Any, Any] = {}
        self.padding = False
        """Whether attention masks hold zeros."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper against torch.compile around the hook: it costs microseconds per op."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile works under this mode; what it compiled runs and is recorded."""
        return True

    def watch_composites(self, device: str) -> AbstractContextManager[None]:
        """Act out what composite ops do in place on tensors of ``device`` (``meta`` or ``cpu``)."""
        return self._in_place.composites(device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._in_subclass or torch.is_inference_mode_enabled():
            if func not in self._whole:
                self._whole[func] = _whole_kernel(func)
            if (key := self._whole[func]) is not None:
                with self:
                    return func._op_dk(key, *args, **(kwargs or {}))
        if types and types != _PLAIN:
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
        if self.compiled is not None:
            module, category, formula = *self._in_program(), node is not None
        else:
            module, category = self._from(node) if formula else self._here(node)
        op = len(self._ops)
        recompute = node is not None and not formula
        name = kind.name if kind.name >= 0 else self._name_id(args[1])
        self._ops.append((name, module, self.phase, self.step, self._events * TICK, recompute))
        asked = (formula or self._in_place.in_composite) and not self._in_subclass
        asked = asked and self.compiled is None
        out = self._in_place.act(func, args, node) if asked else None
        if out is None:
            if func is _SCALAR and args[0].is_meta:
                return self._answer(args[0])
            out = self._shapes.call(func, args, kwargs)

        self._touch_all(op, args)
        if isinstance(out, torch.Tensor):
            self._see(op, out, category, module)
        elif out is not None:
            self._see_all(op, out, category, module)
        if formula and self.compiled is None:
            self._in_place.saw(node, out)
        if kind.scratch and self._scratch is not None:
            self._add_scratch(kind.scratch, args, out, op, module)
        return out

    def _take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on tensor subclasses (DTensor): let them run, record what they do on plain ones.

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
        if func.name() == _FUSED:
            return _Kind(False, -1, "")
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
        op = self._rows[ref.row][BIRTH_OP] if ref is not None else -1
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
