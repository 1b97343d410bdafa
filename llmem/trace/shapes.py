"""Remember what shape an op's output has, so that the same question is asked once.

On meta tensors torch works out the output of most elementwise ops in Python, a quarter of a
millisecond each, and a transformer asks the same of every block. The answer depends on nothing but
the op, the layout of its tensor arguments and its other arguments.
"""

from __future__ import annotations

from typing import Any

import torch

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor that fills its storage."""

LONGEST_LIST = 8
"""Lists of more tensors (foreach ops) are not looked up: the question is as long as the answer."""


class KnownShapes:
    """Outputs of ops on meta tensors, made without asking torch again.

    Only of ops that return one new tensor: no views, nothing in place, no scalars.
    """

    def __init__(self) -> None:
        self._asked: dict[Any, bool] = {}
        self._layouts: dict[Any, Layout | None] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """``func(*args, **kwargs)``, or a tensor just like it."""
        makes_one = self._asked.get(func)
        if makes_one is None:
            makes_one = self._asked[func] = makes_one_tensor(func)
        question = _question(func, args, kwargs) if makes_one else None
        if question is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        layout = self._layouts.get(question)
        if layout is not None:
            shape, stride, dtype = layout
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs) if kwargs else func(*args)
        if question not in self._layouts:
            self._layouts[question] = _layout_of_new(out, args)
        return out


def makes_one_tensor(func: Any) -> bool:
    """Whether an op of torch's own returns one tensor that shares no memory with its arguments.

    >>> makes_one_tensor(torch.ops.aten.mul.Tensor), makes_one_tensor(torch.ops.aten.mul_.Tensor)
    (True, False)
    >>> makes_one_tensor(torch.ops.aten.view.default)
    False
    """
    schema = func._schema
    return (
        func.namespace == "aten"
        and len(schema.returns) == 1
        and isinstance(schema.returns[0].type, torch.TensorType)
        and all(a.alias_info is None for a in (*schema.returns, *schema.arguments))
    )


def _question(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """What the layout of the output depends on, or None if it cannot be told."""
    asked: list[Any] = [func]
    try:
        if not _describe(args, asked):
            return None
        if kwargs:
            asked += kwargs
            if not _describe(kwargs.values(), asked):
                return None
    except RuntimeError:  # a layout without strides
        return None
    return tuple(asked) if torch.Size in map(type, asked) else None  # a tensor has told the device


def _describe(items: Any, asked: list[Any]) -> bool:
    for item in items:
        if isinstance(item, torch.Tensor):
            if not item.is_meta:
                return False
            asked += (item.shape, item.stride(), item.dtype)
        elif isinstance(item, (list, tuple)):
            if len(item) > LONGEST_LIST:
                return False
            asked.append(len(item))
            if not _describe(item, asked):
                return False
        else:
            asked += (type(item), item)  # 1, 1.0 and True are equal, but not the same question
    return True


def _layout_of_new(out: Any, args: tuple[Any, ...]) -> Layout | None:
    """The layout of ``out`` if it alone fills a storage just large enough."""
    if type(out) is not torch.Tensor or not out.is_meta or out.storage_offset():
        return None
    storage = out.untyped_storage()
    if any(
        isinstance(a, torch.Tensor) and a.untyped_storage()._cdata == storage._cdata for a in args
    ):
        return None
    again = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    if again.untyped_storage().nbytes() != storage.nbytes():
        return None
    return out.shape, out.stride(), out.dtype
