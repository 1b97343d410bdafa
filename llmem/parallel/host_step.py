"""An optimizer whose step runs on the host, as offloading engines have it."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmem.lifetimes import Phase
from llmem.parallel.editor import Editor


def step_on_host(editor: Editor) -> dict[str, Any]:
    """The optimizer is offloaded: take its step, and the clipping, out of the GPU's trace.

    Returns what ``RankTable.optimizer`` says: no states on the GPU.
    """
    trace = editor.trace
    ticks = np.array([tick for tick, _, _ in trace.phase_ticks])
    phases = np.array([int(phase) for _, phase, _ in trace.phase_ticks])
    born = phases[np.searchsorted(ticks, trace.lifetimes.birth, side="right") - 1]
    editor.drop(np.isin(born, [int(Phase.CLIP), int(Phase.OPTIMIZER)]))
    return {
        "name": trace.optimizer.get("name", ""),
        "state_elements": 0,
        "state_bytes": 0,
        "offloaded": True,
    }
