"""Composite ops that fall apart on meta as they do on every other device.

While torch.compile traces, the Python dispatcher decides which kernel an op has. Some composite ops
also have a kernel for meta written in Python; for these it finds no autograd kernel on meta, and
gradients would end there (``aten::nll_loss``, so that of every loss).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import Library

_KEYS = torch._C.DispatchKey


@contextmanager
def composites_fall_apart() -> Iterator[None]:
    """Composite ops with a kernel of their own for meta are taken apart there, too."""
    library = Library("aten", "IMPL")  # destroyed below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for op in _hidden_composites():
                name = op.name().removeprefix("aten::")
                library.m.impl(name, "AutogradMeta", op.decompose)  # type: ignore[union-attr]
        yield
    finally:
        library._destroy()


def forget_kernels() -> None:
    """The Python dispatcher asks again which kernel each op has: some are ours, for a while.

    It remembers per op, and registrations in C++ do not tell it (torch/_ops.py, ``_dispatch_cache``).
    """
    for namespace in (torch.ops.aten, torch.ops._c10d_functional):
        for packet in list(vars(namespace).values()):
            if not isinstance(packet, torch._ops.OpOverloadPacket):
                continue
            for op in list(vars(packet).values()):
                if isinstance(op, torch._ops.OpOverload):
                    op._dispatch_cache.clear()


@cache
def _hidden_composites() -> list[Any]:
    """Composite ops that return new tensors and have a kernel for meta, but none for its autograd."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        packet = getattr(torch.ops.aten, name.removeprefix("aten::").split(".")[0], None)
        op = getattr(packet, name.partition(".")[2] or "default", None)
        if op is not None and _is_hidden(op):
            found.append(op)
    return found


def _is_hidden(op: Any) -> bool:
    returns = op._schema.returns
    return (
        op.has_kernel_for_dispatch_key(_KEYS.CompositeImplicitAutograd)
        and op.has_kernel_for_dispatch_key(_KEYS.Meta)
        and not op.has_kernel_for_dispatch_key(_KEYS.AutogradMeta)
        and bool(returns)
        and all(isinstance(r.type, torch.TensorType) and r.alias_info is None for r in returns)
    )
