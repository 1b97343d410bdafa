"""Outputs of our meta kernels are those of the device kernels they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmem
from llmem.gpu.devices import get_device
from llmem.lifetimes import Trace
from llmem.trace.kernels import kernels_of

F32 = 4


def on_meta(function: Any, *args: Any) -> Any:
    """What ``function`` returns for meta copies of its arguments, with CPU kernels assumed."""
    moved = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    with kernels_of(get_device("cpu"), lambda _: None):
        return function(*moved)


def layout(out: Any) -> list[tuple[Any, ...]]:
    outputs = out if isinstance(out, tuple) else (out,)
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in outputs]


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float32, torch.float32),
        (torch.float32, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, None),
    ],
)
def test_layer_norm_statistics_on_cpu(dtype: torch.dtype, weights: torch.dtype | None) -> None:
    x = torch.ones(3, 2, 5, dtype=dtype).transpose(0, 1)
    weight = None if weights is None else torch.ones(5, dtype=weights)
    args = (x, [5], weight, weight, 1e-5)
    real = torch.native_layer_norm(*args)
    assert layout(on_meta(torch.native_layer_norm, *args)) == layout(real)


OFFSETS = torch.tensor([2, 4, 8], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b", "offsets"),
    [
        ((8, 16), (3, 16, 24), OFFSETS),
        ((16, 8), (8, 24), OFFSETS),
        ((3, 8, 16), (16, 8), OFFSETS),
        ((3, 8, 16), (3, 16, 24), None),
    ],
)
def test_grouped_mm(
    a: tuple[int, ...], b: tuple[int, ...], offsets: torch.Tensor | None, dtype: torch.dtype
) -> None:
    args = (torch.ones(a, dtype=dtype), torch.ones(b, dtype=dtype), offsets)
    real = torch._grouped_mm(*args)
    assert layout(on_meta(torch._grouped_mm, *args)) == layout(real)


def norm_trace(dtype: torch.dtype) -> Trace:
    with torch.device("meta"):
        norm = torch.nn.RMSNorm(6, dtype=dtype)
        x = torch.empty(2, 3, 6, requires_grad=True)
    return llmem.trace(lambda: norm(x).sum().backward(), model=norm, steps=1, gpu="a100-80gb")


def test_rms_norm_is_one_kernel_on_cuda() -> None:
    trace = norm_trace(torch.float32)
    names = [trace.op_name(op) for op in range(len(trace.ops))]
    assert names == ["_fused_rms_norm", "sum", "ones_like", "_fused_rms_norm_backward"]
    born = trace.lifetimes.take(trace.lifetimes.birth_op == 0)
    assert born.nbytes.tolist() == [2 * 3 * 6 * F32, 2 * 3 * F32]  # output and rstd


def test_rms_norm_falls_apart_where_dtypes_differ() -> None:
    trace = norm_trace(torch.bfloat16)
    names = [trace.op_name(op) for op in range(len(trace.ops))]
    assert names[:6] == ["pow", "mean", "add_", "rsqrt", "mul", "mul"]


def test_kernels_are_gone_afterwards() -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    on_meta(torch.native_layer_norm, x, [4], None, None, 1e-5)
    # torch's own meta kernel answers as on CUDA.
    assert torch.native_layer_norm(x.to("meta"), [4], None, None, 1e-5)[1].dtype == torch.float32
