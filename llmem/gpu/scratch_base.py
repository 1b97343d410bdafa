"""The words of the scratch table: a tensor's shape, one allocation, one call of an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from llmem.gpu.devices import DeviceProfile

# How long an allocation lives. Allocations of one op happen in the order of its list.
DURING = "during"  # until the op returns
BRIEF = "brief"  # freed before the next allocation of the list
PERSISTENT = "persistent"  # until the process ends; allocated once per key

HALF = ("float16", "bfloat16")


class TensorMeta(NamedTuple):
    """Shape, dtype name without `torch.`, bytes per element; strides in elements.

    `stride` None means contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, the contiguous ones when none were given."""
        if self.stride is not None:
            return self.stride
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(reversed(strides))

    @property
    def is_contiguous(self) -> bool:
        if self.stride is None:
            return True
        dense = TensorMeta(self.shape, self.dtype, self.itemsize).strides
        return all(size == 1 or given == want
                   for size, given, want in zip(self.shape, self.stride, dense, strict=True))

    def transpose(self, a: int, b: int) -> TensorMeta:
        """The view with two dimensions swapped."""
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        return TensorMeta(tuple(shape), self.dtype, self.itemsize, tuple(strides))


class Scratch(NamedTuple):
    """One allocation that a kernel makes below the dispatcher.

    `nbytes` is what it asks the allocator for, before rounding; `when` one of DURING, BRIEF and
    PERSISTENT; `key` tells persistent buffers apart (`("cublas_workspace", thread, stream)`);
    `source` is where it was read; `exact` is False for estimates.
    """

    nbytes: int
    when: str
    source: str
    key: tuple[Any, ...] | None = None
    exact: bool = True


@dataclass(frozen=True)
class Call:
    """One call of an aten op on a device.

    `inputs` are the positional arguments in schema order, tensors as TensorMeta, tensor lists as
    sequences of them; `thread` is "main" in the forward pass and the optimizer, "autograd" in a
    backward pass, recomputation under a checkpoint included.
    """

    op: str
    inputs: Sequence[Any]
    outputs: Sequence[TensorMeta]
    device: DeviceProfile
    env: Mapping[str, str]
    torch_version: tuple[int, int]
    stream: int
    thread: str

    def tensor(self, index: int) -> TensorMeta | None:
        """The argument at `index` if it is a tensor."""
        value = self.inputs[index] if index < len(self.inputs) else None
        return value if isinstance(value, TensorMeta) else None

    def scalar(self, index: int, default: Any = None) -> Any:
        """The argument at `index` if there is one that is no tensor and not None."""
        value = self.inputs[index] if index < len(self.inputs) else None
        return default if value is None or isinstance(value, TensorMeta) else value


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    return ceil_div(a, multiple) * multiple
