"""What is said when a compiler fails: one sentence, and none of its logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 240
"""Characters of a compiler's own words that a sentence quotes."""


@contextmanager
def unlogged() -> Iterator[None]:
    """Nothing is logged: Dynamo and fake tensors log every failure, traceback and all, then raise it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def reason_of(error: BaseException) -> str:
    """The first line of what the error says from which ``error`` came, wrapped by one compiler or more.

    >>> reason_of(RuntimeError("\\n  No kernel for aten::x.\\nTraceback ..."))
    'No kernel for aten::x'
    >>> reason_of(AssertionError())
    'AssertionError'
    """
    while (inner := _wrapped_in(error)) is not None:
        error = inner
    lines = (line.strip().rstrip(".:") for line in str(error).splitlines())
    first = next(filter(None, lines), type(error).__name__)
    return first if len(first) <= LONGEST else f"{first[:LONGEST]} ..."


def _wrapped_in(error: BaseException) -> BaseException | None:
    from torch._dynamo.exc import TorchDynamoException

    inner: BaseException | None = getattr(error, "inner_exception", None) or error.__cause__
    if inner is None and isinstance(error, TorchDynamoException):  # raised while handling it
        inner = error.__context__
    return inner
