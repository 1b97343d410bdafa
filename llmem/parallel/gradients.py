"""Which storage was which parameter's gradient in which step."""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import Category, Trace


def gradient_rows(trace: Trace) -> dict[tuple[int, int], int]:
    """(step, parameter key) -> row of the gradient that backward of that step made."""
    table = trace.lifetimes
    rows = np.flatnonzero(table.category == Category.GRADIENT)
    steps = np.searchsorted(trace.step_ticks, table.birth[rows], side="right") - 1
    keys = table.key[rows]
    return {(int(s), int(k)): int(r) for s, k, r in zip(steps, keys, rows, strict=True)}
