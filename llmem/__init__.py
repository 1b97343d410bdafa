"""llmem: how much memory every GPU of an LLM fine-tuning run will use, when, and why.

>>> import llmem
>>> result = llmem.estimate(model="opt-125m", per_device_train_batch_size=1, seq_length=64)
>>> sorted(result.worst.peak.to_json())
['allocated', 'device', 'requested', 'reserved']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmem.errors import LlmemError

if TYPE_CHECKING:
    from llmem.compare import compare
    from llmem.estimate import Estimate, estimate
    from llmem.lifetimes import Trace
    from llmem.plan import plan
    from llmem.spec import RunSpec
    from llmem.trace.run import trace

__version__ = "0.1.0"

__all__ = [
    "Estimate",
    "LlmemError",
    "RunSpec",
    "Trace",
    "compare",
    "estimate",
    "plan",
    "trace",
]

_HOMES = {
    "Estimate": "llmem.estimate",
    "estimate": "llmem.estimate",
    "RunSpec": "llmem.spec",
    "Trace": "llmem.lifetimes",
    "plan": "llmem.plan",
    "compare": "llmem.compare",
    "trace": "llmem.trace",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds, ``llmem --help`` must not."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'llmem' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
