"""Composite ops on meta tensors become the ops that CUDA would run; bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from llmem.errors import LlmemError
from llmem.gpu.devices import get_device
from llmem.trace.kernels import kernels_of, torch_version
from llmem.trace.optimizers import multi_tensor_ops_on_meta

HALF = torch.bfloat16


class Ops(TorchDispatchMode):
    """Names of the ops that ran, and the tensors each returned."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else (out,)
        tensors = [t for t in found if isinstance(t, torch.Tensor)]
        self.outputs.setdefault(func.overloadpacket.__name__, []).extend(tensors)
        return out


def ops_of(
    step: Callable[[], torch.Tensor], gpu: str = "a100-80gb", as_torch: str | None = None
) -> Ops:
    """Run forward and backward of ``step`` as on ``gpu``."""
    with kernels_of(get_device(gpu), lambda _: None, None, as_torch), Ops() as seen:
        step().sum().backward()
    return seen


def tensor(*shape: int, dtype: torch.dtype = HALF, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def test_rms_norm_is_one_fused_kernel_that_keeps_a_number_per_row() -> None:
    x, w = tensor(4, 6, 8), tensor(8)
    seen = ops_of(lambda: F.rms_norm(x, (8,), w, 1e-6))
    out, rstd = seen.outputs["_fused_rms_norm"]
    assert (out.shape, out.dtype) == ((4, 6, 8), HALF)
    assert (rstd.shape, rstd.dtype) == ((4, 6, 1), torch.float32)
    assert "rsqrt" not in seen.outputs
    d_input, d_weight = seen.outputs["_fused_rms_norm_backward"]
    assert (d_input.shape, d_weight.shape) == ((4, 6, 8), (8,))


def test_rms_norm_falls_apart_where_dtypes_differ() -> None:
    x, w = tensor(4, 8), tensor(8, dtype=torch.float32)
    seen = ops_of(lambda: F.rms_norm(x, (8,), w, 1e-6))
    assert "_fused_rms_norm" not in seen.outputs and "rsqrt" in seen.outputs


def test_rms_norm_was_a_formula_before_2_9() -> None:
    x, w = tensor(4, 8), tensor(8)
    seen = ops_of(lambda: F.rms_norm(x, (8,), w, 1e-6), as_torch="2.8")
    assert "_fused_rms_norm" not in seen.outputs and "rsqrt" in seen.outputs


def test_layer_norm_keeps_mean_and_rstd_in_fp32() -> None:
    x, w, b = tensor(4, 8), tensor(8), tensor(8)
    seen = ops_of(lambda: F.layer_norm(x, (8,), w, b))
    out, mean, rstd = seen.outputs["native_layer_norm"]
    assert out.dtype == HALF
    assert [(t.shape, t.dtype) for t in (mean, rstd)] == [((4, 1), torch.float32)] * 2


def test_cross_entropy_is_log_softmax_and_nll() -> None:
    logits, target = tensor(6, 11, dtype=torch.float32), tensor(6, grad=False).long()
    seen = ops_of(lambda: F.cross_entropy(logits, target))
    assert seen.outputs["_log_softmax"][0].shape == (6, 11)
    loss, total = seen.outputs["nll_loss_forward"]
    assert loss.shape == total.shape == ()
    assert seen.outputs["nll_loss_backward"][0].shape == (6, 11)
    assert seen.outputs["_log_softmax_backward_data"][0].shape == (6, 11)


def test_label_smoothing_sums_the_log_probabilities_besides() -> None:
    logits, target = tensor(6, 11, dtype=torch.float32), tensor(6, grad=False).long()
    seen = ops_of(lambda: F.cross_entropy(logits, target, label_smoothing=0.1))
    assert (6,) in [tuple(t.shape) for t in seen.outputs["sum"]]
    assert "nll_loss_forward" in seen.outputs


def test_cross_entropy_over_images_is_nll_loss2d() -> None:
    logits, target = tensor(2, 5, 3, 3, dtype=torch.float32), tensor(2, 3, 3, grad=False).long()
    seen = ops_of(lambda: F.cross_entropy(logits, target))
    assert seen.outputs["nll_loss2d_backward"][0].shape == (2, 5, 3, 3)


@pytest.mark.parametrize(("dtype", "casts"), [(torch.float16, False), (torch.bfloat16, True)])
def test_softmax_to_fp32_casts_inside_the_kernel_for_fp16_alone(
    dtype: torch.dtype, casts: bool
) -> None:
    """ATen/native/SoftMax.cpp: half_to_float is for Half; bf16 is converted by a copy first."""
    x = tensor(4, 8, dtype=dtype)
    with kernels_of(get_device("a100-80gb"), lambda _: None), Ops() as seen:
        out = F.softmax(x, -1, dtype=torch.float32)
    assert out.dtype == torch.float32
    assert ("_to_copy" in seen.outputs) is casts


def test_dropout_is_one_kernel_with_a_bool_mask() -> None:
    x = tensor(4, 8)
    seen = ops_of(lambda: F.dropout(x, 0.1))
    out, mask = seen.outputs["native_dropout"]
    assert (out.dtype, mask.dtype) == (HALF, torch.bool)
    assert "bernoulli_" not in seen.outputs and "native_dropout_backward" in seen.outputs


@pytest.mark.parametrize(
    ("act", "name"),
    [(F.silu, "silu"), (F.gelu, "gelu"), (lambda x: F.gelu(x, approximate="tanh"), "gelu")],
)
def test_activations_keep_their_input_alone(act: Any, name: str) -> None:
    x = tensor(4, 8)
    seen = ops_of(lambda: act(x))
    around = {"sum", "ones_like", "expand", "detach", "new_empty_strided", "copy_"}
    assert set(seen.outputs) - around == {name, f"{name}_backward"}


@pytest.mark.parametrize(
    ("gpu", "dtype", "op"),
    [
        ("a100-80gb", torch.bfloat16, "_scaled_dot_product_flash_attention"),
        ("h100-80gb", torch.bfloat16, "_scaled_dot_product_cudnn_attention"),
        ("a100-80gb", torch.float32, "bmm"),
    ],
)
def test_grouped_heads_go_to_kernels_that_know_them(
    gpu: str, dtype: torch.dtype, op: str
) -> None:
    """Flash and cuDNN take fewer key heads; the efficient kernel does not (torch < 2.14)."""
    q, k, v = tensor(2, 4, 16, 64, dtype=dtype), *(tensor(2, 2, 16, 64, dtype=dtype) for _ in "kv")

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    seen = ops_of(attend, gpu, "2.13")
    assert op in seen.outputs
    assert (k.grad.shape if k.grad is not None else None) == (2, 2, 16, 64)


def test_clipping_makes_one_norm_per_tensor_and_scales_in_place() -> None:
    parameters = [tensor(8, 8, dtype=torch.float32), tensor(8, dtype=torch.float32)]
    for p in parameters:
        p.grad = torch.empty_like(p)
    with multi_tensor_ops_on_meta(), Ops() as seen:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    assert [t.shape for t in seen.outputs["_foreach_norm"]] == [(), ()]
    assert "_foreach_mul_" in seen.outputs and "_foreach_mul" not in seen.outputs


def test_kernels_are_gone_afterwards() -> None:
    x = tensor(4, 8)
    ops_of(lambda: F.dropout(x, 0.1))
    with Ops() as seen:
        F.dropout(x, 0.1)
    assert "native_dropout" not in seen.outputs


def test_a_version_that_is_none_is_refused() -> None:
    assert torch_version("2.6.0+cu124") == (2, 6)
    with pytest.raises(LlmemError, match="no version of torch"):
        torch_version("newest")
