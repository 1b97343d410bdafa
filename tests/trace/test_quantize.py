"""Quantised weights: bytes kept, copies made, tensors saved; by hand and against bitsandbytes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Trace
from llmem.trace.standins.bitsandbytes import (
    FourBit,
    Linear4bit,
    Linear8bitLt,
    quantize_4bit,
)
from llmem.trace.standins.bitsandbytes_ops import OUTLIER_COLUMNS, Habits

N, K = 24, 40
"""Output and input features: 960 weights, 15 blocks of 64."""
ROWS = 6
HALF = torch.bfloat16


def bytes_of(tensors: list[torch.Tensor]) -> list[int]:
    return [t.untyped_storage().nbytes() for t in tensors]


# -- what is kept ------------------------------------------------------------------------------


def test_4bit_storage_by_hand() -> None:
    weight = torch.empty(N, K, dtype=HALF, device="meta")
    packed, state = quantize_4bit(weight, "nf4", double=False)
    assert packed.shape == (480, 1) and packed.dtype == torch.uint8
    assert bytes_of(state.tensors()) == [15 * 4, 16 * 4]
    packed, state = quantize_4bit(weight, "nf4", double=True)
    assert packed.shape == (480, 1)
    assert bytes_of(state.tensors()) == [15, 1 * 4, 256 * 4, 4, 16 * 4]


@pytest.mark.parametrize("shape", [(24, 40), (3, 5), (512, 1024), (129, 333)])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4bit_storage_is_that_of_bitsandbytes(
    shape: tuple[int, int], double: bool, kind: str
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    real, state = functional.quantize_4bit(
        torch.randn(shape), compress_statistics=double, quant_type=kind
    )
    packed, ours = quantize_4bit(torch.empty(shape, device="meta"), kind, double=double)
    assert (packed.shape, packed.dtype) == (real.shape, real.dtype)
    nested = [state.state2.absmax, state.state2.code, state.offset] if double else []
    theirs = [state.absmax, *nested, state.code]
    assert [(t.shape, t.dtype) for t in ours.tensors()] == [(t.shape, t.dtype) for t in theirs]


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_packed_weights_in_other_dtypes(storage: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    real, _ = functional.quantize_4bit(torch.randn(64, 64), quant_storage=storage)
    packed, _ = quantize_4bit(
        torch.empty(64, 64, device="meta"), "fp4", double=False, storage=storage
    )
    assert (packed.shape, packed.dtype) == (real.shape, real.dtype)
    assert packed.numel() * storage.itemsize == 2048


def test_int8_storage_is_that_of_bitsandbytes() -> None:
    nn = pytest.importorskip("bitsandbytes.nn")
    real = nn.Int8Params(torch.randn(N, K), requires_grad=False, has_fp16_weights=False).to("cpu")
    ours = Linear8bitLt(torch.empty(N, K, device="meta"), None, Habits())
    assert (
        (ours.weight.shape, ours.weight.dtype) == (real.shape, real.dtype) == ((N, K), torch.int8)
    )
    assert (ours.state.SCB.shape, ours.state.SCB.dtype) == (real.SCB.shape, real.SCB.dtype)


# -- what a product makes and saves --------------------------------------------------------------


def product(layer: torch.nn.Module, dtype: torch.dtype, rows: int = ROWS) -> Trace:
    x = torch.empty(1, rows, K, dtype=dtype, device="meta", requires_grad=True)

    def step() -> None:
        layer(x).backward(torch.empty(1, rows, N, dtype=dtype, device="meta"))

    return llmem.trace(step, model=layer, steps=1, gpu="a100-80gb")


def births(trace: Trace) -> list[tuple[str, int]]:
    """Ops and bytes of what they made, in order, without kernels' workspaces."""
    table = trace.lifetimes
    return [
        (trace.names[trace.ops.name[op]], nbytes)
        for op, nbytes, kind in zip(
            table.birth_op.tolist(), table.nbytes.tolist(), table.category.tolist(), strict=True
        )
        if op >= 0 and kind != Category.WORKSPACE
    ]


def four_bit(*, double: bool = False, compute: torch.dtype = HALF, **habits: bool) -> Linear4bit:
    bits = FourBit("nf4", double, compute, torch.uint8)
    weight = torch.empty(N, K, dtype=HALF, device="meta")
    return Linear4bit(weight, None, bits, dataclasses.replace(Habits(), **habits))


