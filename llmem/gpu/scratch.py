"""What kernels allocate below the dispatcher: a table from aten op to allocations.

A trace on meta tensors sees inputs and outputs. On a GPU a kernel also asks the caching allocator
for workspaces, accumulators and sort buffers; `scratch` says which. Ops that are not in the table
allocate nothing but their outputs; looked at and found so: the element-wise ops, softmax
forward, log_softmax both ways, nll_loss, gather, scatter_add, index_select, embedding,
native_layer_norm and _fused_rms_norm forward, native_dropout, cat, the _foreach arithmetic and the
fused optimizers. Not published, so not in the table: convolution workspaces of cuDNN, topk and
cumsum (a few KiB), the plans of cuDNN's forward attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmem.gpu import scratch_attention, scratch_blas, scratch_index, scratch_reduce
from llmem.gpu.devices import DeviceProfile
from llmem.gpu.scratch_base import BRIEF, DURING, PERSISTENT, Call, Scratch, TensorMeta

__all__ = ["BRIEF", "DURING", "PERSISTENT", "Scratch", "TensorMeta", "has_scratch", "scratch"]

_TABLE: dict[str, Callable[[Call], list[Scratch]]] = {
    **scratch_blas.TABLE,
    **scratch_reduce.TABLE,
    **scratch_attention.TABLE,
    **scratch_index.TABLE,
}

DEFAULT_TORCH = (2, 13)


def has_scratch(op: str) -> bool:
    """Whether `op` (without overload: "mm") is in the table: saves building the arguments."""
    return op in _TABLE


def scratch(op: str, inputs: Sequence[Any], outputs: Sequence[TensorMeta], device: DeviceProfile,
            *, env: Mapping[str, str], torch_version: tuple[int, int] = DEFAULT_TORCH,
            stream: int = 0, thread: str = "main") -> list[Scratch]:
    """The allocations that `op` makes on `device` besides its outputs, in their order.

    `inputs` are the positional arguments in schema order with tensors as TensorMeta (tensor lists
    as sequences of them), `env` the environment of the run, `thread` "autograd" in the backward
    pass: cuBLAS keeps a workspace per thread and stream. Persistent entries are returned at every
    call; the caller allocates them once per key. Sizes in bytes before rounding; the outputs are
    allocated first. Empty on the CPU.
    """
    rule = _TABLE.get(op)
    if rule is None or not device.is_cuda:
        return []
    return rule(Call(op, inputs, outputs, device, env, torch_version, stream, thread))
