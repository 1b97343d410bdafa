"""What every baseline is given and what it answers, and the table of baselines by name.

A baseline is somebody else's way to say how much memory a training step needs. Each lives in a file
of its own, with its source, and is a function ``estimate(inp) -> Answer``; `run` times it. None of
them decides what is true: they are printed beside our own estimate and beside measurements.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from llmem.errors import LlmemError

if TYPE_CHECKING:
    from torch import fx, nn

MIB = 1024**2

CUDA_CONTEXT_BYTES = 426 * MIB
"""A CUDA context: 426 MiB, RTX 6000 Ada, torch 2.10 + cu130 (unslothai/unsloth-zoo#1053)."""

NCCL_BYTES = 440 * MIB
"""NCCL communicators of one process: nvidia-smi minus reserved was 866 MiB for a 4-GPU
data-parallel Megatron GPT-345M run on A800; the context above is taken off."""

MODULES = {
    "llmem-paper": "llmem_paper",
    "llmem-code": "llmem_code",
    "dnnmem": "dnnmem",
    "params-x4": "params_x4",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "eleutherai": "eleutherai",
    "eleutherai-fixed": "eleutherai",
    "megatron": "megatron",
    "xmem": "xmem",
}
NAMES = tuple(MODULES)


@dataclass(frozen=True)
class BaselineInput:
    """One training run, as the baselines see it.

    ``model`` is a Hugging Face model on the meta device and ``config`` its config; ``name`` is what
    the user called it (LLMem's code looks into it). ``batch`` is sequences per GPU, ``seq`` tokens
    per sequence, ``gpus`` all GPUs, of which ``tp`` (``pp``) share one replica by tensors (by
    layers). ``zero`` is ``none|ddp|zero1|zero2|zero3|fsdp|fsdp2|gemini`` or None where nothing was
    said. ``dtype_bytes`` is the width of the parameters as loaded; ``mixed`` says that compute is
    16-bit beside 32-bit masters. ``sp`` is Megatron's sequence parallelism; ``offload`` is
    ``none|optimizer|all``. ``base_bytes`` is the memory a process holds before the model's own
    tensors (CUDA context, NCCL), measured; None means that it is modelled. ``graph`` is the forward
    pass as an aten fx graph, for the baselines that walk one; None means that it is traced when
    needed.
    """

    model: nn.Module
    config: Any
    name: str
    batch: int
    seq: int
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    zero: str | None = None
    dtype_bytes: int = 4
    optim: str = "adamw_torch"
    gradient_checkpointing: bool = False
    mixed: bool = False
    sp: bool = False
    offload: str = "none"
    base_bytes: int | None = None
    graph: fx.GraphModule | None = None

    @property
    def dp(self) -> int:
        """Replicas of the model: GPUs that are left after tensor and pipeline parallelism."""
        return max(1, self.gpus // (max(1, self.tp) * max(1, self.pp)))

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage whose sharding ``zero`` amounts to; FSDP and Gemini shard as ZeRO-3
        does."""
        stages = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp2": 3, "gemini": 3}
        return stages.get(self.zero or "none", 0)

    @property
    def m_base(self) -> int:
        """Bytes that are there before the model's own tensors: given, else context plus NCCL."""
        if self.base_bytes is not None:
            return self.base_bytes
        return CUDA_CONTEXT_BYTES + (NCCL_BYTES if self.gpus > 1 else 0)


@dataclass(frozen=True)
class Answer:
    """What a baseline's own function returns: bytes per GPU, or the reason why it cannot say."""

    bytes: int | None
    parts: dict[str, int] = field(default_factory=dict)
    leaves_out: list[str] = field(default_factory=list)
    why_not: str | None = None


@dataclass(frozen=True)
class BaselineResult:
    """A baseline's answer with the seconds that it took.

    ``bytes`` is None exactly when ``why_not`` says why. ``parts`` are bytes, except keys that end
    in ``_elements``. ``leaves_out`` names what the baseline does not count or gets wrong by design.
    """

    bytes: int | None
    seconds: float
    parts: dict[str, int]
    leaves_out: list[str]
    why_not: str | None


class _Baseline(Protocol):
    def __call__(self, inp: BaselineInput) -> Answer: ...


def cannot(why: str) -> Answer:
    """The answer of a baseline that has nothing to say about this run."""
    return Answer(bytes=None, why_not=why)


def run(name: str, inp: BaselineInput) -> BaselineResult:
    """Ask the baseline ``name`` (one of `NAMES`) about ``inp``.

    Raises `LlmemError` for a name that is not in `NAMES`.
    """
    if name not in MODULES:
        raise LlmemError(f"There is no baseline '{name}'; choose one of {', '.join(NAMES)}.")
    module = import_module(f"llmem.baselines.{MODULES[name]}")
    attribute = "estimate_fixed" if name.endswith("-fixed") else "estimate"
    estimate = cast(_Baseline, getattr(module, attribute))
    start = time.perf_counter()
    answer = estimate(inp)
    seconds = time.perf_counter() - start
    return BaselineResult(
        answer.bytes, seconds, answer.parts, answer.leaves_out, answer.why_not
    )
