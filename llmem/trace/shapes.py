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

Layouts = list[Layout | None]
"""Of each output; None where there is none."""

LONGEST_LIST = 8
"""Lists of more tensors (foreach ops) are not looked up: the question is as long as the answer."""


class KnownShapes:
    """Outputs of ops on meta tensors, made without asking torch again.

    Only of ops that return new tensors: no views, nothing in place, no scalars.
    """

    def __init__(self) -> None:
        self._asked: dict[Any, bool] = {}
        self._layouts: dict[Any, Layouts | None] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """``func(*args, **kwargs)``, or tensors just like its own."""
        makes_new = self._asked.get(func)
        if makes_new is None:
            makes_new = self._asked[func] = makes_new_tensors(func)
        question = _question(func, args, kwargs) if makes_new else None
        if question is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        layouts = self._layouts.get(question)
        if layouts is not None:
            made = [_empty(layout) for layout in layouts]
            return tuple(made) if len(made) > 1 else made[0]
        out = func(*args, **kwargs) if kwargs else func(*args)
        if question not in self._layouts:
            self._layouts[question] = _layouts_of_new(out, args)
        return out


def makes_new_tensors(func: Any) -> bool:
    """Whether an op of torch's own returns tensors that share no memory with its arguments.

    >>> makes_new_tensors(torch.ops.aten.mul.Tensor), makes_new_tensors(torch.ops.aten.mul_.Tensor)
    (True, False)
    >>> makes_new_tensors(torch.ops.aten.view.default)
    False
    """
    schema = func._schema
    return (
        func.namespace == "aten"
        and len(schema.returns) > 0
        and all(isinstance(r.type, torch.TensorType) for r in schema.returns)
        and all(a.alias_info is None for a in (*schema.returns, *schema.arguments))
    )


def _empty(layout: Layout | None) -> torch.Tensor | None:
    if layout is None:
        return None
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


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


def _layouts_of_new(out: Any, args: tuple[Any, ...]) -> Layouts | None:
    """Layouts of what an op has made, if each alone fills a storage just large enough."""
    outputs = out if isinstance(out, tuple) else (out,)
    given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    layouts: list[Layout | None] = []
    for tensor in outputs:
        if tensor is None:  # a gradient that nobody asked for
            layouts.append(None)
            continue
        if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.storage_offset():
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in given:
            return None
        given.add(storage._cdata)
        layout = (tensor.shape, tensor.stride(), tensor.dtype)
        again = _empty(layout)
        if again is None or again.untyped_storage().nbytes() != storage.nbytes():
            return None
        layouts.append(layout)
    return layouts
