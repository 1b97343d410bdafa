"""Workspaces of cuBLAS and cuBLASLt, and the copies made for operands that cuBLAS cannot read.

cuBLAS' workspace comes from the caching allocator, once per (handle, stream), and is never freed.
Handles are thread-local and autograd runs the backward pass of a device in a thread of its own, so
a training process holds *two* workspaces for its default stream: an H100 log of a step shows
33,554,432 bytes at the first forward `bmm` and again at the first `BmmBackward0`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmem.gpu.devices import DeviceProfile
from llmem.gpu.scratch_base import DURING, PERSISTENT, Call, Scratch, TensorMeta

KIB = 1024
_POOL = "aten/cuda/CublasHandlePool.cpp"


def cublas_workspace(device: DeviceProfile, env: Mapping[str, str],
                     torch_version: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace: `getChosenWorkspaceSize`, CublasHandlePool.cpp, torch >= 2.0.

    `CUBLAS_WORKSPACE_CONFIG=:SIZE:COUNT[:SIZE:COUNT...]` (KiB) decides; else 32 MiB on sm90, from
    torch 2.12 on sm10x and sm12x too (pytorch#175344, February 2026), and :4096:2:16:8, that is
    8,519,680 bytes, elsewhere. A string without any :SIZE:COUNT gives the default, as in torch.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * KIB
    major, minor = device.compute_capability
    large = (major, minor) == (9, 0) or (torch_version >= (2, 12) and major in (9, 10, 12))
    return 4096 * 8 * KIB if large else (4096 * 2 + 16 * 8) * KIB


def _lt_workspace(call: Call) -> Scratch | None:
    """The buffer of a cuBLASLt matmul beyond the cuBLAS one, if it has its own.

    `getCUDABlasLtWorkspace`: from 2.12 the cuBLAS buffer is shared unless
    TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 (pytorch#168175, #175879); 2.7-2.11 share it on request
    (=1, #151163). Its own is CUBLASLT_WORKSPACE_SIZE KiB, 1 MiB by default (#73328), kept per
    (handle, stream) from 2.9 (#156495), before that allocated for each matmul.
    """
    version = call.torch_version
    wish = call.env.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    unified = wish != "0" if version >= (2, 12) else version >= (2, 7) and wish == "1"
    if unified:
        return None
    wanted = call.env.get("CUBLASLT_WORKSPACE_SIZE", "")
    nbytes = int(wanted) * KIB if wanted.isdecimal() else 1024 * KIB
    if not nbytes:
        return None
    if version >= (2, 9):
        key = ("cublaslt_workspace", call.thread, call.stream)
        return Scratch(nbytes, PERSISTENT, f"{_POOL}: getCUDABlasLtWorkspace, torch 2.9+", key)
    return Scratch(nbytes, DURING, "aten/cuda/CUDABlas.cpp: gemm_and_bias, torch < 2.9")


def _workspaces(call: Call, *, lt: bool) -> list[Scratch]:
    nbytes = cublas_workspace(call.device, call.env, call.torch_version)
    found = []
    if nbytes:
        key = ("cublas_workspace", call.thread, call.stream)
        found.append(Scratch(nbytes, PERSISTENT, f"{_POOL}: setWorkspaceForHandle", key))
    own = _lt_workspace(call) if lt else None
    return [*found, own] if own else found


def _readable(matrix: TensorMeta) -> bool:
    """Whether cuBLAS reads the last two dimensions in place, as they are or transposed."""
    rows, cols = matrix.shape[-2:]
    row_stride, col_stride = matrix.strides[-2:]
    return ((col_stride == 1 and row_stride >= max(1, cols))
            or (row_stride == 1 and col_stride >= max(1, rows)))


def _copies(call: Call, *operands: int) -> list[Scratch]:
    """`prepare_matrix_for_cublas` / `prepare_batch_matrix_for_cublas`: clones of odd strides."""
    source = "aten/native/cuda/Blas.cpp: prepare_(batch_)matrix_for_cublas"
    matrices = (call.tensor(index) for index in operands)
    return [Scratch(matrix.nbytes, DURING, source) for matrix in matrices
            if matrix is not None and len(matrix.shape) >= 2 and not _readable(matrix)]


def matmul(call: Call) -> list[Scratch]:
    """mm(a, b), bmm(a, b): result = a b through cuBLAS."""
    return [*_copies(call, 0, 1), *_workspaces(call, lt=False)]


def scaled_matmul(call: Call) -> list[Scratch]:
    """_scaled_mm: always through cuBLASLt."""
    return _workspaces(call, lt=True)


def addmm(call: Call) -> list[Scratch]:
    """addmm(bias, a, b): a vector bias is fused by cuBLASLt's epilogue, a matrix is not.

    `addmm_out_cuda_impl`: cuBLASLt when the bias is one-dimensional and contiguous, the result has
    more than one row and column, alpha is 1 and beta is 1 (as for nn.Linear); fp32, fp16, bf16 and
    fp64. The cuBLAS handle, and so its workspace, is fetched in either case.
    """
    bias = call.tensor(0)
    result = call.outputs[0] if call.outputs else None
    fused = (bias is not None and len(bias.shape) == 1 and bias.is_contiguous
             and result is not None and len(result.shape) == 2 and min(result.shape) > 1)
    return [*_copies(call, 1, 2), *_workspaces(call, lt=fused)]


def baddbmm(call: Call) -> list[Scratch]:
    """baddbmm(input, a, b), addbmm: through cuBLAS."""
    return [*_copies(call, 1, 2), *_workspaces(call, lt=False)]


def vector(call: Call) -> list[Scratch]:
    """mv, addmv, dot, vdot, addr: they fetch the cuBLAS handle and so its workspace."""
    return _workspaces(call, lt=False)


TABLE = {
    "mm": matmul, "bmm": matmul, "_int_mm": scaled_matmul, "_scaled_mm": scaled_matmul,
    "addmm": addmm, "addmm_": addmm, "_addmm_activation": addmm,
    "baddbmm": baddbmm, "baddbmm_": baddbmm, "addbmm": baddbmm,
    "mv": vector, "addmv": vector, "dot": vector, "vdot": vector,
}

__all__ = ["TABLE", "cublas_workspace"]
