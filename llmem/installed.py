"""Which version of a library is installed here."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from llmem.errors import LlmemError


@lru_cache
def installed(package: str) -> str:
    """The version of ``package`` as its metadata has it, such as "4.57.6"; nothing is imported.

    Raises LlmemError if it is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise LlmemError(
            f"{package} is not installed; install llmem with its dependencies"
        ) from error
