"""Scratch of kernels that sort, scatter, normalise or sum over lists."""

from __future__ import annotations

from llmem.gpu.scratch_base import (
    BRIEF,
    DURING,
    HALF,
    Call,
    Scratch,
    TensorMeta,
    ceil_div,
)
from llmem.gpu.scratch_reduce import reduce_buffers

_EMBEDDING = "aten/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu"
_INDEXING = "aten/native/cuda/Indexing.cu: index_put_with_sort_kernel"
_CUB = "cub::DeviceRadixSort (onesweep) through aten/cuda/cub.cuh"
_SINGLE_TILE = 4096  # items up to which CUB sorts in one block: an H100 log shows 1 byte for 2,048


def _radix_sort(items: int, key_size: int, value_size: int) -> Scratch:
    """Temporary storage of radix_sort_pairs: second copies of keys and values, and digit counts.

    Each tile of about 3,840 items of 8 bytes keeps 256 counters of 4 bytes. One byte when a single
    block sorts everything. An estimate within a few percent.
    """
    if items <= _SINGLE_TILE:
        return Scratch(1, BRIEF, _CUB)
    tiles = ceil_div(items, 3840)
    nbytes = items * (key_size + value_size) + tiles * 1024 + 8 * 1024
    return Scratch(nbytes, BRIEF, _CUB, exact=False)


def embedding_backward(call: Call) -> list[Scratch]:
    """embedding_dense_backward(grad [..., D], indices, num_weights, padding_idx, scale_by_freq).

    Up to 3,072 indices are added without scratch. More are sorted, and sums of up to ten equal rows
    are kept in fp32 [n//10 + min(n, V), D] (`grad_weight_per_segment`): for 16,384 tokens,
    V = 128,256 and D = 4,096 that is 295 MB. torch >= 1.13.
    """
    grad, indices = call.tensor(0), call.tensor(1)
    if grad is None or indices is None:
        return []
    n, item = indices.numel, indices.itemsize
    vocabulary, width = call.scalar(2, 0), grad.shape[-1]
    by_frequency = bool(call.scalar(4, False))
    found = [] if grad.is_contiguous else [Scratch(grad.nbytes, DURING, _EMBEDDING)]
    if n <= 3072 and not by_frequency:
        return found
    segments = min(n, vocabulary)
    partial = n // 10 + segments
    acc = 4 if grad.dtype in HALF else grad.itemsize

    def held(nbytes: int) -> Scratch:
        return Scratch(nbytes, DURING, _EMBEDDING)

    found += [held(n * item), held(n * item),  # sorted and original indices
              Scratch(n * item, BRIEF, f"{_EMBEDDING}: arange"), _radix_sort(n, item, item)]
    if by_frequency:
        found.append(held(n * item))
    return found + [held(n * item), held(8), held(segments * item), held(segments * item), held(8),
                    held(partial * item), held(partial * width * acc)]


def _broadcast_numel(tensors: list[TensorMeta]) -> int:
    rank = max(len(t.shape) for t in tensors)
    sizes = [1] * rank
    for tensor in tensors:
        for axis, size in enumerate(reversed(tensor.shape)):
            sizes[-1 - axis] = max(sizes[-1 - axis], size)
    n = 1
    for size in sizes:
        n *= size
    return n


