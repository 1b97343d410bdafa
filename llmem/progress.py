"""A spinner while something takes seconds, on standard error and only for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str, quiet: bool = False) -> Iterator[None]:
    """Show ``what`` while the block runs, if standard error is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
