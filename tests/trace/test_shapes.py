"""Outputs that are made without asking torch are those that torch would have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmem.trace.shapes import KnownShapes, makes_new_tensors

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An op that counts how often it is asked."""

    def __init__(self, func: Any) -> None:
        self.func, self.namespace, self._schema, self.calls = func, func.namespace, func._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.func(*args, **kwargs)


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    nbytes = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), nbytes


CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mul.Tensor, (meta(3, 4), meta(4)), {}),
    (aten.mul.Tensor, (meta(4, 3).t(), meta(3, 4)), {}),
    (aten.add.Tensor, (meta(3, dtype=torch.bfloat16), 1.0), {}),
    (aten.add.Tensor, (meta(3, dtype=torch.int64), 1.0), {}),
    (aten.mm.default, (meta(3, 4), meta(4, 5)), {}),
    (aten.cat.default, ([meta(3, 4), meta(2, 4)],), {}),
    (aten.sum.dim_IntList, (meta(3, 4), [0], True), {"dtype": torch.float64}),
    (aten._to_copy.default, (meta(3, 4),), {"dtype": torch.float16}),
    (aten.clone.default, (meta(4, 3).t(),), {"memory_format": torch.contiguous_format}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_the_second_answer_is_the_first_and_torch_is_asked_once(case: Any) -> None:
    func, args, kwargs = case
    op, known = Counted(func), KnownShapes()
    first, second = (known.call(op, args, kwargs) for _ in range(2))
    assert layout(first) == layout(second) == layout(func(*args, **kwargs))
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert op.calls == 1


def test_ops_with_several_outputs() -> None:
    x, weight = meta(3, 4), meta(4)
    op, known = Counted(aten.native_layer_norm.default), KnownShapes()
    first, second = (known.call(op, (x, [4], weight, weight, 1e-5), None) for _ in range(2))
    assert [layout(t) for t in first] == [layout(t) for t in second]
    assert [tuple(t.shape) for t in second] == [(3, 4), (3, 1), (3, 1)]
    assert op.calls == 1
    backward = Counted(aten.native_layer_norm_backward.default)
    args = (x, x, [4], first[1], first[2], weight, weight, [True, False, False])
    for _ in range(2):  # gradients that nobody asked for are None
        made = known.call(backward, args, None)
        assert made[0].shape == (3, 4) and made[1] is None and made[2] is None
    assert backward.calls == 1


def test_equal_numbers_of_other_types_are_other_questions() -> None:
    known, x = KnownShapes(), meta(3, dtype=torch.int64)
    dtypes = [known.call(aten.mul.Tensor, (x, n), None).dtype for n in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_views_and_ops_in_place_are_left_alone() -> None:
    known, x = KnownShapes(), meta(3, 4)
    assert not any(map(makes_new_tensors, (aten.view.default, aten.add_.Tensor, aten.unbind.int)))
    for _ in range(2):
        # no alias in its schema, and yet a view
        assert known.call(aten._unsafe_view.default, (x, [12]), None).untyped_storage()._cdata == (
            x.untyped_storage()._cdata
        )
        assert known.call(aten.add_.Tensor, (x, 1), None) is x


def test_real_tensors_are_always_computed() -> None:
    known, ones = KnownShapes(), torch.ones(3)
    for _ in range(2):
        assert known.call(aten.mul.Tensor, (ones, 2), None).tolist() == [2, 2, 2]


def test_long_lists_and_ops_without_tensors_are_asked_each_time() -> None:
    known = KnownShapes()
    for func, args in ((aten.cat.default, ([meta(2)] * 9,)), (aten.zeros.default, ([3],))):
        op = Counted(func)
        for _ in range(2):
            known.call(op, args, {"device": torch.device("meta")} if args == ([3],) else None)
        assert op.calls == 2


def test_gradients_flow_through_remembered_outputs() -> None:
    class Mode(TorchDispatchMode):
        known = KnownShapes()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return self.known.call(func, args, kwargs)

    x = meta(3, 4).requires_grad_()
    with Mode():
        y = (x * x) * (x * x)
        y.sum().backward()
    assert x.grad is not None and x.grad.shape == (3, 4)
