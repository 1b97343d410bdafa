"""Modules that can be called.

``llmem.trace`` and ``llmem.estimate`` are rooms of the package and, as users call them, functions.
Importing a submodule binds its name in the package, so the module itself takes the call.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module whose call is that of the function of its own name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def make_callable(name: str) -> None:
    """Let the module called ``name`` stand for the function of the same name inside it."""
    sys.modules[name].__class__ = CallableModule
