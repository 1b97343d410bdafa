"""Stand-ins for flash-attn and Liger: what they allocate, by hand, and the registry."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Trace
from llmem.trace import standins
from llmem.trace.standins import flash_attn, liger_ops

SMS = 108  # A100
BATCH, TOKENS = 2, 128


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def born(trace: Trace) -> list[int]:
    """Bytes of every storage that the traced step made, workspaces of cuBLAS left out."""
    table = trace.lifetimes
    return table.nbytes[table.category != Category.WORKSPACE].tolist()


def traced(step: Any, steps: int = 1) -> Trace:
    return llmem.trace(step, steps=steps, gpu="a100-80gb")


class Causal:
    is_causal = True


def test_dense_flash_makes_output_lse_and_gradients_only() -> None:
    q, k, v = (tensor(2, heads, 128, 64) for heads in (4, 2, 2))
    gradient = tensor(2, 128, 4, 64, grad=False)

    def step() -> None:
        flash_attn.attention(Causal(), q, k, v, None)[0].backward(gradient)

    sizes = born(traced(step))
    big = 2 * 128 * 4 * 64 * 2
    assert sizes[:4] == [big, 2 * 4 * 128 * 4, 16, 8]  # output, fp32 LSE, RNG state and a scalar
    assert sizes[-3:] == [big, big // 2, big // 2]  # dq, dk, dv


def test_flash_backward_accumulates_dq_in_fp32_and_expands_grouped_heads() -> None:
    q, k, v = (tensor(2, heads, 128, 64) for heads in (4, 2, 2))
    gradient = tensor(2, 128, 4, 64, grad=False)
    trace = traced(
        lambda: flash_attn.attention(Causal(), q, k, v, None)[0].backward(gradient)
    )
    table = trace.lifetimes
    scratch = table.nbytes[table.category == Category.WORKSPACE].tolist()
    assert scratch == [2 * 4 * 128 * 4, 2 * 128 * 4 * 64 * 4, *[2 * 128 * 4 * 64 * 2] * 2]


def test_padding_costs_copies_of_query_key_value_and_output() -> None:
    q, k, v = (tensor(2, 4, 128, 64, grad=False) for _ in range(3))
    mask = tensor(2, 128, dtype=torch.int64, grad=False)
    plain = sum(born(traced(lambda: flash_attn.attention(Causal(), q, k, v, None))))
    padded = sum(born(traced(lambda: flash_attn.attention(Causal(), q, k, v, mask))))
    one = 2 * 128 * 4 * 64 * 2
    # q, k, v made contiguous and gathered, the output scattered into zeros; indices and offsets
    assert padded - plain == 7 * one + 256 * 8 + 2 * 4 + 2 * 4 + 3 * 4


def test_packed_rows_need_no_copies() -> None:
    q, k, v = (
        tensor(1, 256, heads, 64, grad=False).transpose(1, 2) for heads in (4, 2, 2)
    )
    starts = tensor(4, dtype=torch.int32, grad=False)
    trace = traced(
        lambda: flash_attn.attention(
            Causal(), q, k, v, None, cu_seq_lens_q=starts, max_length_q=100
        )
    )
    assert born(trace) == [256 * 4 * 64 * 2, 4 * 256 * 4, 16, 8, 0]


@pytest.mark.parametrize("padding", [False, True])
def test_a_model_with_flash_attention_2_traces(padding: bool) -> None:
    result = llmem.estimate(
        model="qwen3-0.6b", per_device_train_batch_size=BATCH, seq_length=TOKENS,
        attn_implementation="flash_attention_2", padding=padding, gpu="a100-80gb",
    )  # fmt: skip
    ops = set(result.trace.names)
    assert "_flash_attention_backward" in ops
    assert ("index_put" in ops) is padding
    assert not any(op.startswith("_scaled_dot_product") for op in ops)


def test_rms_norm_writes_its_gradient_over_the_incoming_one() -> None:
    x, weight = tensor(64, 256), tensor(256)
    gradient = tensor(64, 256, grad=False)

    def step() -> None:
        liger_ops.rms_norm(x, weight, sm_count=SMS).backward(gradient)

    output, rstd, partial, summed, cast, kept = born(traced(step))
    assert (output, rstd, partial) == (64 * 256 * 2, 64 * 4, SMS * 256 * 4)
    assert (summed, cast) == (256 * 4, 256 * 2)
    assert kept == 64 * 256 * 2  # x.grad: a copy, as the test still holds what was written over


def test_swiglu_keeps_gate_and_up_and_reuses_them() -> None:
    gate, up = tensor(64, 256), tensor(64, 256)
    gradient = tensor(64, 256, grad=False)
    assert born(traced(lambda: liger_ops.gated(gate, up).backward(gradient))) == [64 * 256 * 2]


def test_rope_turns_token_major_heads_in_place() -> None:
    q, k = (tensor(1, 32, heads, 64, grad=False).transpose(1, 2) for heads in (4, 2))
    cos = sin = tensor(1, 32, 64, grad=False)
    assert born(traced(lambda: liger_ops.rope(q, k, cos, sin))) == []
    q, k = (tensor(1, heads, 32, 64, grad=False) for heads in (4, 2))
    assert born(traced(lambda: liger_ops.rope(q, k, cos, sin))) == [
        32 * 4 * 64 * 2, 32 * 2 * 64 * 2
    ]  # fmt: skip


def test_cross_entropy_never_holds_a_second_copy_of_the_logits() -> None:
    hidden, weight = tensor(64, 32), tensor(1000, 32)
    target = tensor(64, dtype=torch.int64, grad=False)

    def step() -> None:
        liger_ops.cross_entropy(hidden @ weight.t(), target).backward()

    assert born(traced(step)).count(64 * 1000 * 2) == 1


def test_fused_linear_cross_entropy_goes_chunk_by_chunk() -> None:
    """V / H = 5, so at least a fifth of 48 tokens at a time, to a power of two: 16."""
    hidden, weight = tensor(48, 32), tensor(160, 32)
    target = tensor(48, dtype=torch.int64, grad=False)

    def step() -> None:
        liger_ops.fused_linear_cross_entropy(hidden, weight, target).backward()

    sizes = born(traced(step))
    assert liger_ops.chunk_rows(48, 32, 160) == 16
    assert sizes.count(16 * 160 * 2) == 3
    assert 48 * 160 * 2 not in sizes


def peak(**fields: Any) -> int:
    result = llmem.estimate(
        model="llama-3.2-1b", per_device_train_batch_size=BATCH, seq_length=TOKENS,
        gpu="a100-80gb", **fields,
    )  # fmt: skip
    return result.worst.peak.allocated


def test_liger_saves_memory_and_its_loss_makes_no_logits() -> None:
    logits = BATCH * TOKENS * 128256 * 2
    result = llmem.estimate(
        model="llama-3.2-1b", per_device_train_batch_size=BATCH, seq_length=TOKENS,
        gpu="a100-80gb", liger=True,
    )  # fmt: skip
    assert logits not in result.trace.lifetimes.nbytes
    assert "rsqrt" not in result.trace.names
    assert result.worst.peak.allocated < peak()


def test_loss_liger_leaves_the_layers_alone() -> None:
    result = llmem.estimate(
        model="llama-3.2-1b", per_device_train_batch_size=BATCH, seq_length=TOKENS,
        gpu="a100-80gb", loss="liger",
    )  # fmt: skip
    assert "rsqrt" in result.trace.names and "_log_softmax" not in result.trace.names


def test_liger_is_refused_where_it_has_no_kernels() -> None:
    with pytest.raises(LlmemError, match="no kernels for model type 'gpt2'"):
        llmem.estimate(model="gpt2", seq_length=16, liger=True)
    with pytest.raises(LlmemError, match="GPUs only"):
        llmem.estimate(model="llama-3.2-1b", seq_length=16, liger=True, gpu="cpu")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package whose only function needs a GPU; the registry is as before afterwards."""
    module: Any = ModuleType("needs_gpu")

    def double(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs a GPU")

    module.double = double
    monkeypatch.setitem(sys.modules, "needs_gpu", module)
    monkeypatch.setattr(standins, "_STAND_INS", {})
    return module


def test_a_registered_stand_in_acts_in_traces_only(package: Any) -> None:
    before = package.double
    standins.register("needs_gpu:double", lambda x: torch.empty(2 * x.numel(), device=x.device))
    x = torch.empty(256, device="meta")
    assert born(traced(lambda: package.double(x))) == [2048]
    assert package.double is before
    assert list(standins.registered()) == ["needs_gpu:double"]


def test_bad_targets_are_refused(package: Any) -> None:
    with pytest.raises(LlmemError, match="not for 'needs_gpu'"):
        standins.register("needs_gpu", abs)
    standins.register("needs_gpu:triple", abs)
    with pytest.raises(LlmemError, match="no triple"):
        traced(lambda: None)


def test_packages_that_are_not_there_are_left_alone(package: Any) -> None:
    standins.register("nobody_has_this:f", abs)
    assert born(traced(lambda: torch.empty(4, device="meta"))) == [16]