def index_put(call: Call) -> list[Scratch]:
    """index_put(self, indices, values, accumulate): sorts the indices when it accumulates.

    The backward pass of plain indexing (`weight[ids]`). For each index tensor a wrapped copy, then
    the linear index, sorted and original positions and a range, int64 each; values that are not
    dense or have to be broadcast are copied. Order and sizes as in an H100 log of torch 2.11.
    """
    target, values = call.tensor(0), call.tensor(2)
    indices = [t for t in (call.inputs[1] or ()) if isinstance(t, TensorMeta)]
    if target is None or not call.scalar(3, False) or not indices:
        return []
    if any(t.dtype in ("bool", "uint8") for t in indices):
        return []  # how many rows a mask selects is not known from shapes
    n = _broadcast_numel(indices)
    words = n * 8
    indexed = 1
    for axis, index in enumerate(call.inputs[1]):
        indexed *= target.shape[axis] if isinstance(index, TensorMeta) else 1
    expected = n * (target.numel // max(indexed, 1))

    found = [Scratch(words, BRIEF, f"{_INDEXING}: wrapped index") for _ in indices]
    found.append(Scratch(words, DURING, f"{_INDEXING}: linear index"))
    if values is not None and (values.numel != expected or not values.is_contiguous):
        found.append(Scratch(expected * target.itemsize, DURING, f"{_INDEXING}: values"))
    found += [Scratch(words, DURING, f"{_INDEXING}: {name}")
              for name in ("sorted indices", "original indices", "range")]
    return [*found, _radix_sort(n, 8, 8)]


def sort(call: Call) -> list[Scratch]:
    """sort, argsort, msort (self, ...): rows beyond 4,096 go through CUB with int64 positions.

    `sort_stable_kernel` of Sort.cu: one range of positions and the second copies of a radix sort
    for what is sorted at once. An estimate; shorter rows are sorted in place.
    """
    tensor = call.tensor(0)
    row = tensor.shape[-1] if tensor is not None and tensor.shape else 0
    if tensor is None or row <= 4096:
        return []
    source = "aten/native/cuda/Sort.cpp, Sort.cu: sort_stable_kernel"
    return [Scratch(tensor.numel * 8, DURING, source, exact=False),
            _radix_sort(tensor.numel, tensor.itemsize, 8)]


def nonzero(call: Call) -> list[Scratch]:
    """nonzero(self): the count, and the temporary storage of a CUB reduction (a few KiB)."""
    return [Scratch(8, DURING, "aten/native/cuda/Nonzero.cu: num_nonzeros")]


def foreach_norm(call: Call) -> list[Scratch]:
    """_foreach_norm(tensors, ord): fp32 partial norms, one per 65,536 elements of the largest.

    `foreach_tensor_norm_cuda`: zeros([number of tensors · chunks of the largest one]), kChunkSize
    65,536. What `clip_grad_norm_` runs; 9.3 MB for the 291 parameters of an 8B Llama.
    """
    tensors = [t for t in call.inputs[0] if isinstance(t, TensorMeta)]
    if not tensors:
        return []
    chunks = max(ceil_div(t.numel, 65536) for t in tensors)
    acc = 4 if tensors[0].dtype in HALF else tensors[0].itemsize
    return [Scratch(len(tensors) * chunks * acc, DURING,
                    "aten/native/cuda/ForeachReduceOp.cu: foreach_tensor_norm_cuda")]


def _norm_backward(call: Call, source: str, weight: TensorMeta | None, masks: tuple[bool, ...],
                   rows: int, width: int) -> list[Scratch]:
    """Partial sums of the weight's and bias' gradient for very many short rows (torch >= 2.8).

    `LaunchGammaBetaBackwardCUDAKernel` (pytorch#148605): when rows > 65,536 and width/32 is under
    half the SMs, partial gradients [min(32,768 / ceil(width/32), ceil(rows/32)), width] are written
    and summed afterwards.
    """
    if (weight is None or call.torch_version < (2, 8) or rows <= 65536
            or width // 32 >= call.device.sm_count // 2):
        return []
    blocks = min(32768 // ceil_div(width, 32), ceil_div(rows, 32))
    partial = TensorMeta((blocks, width), weight.dtype, weight.itemsize)
    found: list[Scratch] = [Scratch(partial.nbytes, DURING, source) for wanted in masks if wanted]
    staging, semaphores = reduce_buffers(partial, (0,), 4, call.device)
    if staging:
        for _ in filter(None, masks):
            found += [Scratch(staging, BRIEF, source), Scratch(semaphores, BRIEF, source)]
    return found


def _dense_gradient(call: Call) -> list[Scratch]:
    """A copy of an incoming gradient that is not contiguous, such as that of a sum.

    Inferred, not read in source: `nn.RMSNorm(x).sum().backward()` measured on H100 (five rows of
    linkedin/Liger-Kernel, benchmark/data, megatron_rms_norm) holds one tensor of that size more than
    inputs, outputs and gradients. Not applied to layer norm, for which no such row is known.
    """
    grad = call.tensor(0)
    if grad is None or grad.is_contiguous:
        return []
    return [Scratch(grad.nbytes, DURING, "measured: RMSNorm rows of linkedin/Liger-Kernel",
                    exact=False)]


def layer_norm_backward(call: Call) -> list[Scratch]:
    """native_layer_norm_backward(grad, input, normalized_shape, mean, rstd, weight, bias, mask)."""
    tensor, rstd, weight = call.tensor(1), call.tensor(4), call.tensor(5)
    if tensor is None or rstd is None:
        return []
    mask = call.scalar(7, (True, weight is not None, call.tensor(6) is not None))
    rows = rstd.numel
    return _norm_backward(
        call, "aten/native/cuda/layer_norm_kernel.cu", weight, (bool(mask[1]), bool(mask[2])), rows,
        tensor.numel // max(rows, 1))


def rms_norm_backward(call: Call) -> list[Scratch]:
    """_fused_rms_norm_backward(grad, input, normalized_shape, rstd, weight, mask)."""
    tensor, rstd, weight = call.tensor(1), call.tensor(3), call.tensor(4)
    if tensor is None or rstd is None:
        return []
    mask = call.scalar(5, (True, weight is not None))
    rows = rstd.numel
    return _dense_gradient(call) + _norm_backward(
        call, "aten/native/cuda/layer_norm_kernel.cu (rms_norm)", weight, (bool(mask[1]),), rows,
        tensor.numel // max(rows, 1))


def group_norm(call: Call) -> list[Scratch]:
    """native_group_norm(input, weight, bias, N, C, HxW, group, eps): scale and shift per channel.

    `GroupNormKernelImplInternal`: two fp32 [N, C], when there is a weight or bias and HxW > 1.
    """
    n, c, spatial = (call.scalar(i, 0) for i in (3, 4, 5))
    if spatial <= 1 or (call.tensor(1) is None and call.tensor(2) is None):
        return []
    return [Scratch(n * c * 4, DURING, "aten/native/cuda/group_norm_kernel.cu") for _ in range(2)]


def group_norm_backward(call: Call) -> list[Scratch]:
    """native_group_norm_backward(grad, input, mean, rstd, weight, N, C, HxW, group, mask).

    `GroupNormBackwardKernelImplInternal`: ds and db fp32 [N, C]; for the input's gradient c2 and c3
    fp32 [N, G] and, with a weight, c1 fp32 [N, C].
    """
    n, c, _spatial, groups = (call.scalar(i, 0) for i in (5, 6, 7, 8))
    mask = call.scalar(9, (True, True, True))
    sizes = [n * c, n * c]
    if mask[0]:
        sizes += [n * groups, n * groups]
        sizes += [n * c] if call.tensor(4) is not None else []
    return [Scratch(size * 4, DURING, "aten/native/cuda/group_norm_kernel.cu") for size in sizes]


TABLE = {
    "embedding_dense_backward": embedding_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), index_put),
    **dict.fromkeys(("sort", "argsort", "msort"), sort),
    "nonzero": nonzero,
    "_foreach_norm": foreach_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
}
