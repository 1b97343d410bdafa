"""What a published run is, and what its readers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmem.errors import LlmemError
from llmem.spec import RunSpec

Line = dict[str, str]

METRICS = {
    "allocated": "torch.cuda.max_memory_allocated",
    "active": "the peak of torch's active_bytes: allocated, or waiting for another stream",
    "reserved": "torch.cuda.max_memory_reserved",
    "growth": "NVML's used memory less what it was when the CUDA context had been made",
}


class CannotExpress(Exception):
    """Why a row is no RunSpec, in one clause."""


@dataclass(frozen=True)
class Claim:
    """What another tool said about the row, bytes (None: it did not), and its seconds.

    ``capped_oom``: whether a second run, capped at ``cap`` bytes, ran out of memory.
    """

    nbytes: int | None
    seconds: float
    capped_oom: bool | None = None
    cap: int | None = None


@dataclass(frozen=True)
class Run:
    """One row: ``measured`` bytes of ``metric``; ``spec`` is None where ``why_not`` says why."""

    source: str
    name: str
    metric: str
    measured: int
    spec: RunSpec | None
    why_not: str | None = None
    grade: str = ""
    claims: dict[str, Claim] = field(default_factory=dict)
    total: int | None = None
    """Bytes of the card, where the file says so."""

    @property
    def method(self) -> str:
        """What is trained and with whose kernels, as ``lora nf4 foak``; '' for rows without a spec."""
        if self.spec is None:
            return ""
        spec = self.spec
        kernels = "" if spec.kernels == "model" else spec.kernels
        bits = "" if spec.quantization == "none" else spec.quantization
        return " ".join(part for part in (spec.method, bits, kernels) if part)


def run_of(make: Callable[[], RunSpec], **facts: Any) -> Run:
    """The row with its RunSpec, or with the reason why ``make`` has none."""
    try:
        return Run(spec=make(), **facts)
    except (CannotExpress, LlmemError) as error:
        return Run(spec=None, why_not=str(error), **facts)


_ALSO = {
    "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b",
    "Llama-3-8B": "llama-3.1-8b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b": "llama-2-70b",
    "Mistral-7B-v0.2": "mistral-7b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3.2-3b",
}
"""Names with the shapes of a preset that is called otherwise (Llama-3.1 has those of Llama-3, v0.1 of
Mistral those of v0.2 and a sliding window of 4,096 tokens)."""


def model_of(name: str) -> str:
    """The preset called ``name``, or of the same shapes."""
    from llmem.models.presets import get_preset

    preset = get_preset(_ALSO.get(name, name))
    if preset is None:
        raise CannotExpress(f"there is no preset of {name}")
    return preset.name


def whole(text: str) -> int:
    """A number of a CSV cell, rounded."""
    return round(float(text))


def minor(version: str) -> str:
    """``4.48`` of ``4.48.1``, ``2.9`` of ``2.9.0+cu128``."""
    return ".".join(version.split("+")[0].split(".")[:2])