COPY = N * K * 2
OUT, IN = ROWS * N * 2, ROWS * K * 2


def test_4bit_product_dequantises_twice_and_saves_nothing() -> None:
    trace = product(four_bit(), HALF)
    assert births(trace) == [
        ("new_empty", COPY), ("mm", OUT), ("empty", OUT),  # forward; the gradient given
        ("empty", COPY), ("mm", IN),
    ]  # fmt: skip
    table = trace.lifetimes
    copies = [i for i, n in enumerate(table.nbytes.tolist()) if n == COPY]
    forward_copy, backward_copy = copies
    assert table.death[forward_copy] < table.birth[backward_copy]


def test_double_quantization_makes_fp32_absmax_first() -> None:
    made = births(product(four_bit(double=True), HALF))
    assert made == [
        ("empty_like", 60), ("add", 60), ("new_empty", COPY), ("mm", OUT), ("empty", OUT),
        ("empty_like", 60), ("empty", COPY), ("mm", IN),
    ]  # fmt: skip


def test_other_compute_dtype_casts_input_output_and_the_copy_of_backward() -> None:
    made = births(product(four_bit(compute=torch.float32), HALF))
    assert made == [
        ("_to_copy", 2 * IN), ("new_empty", 2 * COPY), ("mm", 2 * OUT), ("_to_copy", OUT),
        ("empty", OUT), ("_to_copy", 2 * OUT),
        ("empty", COPY), ("_to_copy", 2 * COPY), ("mm", 2 * IN), ("_to_copy", IN),
    ]  # fmt: skip


def test_few_rows_need_no_copy_in_forward() -> None:
    made = births(product(four_bit(), HALF, rows=4))
    assert made[0] == ("new_empty", 4 * N * 2)
    assert [n for _, n in made].count(COPY) == 1


@pytest.mark.parametrize(("version", "saved"), [("0.43.1", 1), ("0.43.2", 0), ("0.43", 0)])
def test_old_versions_keep_the_input(version: str, saved: int) -> None:
    habits = Habits.of(version, int8=False, cuda=True)
    layer = four_bit(**{k: v for k, v in vars(habits).items() if k != "cuda"})
    x = torch.empty(1, ROWS, K, dtype=HALF, device="meta", requires_grad=True)
    alive: list[int] = []

    def step() -> None:
        out = layer(x * 1)  # the product alone may keep it
        alive.append(sum(isinstance(v, torch.Tensor) for v in (out.grad_fn.kept,)))  # type: ignore[union-attr]

    llmem.trace(step, model=layer, steps=1)
    assert alive == [saved]


def test_versions() -> None:
    old = Habits.of("0.45.5", int8=False, cuda=True)
    assert (old.fused, old.compute_dtype_from_input) == (False, True)
    assert Habits.of("0.50.2", int8=True, cuda=True) == Habits.of(None, int8=True, cuda=True)
    with pytest.raises(LlmemError, match=r"use 0\.45 or later"):
        Habits.of("0.43", int8=True, cuda=True)
    with pytest.raises(LlmemError, match="no version"):
        Habits.of("new", int8=False, cuda=True)


def test_before_047_the_first_input_decides_the_compute_dtype() -> None:
    layer = four_bit(fused=False, compute_dtype_from_input=True)
    layer(torch.empty(1, ROWS, K, device="meta"))
    assert layer.compute_dtype == torch.float32
    layer(torch.empty(1, ROWS, K, dtype=HALF, device="meta"))
    assert layer.compute_dtype == torch.float32


def test_int8_product_by_hand() -> None:
    layer = Linear8bitLt(torch.empty(N, K, dtype=HALF, device="meta"), None, Habits())
    sizes = Counter(n for _, n in births(product(layer, HALF)))
    columns = OUTLIER_COLUMNS
    assert sizes[ROWS * N * 4] == 1  # the int32 product
    assert sizes[ROWS * K] == 2  # int8 x, and which of its values are outliers
    assert sizes[columns * 8] == 1  # their columns
    assert sizes[ROWS * columns * 2] >= 1  # x there, kept for backward
    assert sizes[N * columns * 4] == 2  # weights there, times the scale, over 127
    assert sizes[COPY] == 1  # dequantised in backward alone
    assert sizes[IN] == 3  # x in fp16, its absolute values, the gradient
