"""Inductor's program, run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Who watches programs run."""

    def run_program(self, call: Callable[[list[Any]], Any], args: list[Any]) -> Any: ...
    def enter_program(self, module: str) -> None: ...


_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """While this lasts, ``watcher`` runs the programs, which tell it in which module they are."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()


def _tell(module: str) -> None:
    if _watchers:
        _watchers[-1].enter_program(module)


_library = torch.library.Library("llmem", "DEF")
_library.define("fused(Tensor[] tensors, str name) -> ()")
_library.impl("fused", lambda tensors, name: None, "CompositeExplicitAutograd")

fused = torch.ops.llmem.fused.default
"""A kernel that Inductor fused; it makes nothing, its outputs are among ``tensors``."""


def load(source: str, constants: dict[str, torch.Tensor]) -> Callable[[list[Any]], Any]:
    """The function ``call(args)`` of a program: it takes its arguments out of the list ``args``.

    ``source`` is what Inductor wrote from code that the user runs anyway; ``constants`` are the
    tensors that it names.
    """
    names: dict[str, Any] = {"__name__": "llmem.inductor_program"}
    exec(compile(source, "<inductor>", "exec"), names)
    names |= {name: value.to("meta") for name, value in constants.items()}
    names |= {
        "empty_strided_cuda": _empty,
        "empty_strided_cpu": _empty,
        "reinterpret_tensor": _reinterpret,
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "nullcontext": nullcontext,
        "place": _tell,
        "fused": fused,
    }
    call: Callable[[list[Any]], Any] = names["call"]

    def run(args: list[Any]) -> Any:
        return _watchers[-1].run_program(call, args) if _watchers else call(args)

    return run


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _nothing(*_: Any) -> None:
    return None
