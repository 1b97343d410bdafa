"""Run one training step on meta and record it; calling the module calls ``run.trace``."""

from __future__ import annotations

from typing import Any

from llmem._callable import make_callable


def trace(model_or_step: Any, **options: Any) -> Any:
    """See ``llmem.trace.run.trace``."""
    from llmem.trace.run import trace as run

    return run(model_or_step, **options)


make_callable(__name__)
