"""Global reductions: when several blocks work on one output, TensorIterator needs a staging buffer.

`gpu_reduce_kernel` of aten/native/cuda/Reduce.cuh allocates `global_memory_size()` bytes and
`semaphore_size()` bytes of counters whenever `setReduceConfig` splits an output over blocks. Sums
over tokens (the gradient of a norm's weight) do, and their buffers are megabytes. The launch
configuration below is that function's, unchanged from torch 2.1 to 2.14 (checked on allocator logs
of torch 2.6 and 2.11 on H100).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from llmem.gpu.devices import DeviceProfile
from llmem.gpu.scratch_base import DURING, HALF, Call, Scratch, TensorMeta, ceil_div

_SOURCE = "aten/native/cuda/Reduce.cuh: gpu_reduce_kernel, setReduceConfig"
_MAX_THREADS = 512  # mnt_wrapper<T>::MAX_NUM_THREADS; complex128 alone has 256
_WARP = 32
_INT32_BYTES = 2**31 - 1  # what TensorIterator::can_use_32bit_indexing accepts


@dataclass(frozen=True)
class _Dim:
    size: int
    stride: int  # of the input, elements
    out_stride: int  # of the output, elements; 0 where reduced


def _dims(tensor: TensorMeta, reduced: Sequence[int]) -> tuple[list[_Dim], int]:
    """TensorIterator's dimensions, fastest first and coalesced, and how many are reduced.

    Reduced dimensions come first (`reorder_dimensions`), each group by ascending stride; neighbours
    merge when both operands step through them evenly (`coalesce_dimensions`).
    """
    dims, step = [], 1
    for axis in reversed(range(len(tensor.shape))):
        size, stride = tensor.shape[axis], tensor.strides[axis]
        if size == 1:
            continue
        out = 0 if axis in reduced else step
        step *= 1 if axis in reduced else size
        dims.append(_Dim(size, stride, out))
    dims.sort(key=lambda d: (d.out_stride != 0, d.out_stride, d.stride))
    merged: list[_Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if (last and last.size * last.stride == dim.stride
                and last.size * last.out_stride == dim.out_stride
                and (last.out_stride == 0) == (dim.out_stride == 0)):
            merged[-1] = _Dim(last.size * dim.size, last.stride, last.out_stride)
        else:
            merged.append(dim)
    return merged, sum(d.out_stride == 0 for d in merged)


def _last_pow2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _vector_of_outputs(dims: list[_Dim], kept: int) -> int:
    """`get_output_vec_size`: 4, 2 or 1 outputs per thread, by divisibility."""
    size = 4
    values = [dims[kept].size, *(d.stride for i, d in enumerate(dims) if i != kept)]
    for value in values:
        while value % size:
            size //= 2
    return size


def reduce_buffers(tensor: TensorMeta, reduced: Sequence[int], acc_size: int,
                   device: DeviceProfile) -> tuple[int, int]:
    """(staging bytes, semaphore bytes) of reducing `tensor` over `reduced`; (0, 0) for one block.

    `acc_size` is the size of what is accumulated (`arg_t`): 4 for a sum in fp32.
    """
    dims, n_reduced = _dims(tensor, reduced)
    n_out = prod(d.size for d in dims if d.out_stride)
    per_out = prod(d.size for d in dims if not d.out_stride)
    if not dims or per_out <= 1 or n_out == 0:
        return 0, 0
    fastest = n_reduced == len(dims) or dims[0].stride < dims[n_reduced].stride
    dim0, dim1 = (per_out, n_out) if fastest else (n_out, per_out)
    out_vec = 1
    if (dims[0] if fastest else dims[n_reduced]).stride == 1:
        if fastest and dim0 >= 128 and n_reduced == 1:
            dim0 //= 4  # input_vec_size
        elif not fastest:
            out_vec = _vector_of_outputs(dims, n_reduced)
            dim0 //= out_vec
    limit = _MAX_THREADS // out_vec
    pow0 = min(_last_pow2(dim0), limit)
    pow1 = min(_last_pow2(dim1), limit)
    height = min(pow1, limit // min(pow0, _WARP))
    width = min(pow0, limit // height)
    step_in, step_out = (width, 1) if fastest else (1, width)
    across_warps = ceil_div(per_out, step_in) >= min(height * 16, 256)
    if across_warps:
        step_in *= height
    else:
        step_out *= height
    per_thread = ceil_div(per_out, step_in)
    grid = ceil_div(n_out // out_vec, step_out)
    target = device.sm_count * (device.max_threads_per_sm // (width * height))
    if not across_warps or per_thread < 256 or grid > target:
        return 0, 0
    blocks = max(min(ceil_div(target, grid), ceil_div(per_thread, 16)), ceil_div(per_thread, 256))
    if blocks <= 1:
        return 0, 0
    staging = acc_size * n_out * blocks * (1 if fastest else width * out_vec)
    return staging, 4 * grid


def _halved(tensor: TensorMeta) -> TensorMeta:
    """`TensorIterator::split`: the dimension that spans most bytes, cut in two."""
    extents = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides,
                                                           strict=True)]
    axis = max(range(len(extents)), key=extents.__getitem__)
    shape = tuple(ceil_div(s, 2) if i == axis else s for i, s in enumerate(tensor.shape))
    return TensorMeta(shape, tensor.dtype, tensor.itemsize, tensor.strides)


def _span(tensor: TensorMeta) -> int:
    last = sum((s - 1) * st for s, st in zip(tensor.shape, tensor.strides, strict=True))
    return (last + 1) * tensor.itemsize


def reduce_scratch(tensor: TensorMeta, reduced: Sequence[int], acc_size: int,
                   out_size: int, device: DeviceProfile) -> list[Scratch]:
    """The allocations of one reduction in their order.

    Inputs beyond 2 GiB are reduced in halves, one after the other; partial results of half
    precision are then kept in an accumulation buffer (AccumulationBuffer).
    """
    if tensor.numel == 0:
        return []
    found, piece = [], tensor
    while _span(piece) > _INT32_BYTES:
        piece = _halved(piece)
    if piece is not tensor and out_size < acc_size:
        n_out = prod(s for axis, s in enumerate(tensor.shape) if axis not in reduced)
        found.append(Scratch(n_out * acc_size, DURING, f"{_SOURCE}: AccumulationBuffer"))
    staging, semaphores = reduce_buffers(piece, reduced, acc_size, device)
    if staging:
        found += [Scratch(staging, DURING, _SOURCE), Scratch(semaphores, DURING, _SOURCE)]
    return found


def _axes(tensor: TensorMeta, given: object) -> tuple[int, ...]:
    rank = len(tensor.shape)
    if isinstance(given, bool) or given is None or isinstance(given, str):
        return tuple(range(rank))
    dims = [given] if isinstance(given, int) else list(given)  # type: ignore[call-overload]
    return tuple(d % rank for d in dims) if dims and rank else tuple(range(rank))


def _acc_size(dtype: str, itemsize: int) -> int:
    return 4 if dtype in HALF else max(itemsize, 1)


def _reduction(call: Call, dim: int, acc_size: int | None = None) -> list[Scratch]:
    tensor = call.tensor(0)
    if tensor is None or call.tensor(1) is not None:  # max(a, b) is element-wise
        return []
    out = call.outputs[0] if call.outputs else tensor
    acc = acc_size or max(_acc_size(tensor.dtype, tensor.itemsize),
                          _acc_size(out.dtype, out.itemsize))
    return reduce_scratch(tensor, _axes(tensor, call.scalar(dim)), acc, out.itemsize, call.device)


def plain(call: Call) -> list[Scratch]:
    """sum, mean, prod, amax, amin, any, all (self, dim?): accumulates in fp32 for half types."""
    return _reduction(call, 1)


def norm(call: Call) -> list[Scratch]:
    """linalg_vector_norm(self, ord, dim?)."""
    return _reduction(call, 2)


def with_index(call: Call) -> list[Scratch]:
    """max, min with a dimension, argmax, argmin: accumulate pairs (value, int64), 16 bytes.

    max and min over everything carry values only.
    """
    pairs = call.op.startswith("arg") or call.scalar(1) is not None
    return _reduction(call, 1, 16 if pairs else None)


def moments(call: Call) -> list[Scratch]:
    """var, std, var_mean (self, dim?): WelfordData of four 4-byte fields (ReduceMomentKernel.cu)."""
    tensor = call.tensor(0)
    return _reduction(call, 1, 32 if tensor is not None and tensor.dtype == "float64" else 16)


def softmax_backward(call: Call) -> list[Scratch]:
    """_softmax_backward_data(grad, output, ...): their product; log_softmax makes none."""
    grad, output = call.tensor(0), call.tensor(1)
    if grad is None or output is None:
        return []
    nbytes = output.numel * max(grad.itemsize, output.itemsize)
    return [Scratch(nbytes, DURING, "aten/native/cuda/SoftMax.cu: softmax_backward_cuda_out")]


TABLE = {
    "_softmax_backward_data": softmax_backward,
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "any", "all", "nansum"), plain),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), with_index),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), moments),
    "linalg_vector_norm": norm, "norm": norm,
}
