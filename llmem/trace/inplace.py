"""Act out the in-place choices that autograd makes in a real run.

While a dispatch mode is active, and for meta tensors always, autograd takes every tensor for a
subclass (``at::isTensorSubclassLike``, ATen/TensorSubclassLikeUtils.h) and stays out of place
where a real run works in place. Two things follow, and both are undone here:

* the engine adds up gradients of a tensor used more than once. When nobody else holds a summand
  it adds into that buffer (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp);
* some formulas fill a fresh zero tensor by an out-of-place scatter (value_selecting_reduction_-
  backward, gather_backward, ... in torch/csrc/autograd/FunctionsManual.cpp).

Reference counts tell whether a tensor is held elsewhere. How many references the call itself
holds depends on the version of torch, so it is measured once, on a graph whose answer is known.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
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


class InPlace:
    """Decides, op by op in backward, what a real run would do in place."""

    def __init__(self) -> None:
        self._sole = sole_reference_counts()
        self._node: int = -1
        self._made: set[int] = set()

    def act(self, func: Any, args: tuple[Any, ...], node: Any) -> torch.Tensor | None:
        """The result of doing ``func`` in place, or None if a real run does not."""
        if func is aten.add.Tensor:
            return self._accumulate(args, node)
        in_place = _SCATTERS.get(func)
        if in_place is None or not isinstance(args[0], torch.Tensor):
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
        old, new = args[0], args[1]
        if (
            not isinstance(new, torch.Tensor)
            or old.shape != new.shape
            or old.dtype != new.dtype
            or node.name() in _ADDING_NODES
        ):
            return None
        if isinstance(node, BackwardCFunction) and id_of(old) in self._made:
            return None  # the backward written in Python adds two tensors of its own
        tensor_count, storage_count = counts(old)
        if tensor_count > self._sole[0] or storage_count > self._sole[1] or not dense(old):
            return None
        aten.add_.Tensor(old, new)
        return old  # type: ignore[no-any-return]


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


def counts(tensor: torch.Tensor) -> tuple[int, int]:
    """References to the tensor and to its storage, those of the call itself included."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def sole_reference_counts() -> tuple[int, int]:
    """``counts`` of a gradient that only the engine's input buffer holds."""

    class Probe(TorchDispatchMode):
        seen: list[tuple[int, int]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and torch._C._current_autograd_node() is not None:
                self.seen.append(counts(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.empty(3, device="meta", requires_grad=True)
    y = x * 2
    with Probe() as probe:
        (y.sigmoid() * y.tanh()).sum().backward()
    if len(probe.seen) != 1:
        raise RuntimeError("could not watch autograd add up two gradients in this torch")
    return probe.seen[0]
