"""What one rank's run on a GPU comes to: torch's allocator counters and NVML, step by step."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmem.errors import LlmemError

HISTORY_EVENTS = 2_000_000
"""Allocator events that a history keeps at most (torch drops the oldest)."""


class Counters(Protocol):
    """The readings a recorder takes, in bytes: injected, so that no GPU is needed to test it."""

    name: str
    capacity: int

    def wait(self) -> None: ...
    def empty_cache(self) -> None: ...
    def reset_peaks(self) -> None: ...
    def allocated(self) -> int: ...
    def max_allocated(self) -> int: ...
    def max_reserved(self) -> int: ...
    def device_used(self) -> int | None: ...
    def start_history(self) -> None: ...
    def history(self) -> Any: ...


class CudaRecorder:
    """Reads the peak counters after each step and resets them.

    ``history`` is the stem of a file that gets the allocator's history (torch's snapshot pickle,
    which `llmem replay` and pytorch.org/memory_viz read).
    """

    def __init__(self, counters: Counters, history: Path | None = None) -> None:
        self._counters = counters
        self._history = history
        self._steps: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._start: dict[str, Any] = {}

    def start(self) -> None:
        self._start["device_used_at_start"] = self._counters.device_used()
        if self._history is not None:
            self._counters.start_history()

    def before_steps(self, wrapped: Any) -> None:
        """Give back what building the model left in the cache, and forget its peak."""
        self._notes = wrapped.notes
        counters = self._counters
        counters.wait()
        self._start["setup"] = self._peaks()
        counters.empty_cache()
        counters.reset_peaks()
        self._start["before_steps"] = counters.allocated()

    def after_step(self) -> None:
        counters = self._counters
        counters.wait()
        self._steps.append(
            {
                "step": len(self._steps),
                **self._peaks(),
                "end": counters.allocated(),
                "device_used": counters.device_used(),
            }
        )
        counters.reset_peaks()

    def finish(self) -> dict[str, Any]:
        """The rank's part of a record."""
        if self._history is not None:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            rank = os.environ.get("RANK", "0")
            path = self._history.with_name(f"{self._history.name}.rank{rank}.pickle")
            path.write_bytes(pickle.dumps(self._counters.history()))
        return {
            "gpu": self._counters.name,
            "capacity": self._counters.capacity,
            **self._start,
            "steps": self._steps,
            "notes": self._notes,
        }

    def _peaks(self) -> dict[str, int]:
        return {
            "allocated": self._counters.max_allocated(),
            "reserved": self._counters.max_reserved(),
        }


@dataclass
class TorchCounters:
    """The counters of the current CUDA device; ``used`` asks NVML, if there is one."""

    cuda: Any
    used: Callable[[], int | None]

    def __post_init__(self) -> None:
        properties = self.cuda.get_device_properties(self.cuda.current_device())
        self.name: str = properties.name
        self.capacity: int = properties.total_memory

    def wait(self) -> None:
        self.cuda.synchronize()

    def empty_cache(self) -> None:
        self.cuda.empty_cache()

    def reset_peaks(self) -> None:
        self.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        return self.cuda.memory_allocated()

    def max_allocated(self) -> int:
        return self.cuda.max_memory_allocated()

    def max_reserved(self) -> int:
        return self.cuda.max_memory_reserved()

    def device_used(self) -> int | None:
        return self.used()

    def start_history(self) -> None:
        self.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)

    def history(self) -> Any:
        return self.cuda.memory._snapshot()


def cuda_counters() -> TorchCounters:
    """Counters of this process's GPU. Raises LlmemError without one."""
    import torch

    if not torch.cuda.is_available():
        raise LlmemError(f"torch {torch.__version__} sees no CUDA device here; use --device cpu")
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return TorchCounters(torch.cuda, nvml_reader(f"GPU-{uuid}"))


def nvml_reader(uuid: str) -> Callable[[], int | None]:
    """A function that says how many bytes of the GPU are used, as nvidia-smi would.

    It says None where NVML is not installed (``pip install nvidia-ml-py``).
    """
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return lambda: None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
