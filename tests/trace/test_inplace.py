"""What a real run does in place, counted by hand on steps of a few tensors of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import llmem
from llmem.lifetimes import Phase, Trace
from llmem.trace.inplace import InPlace, dense, sole_reference_counts

N = 4
BYTES = 16


def leaf(device: str = "meta") -> Tensor:
    return torch.zeros(N, device=device, requires_grad=True)


def traced(step: Callable[[], Any], device: str = "meta") -> Trace:
    return llmem.trace(step, steps=1, device=device, gpu="cpu")  # type: ignore[operator,no-any-return]


def births(trace: Trace, phase: Phase = Phase.BACKWARD) -> list[str]:
    """Names of the ops of ``phase`` that made a storage, once per storage."""
    ops = trace.lifetimes.birth_op
    return [trace.op_name(op) for op in ops.tolist() if op >= 0 and trace.ops.phase[op] == phase]


def test_gradients_of_a_tensor_used_twice_are_added_in_place() -> None:
    x = leaf()

    def step() -> None:
        y = x * 2
        (y.sigmoid() * y.tanh()).sum().backward()  # type: ignore[no-untyped-call]

    # ones for the loss; a product for each factor; the two gradients of y, added up in place;
    # x's own gradient.
    assert births(traced(step)) == [
        "ones_like", "mul", "mul", "tanh_backward", "sigmoid_backward", "mul",
    ]  # fmt: skip


def test_a_gradient_that_somebody_holds_is_not_added_to() -> None:
    x = leaf()
    held: list[Tensor] = []

    def step() -> None:
        y = x * 2
        sigmoid, tanh = y.sigmoid(), y.tanh()
        assert tanh.grad_fn is not None  # made last, so its gradient comes first
        tanh.grad_fn.register_hook(lambda grads, _: held.extend(grads))
        (sigmoid * tanh).sum().backward()  # type: ignore[no-untyped-call]

    assert births(traced(step)).count("add") == 1


def test_a_gradient_that_is_a_view_is_not_added_to() -> None:
    x = leaf()

    def step() -> None:
        y = x * 2
        (y.view(2, 2).exp().sum() + y.exp().sum()).backward()  # type: ignore[no-untyped-call]

    # The branch of y.view runs last, so the buffer holds exp's plain gradient: added to in place.
    assert "add" not in births(traced(step))

    def swapped() -> None:
        y = x * 2
        (y.exp().sum() + y.view(2, 2).exp().sum()).backward()  # type: ignore[no-untyped-call]

    assert births(traced(swapped)).count("add") == 1


def test_a_gradient_with_gaps_is_not_added_to() -> None:
    tensor = torch.empty(4, 4)
    assert dense(tensor) and dense(tensor.t()) and dense(tensor[:, :0].contiguous())
    assert not dense(tensor[:, :2]) and not dense(tensor[:1].expand(4, 4))
    assert dense(torch.empty(2, 1, 3).transpose(0, 2))


@pytest.mark.parametrize(
    ("forward", "formula"),
    [
        (lambda x: x.max(0)[0], ["ones_like", "new_zeros"]),
        (lambda x: x.gather(0, torch.zeros(2, dtype=torch.int64, device=x.device)).sum(),
         ["ones_like", "new_zeros"]),
        (lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64, device=x.device)).sum(),
         ["ones_like", "new_zeros"]),
        (lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)].sum(),
         ["ones_like", "new_zeros"]),
    ],
    ids=["max", "gather", "index_select", "index"],
)  # fmt: skip
def test_scatters_of_formulas_write_into_the_zeros_they_have_just_made(
    forward: Callable[[Tensor], Tensor], formula: list[str]
) -> None:
    x = leaf()

    def step() -> None:
        forward(x).backward()  # type: ignore[no-untyped-call]

    assert births(traced(step)) == formula


def test_a_backward_written_in_python_adds_out_of_place() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 1 + grad * 1

    x = leaf()

    def step() -> None:
        Twice.apply(x).sum().backward()  # type: ignore[no-untyped-call]

    assert births(traced(step)) == ["ones_like", "mul", "mul", "add"]


def test_recomputed_forward_code_adds_and_scatters_out_of_place() -> None:
    x = leaf()
    at = torch.zeros(N, dtype=torch.int64, device="meta")

    def block(x: Tensor) -> Tensor:
        y = x.exp() + x.exp()
        return y.scatter(0, at, 1.0).tanh().sigmoid()

    def step() -> None:
        out = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        out.sum().backward()

    made = births(traced(step))
    assert made[:6] == ["ones_like", "exp", "exp", "add", "scatter", "tanh"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_math_attention_adds_its_mask_in_place(device: str) -> None:
    q = torch.zeros(1, 2, 4, 8, device=device, requires_grad=True)
    mask = torch.zeros(1, 2, 4, 4, device=device, requires_grad=True)  # no fused kernel takes it

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    trace = traced(step, device)
    names = [trace.op_name(op) for op in range(len(trace.ops))]
    assert "add" in names
    assert "add" not in births(trace, Phase.FORWARD)


def test_a_plain_sum_in_forward_is_a_new_tensor() -> None:
    x = leaf()
    assert births(traced(lambda: (x * 2) + (x * 3)), Phase.FORWARD) == ["mul", "mul", "add"]


def test_the_real_engine_agrees() -> None:
    """Without any mode, the engine's sum lies where the first gradient was: one buffer less."""
    x = leaf("cpu")
    addresses = []
    y = x * 2
    sigmoid, tanh = y.sigmoid(), y.tanh()
    for branch in (tanh, sigmoid):
        assert branch.grad_fn is not None
        branch.grad_fn.register_hook(lambda grads, _: addresses.append(grads[0].data_ptr()))
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: addresses.append(grads[0].data_ptr()))
    (sigmoid * tanh).sum().backward()  # type: ignore[no-untyped-call]
    first, _, total = addresses
    assert total == first


def test_reference_counts_are_measured_once() -> None:
    assert sole_reference_counts() is sole_reference_counts()
    assert InPlace().in_composite is False
