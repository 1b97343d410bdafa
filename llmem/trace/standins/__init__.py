"""Stand-ins on meta for kernels that torch does not own, and the registry of them.

A stand-in takes the place of a function while a step is traced on meta tensors. It computes
nothing; it makes what the kernel makes: tensors of the same shapes and dtypes as its outputs, what
it saves for backward, and its temporaries, each alive as long as in the kernel. Written as a
``torch.autograd.Function`` or with plain torch ops, it is a few lines:

>>> import sys, types, torch, llmem
>>> from llmem.trace.standins import register
>>> package = sys.modules["fast_package"] = types.ModuleType("fast_package")  # with a GPU kernel
>>> def square(x): raise RuntimeError("needs a GPU")
>>> package.square = square
>>> class Square(torch.autograd.Function):
...     @staticmethod
...     def forward(ctx, x):
...         scratch = torch.empty(4096, dtype=torch.uint8, device=x.device)  # freed on return
...         ctx.save_for_backward(x)
...         return torch.empty_like(x)
...     @staticmethod
...     def backward(ctx, grad):
...         return torch.empty_like(ctx.saved_tensors[0])
>>> register("fast_package:square", Square.apply)
>>> x = torch.empty(256, 256, device="meta", requires_grad=True)
>>> trace = llmem.trace(lambda: package.square(x).sum().backward(), steps=1)
>>> int((trace.lifetimes.nbytes == 4096).sum())
1
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from llmem.errors import LlmemError

_STAND_INS: dict[str, Callable[..., Any]] = {}


def register(target: str, stand_in: Callable[..., Any]) -> None:
    """Let ``stand_in`` act for ``target``, written ``package.module:name``, in traces from now on.

    ``name`` may have dots (``module:Class.forward``). A package that nobody has imported by then
    is left alone. Raises LlmemError if ``target`` is not of that form.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise LlmemError(f"a stand-in is for 'package.module:name', not for {target!r}")
    _STAND_INS[target] = stand_in


def registered() -> dict[str, Callable[..., Any]]:
    """Every target that has a stand-in."""
    return dict(_STAND_INS)


@contextmanager
def active() -> Iterator[None]:
    """The registered stand-ins act; what they replace comes back at the end."""
    with ExitStack() as stack:
        for target, stand_in in _STAND_INS.items():
            module, _, name = target.partition(":")
            if module in sys.modules:
                stack.enter_context(replaced(sys.modules[module], name, stand_in))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` (dots allowed) is ``value`` for a while.

    Raises LlmemError if there is no such attribute to replace.
    """
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if not hasattr(owner, last):
        raise LlmemError(f"there is no {name} to put a stand-in for; check the target's spelling")
    is_own = last in vars(owner)
    before = vars(owner)[last] if is_own else None
    setattr(owner, last, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, last, before)
        else:
            delattr(owner, last)
