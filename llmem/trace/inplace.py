"""Act out the in-place choices that autograd makes in a real run.

While a dispatch mode is active, and for meta tensors always, autograd takes every tensor for a
subclass (``at::isTensorSubclassLike``, ATen/TensorSubclassLikeUtils.h) and stays out of place
where a real run works in place. In backward two things follow, and both are undone here:

* the engine adds up gradients of a tensor used more than once. When nobody else holds a summand
  it adds into that buffer (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp);
* some formulas fill a fresh zero tensor by an out-of-place scatter (value_selecting_reduction_-
  backward, gather_backward, ... in torch/csrc/autograd/FunctionsManual.cpp).

In forward the same question decides how the math path of attention adds its mask
(``_scaled_dot_product_attention_math`` of ATen/native/transformers/attention.cpp): a real run does
it in place.

Reference counts tell whether a tensor is held elsewhere. How many references the call itself
holds depends on the version of torch, so it is measured once, on a graph whose answer is known.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import gt
from sys import getrefcount
from typing import Any, ClassVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_ADDING_NODES = frozenset(
    {"VarMeanBackward0", "StdMeanBackward0", "LerpBackward0", "CumprodBackward0", "AccumulateGrad"}
)
"""Nodes whose own formula adds two tensors of equal shape (tools/autograd/derivatives.yaml)."""

_SCATTERS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
"""Out-of-place ops of backward formulas and what a real run calls on a tensor it has just made."""


_ADDING_COMPOSITE = "_scaled_dot_product_attention_math"
"""The composite op whose only addition is in place in a real run."""

_AUTOGRAD = {"meta": "AutogradMeta", "cpu": "AutogradCPU", "cuda": "AutogradCUDA"}


class InPlace:
    """Decides, op by op, what a real run would do in place."""

    def __init__(self) -> None:
        self.in_composite = False
        """Whether ``_ADDING_COMPOSITE`` is running."""
        self._sole = sole_reference_counts()
        self._node: int = -1
        self._made: set[int] = set()

    def act(self, func: Any, args: tuple[Any, ...], node: Any) -> torch.Tensor | None:
        """The result of doing ``func`` in place, or None if a real run does not.

        ``node`` is the backward node whose formula runs; in forward, also a recomputed one, ask
        only while ``in_composite``.
        """
        if self.in_composite:
            return aten.add_.Tensor(*args) if func is aten.add.Tensor else None  # type: ignore[no-any-return]
        if func is aten.add.Tensor:
            return self._accumulate(args, node)
        in_place = _SCATTERS.get(func)
        if in_place is None or isinstance(node, BackwardCFunction):
            return None
        if node._sequence_nr() != self._node or id_of(args[0]) not in self._made:
            return None
        in_place(*args)
        return args[0]

    def saw(self, node: Any, out: Any) -> None:
        """Remember what the node that is running has made itself."""
        sequence = node._sequence_nr()
        if sequence != self._node:
            self._node = sequence
            self._made.clear()
        if isinstance(out, torch.Tensor):
            self._made.add(id_of(out))

    def _accumulate(self, args: tuple[Any, ...], node: Any) -> torch.Tensor | None:
        if any(map(gt, counts(args), self._sole)):
            return None
        old, new = args[0], args[1]
        if (
            not isinstance(new, torch.Tensor)
            or old.shape != new.shape
            or old.dtype != new.dtype
            or node.name() in _ADDING_NODES
            or not dense(old)
        ):
            return None
        if isinstance(node, BackwardCFunction) and id_of(old) in self._made:
            return None  # the backward written in Python adds two tensors of its own
        aten.add_.Tensor(old, new)
        return old  # type: ignore[no-any-return]

    @contextmanager
    def composites(self, device: str) -> Iterator[None]:
        """Know when ``_ADDING_COMPOSITE`` runs on tensors of ``device``."""
        func = getattr(aten, _ADDING_COMPOSITE).default

        def kernel(*args: Any, **kwargs: Any) -> Any:
            before, self.in_composite = self.in_composite, True
            try:
                key = torch._C.DispatchKey.CompositeImplicitAutograd
                return func._op_dk(key, *args, **kwargs)
            finally:
                self.in_composite = before

        library = Library("aten", "IMPL")  # destroyed below
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a kernel that is replaced on purpose
                library.m.impl(_ADDING_COMPOSITE, _AUTOGRAD[device], kernel)  # type: ignore[union-attr]
            yield
        finally:
            library._destroy()


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def dense(tensor: torch.Tensor) -> bool:
    """``is_non_overlapping_and_dense``: the elements fill a block of memory without gaps."""
    if tensor.is_contiguous():
        return True
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != span:
                return False
            span *= size
    return True


def counts(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """References to the first argument in Python, to its tensor in C++ and to its storage.

    Those of the call itself are included.
    """
    storage = args[0].untyped_storage()._cdata
    return getrefcount(args[0]), args[0]._use_count(), torch._C._storage_Use_Count(storage)


@cache
def sole_reference_counts() -> tuple[int, int, int]:
    """``counts`` of a gradient that only the engine's input buffer holds."""

    class Probe(TorchDispatchMode):
        seen: ClassVar[list[tuple[int, int, int]]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and torch._C._current_autograd_node() is not None:
                self.seen.append(counts(args))
            return func(*args, **(kwargs or {}))

    x = torch.empty(3, device="meta", requires_grad=True)
    y = x * 2
    with Probe() as probe:
        (y.sigmoid() * y.tanh()).sum().backward()
    if len(probe.seen) != 1:
        raise RuntimeError("could not watch autograd add up two gradients in this torch")
    return probe.seen[0]
