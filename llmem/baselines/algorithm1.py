"""LLMem's Algorithm 1: which of four distributed methods to fine-tune with.

Source: Kim et al., IJCAI 2024, "Distributed Fine-Tuning Method Decision" (it is not in the released
code). For each method it finds the largest batch that fits, and scores it by the samples that one
step processes. Plain data parallelism has a bonus of 1.5, because ZeRO-3 moves 1.5 times its data.
There is no other model of speed. If nothing fits, the answer is to offload to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llmem import largest

METHODS = ("CDP", "ADP", "TP", "DP+TP")
"""The paper's methods in its order, which decides ties: plain DP, ZeRO-3, tensors, both."""

CPU_OFFLOAD = "CPU offload"
CDP_BONUS = 1.5
MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class MethodScore:
    """A method's largest batch per replica, in sequences (0: not even one fits), and its score."""

    method: str
    batch: int
    score: float


@dataclass(frozen=True)
class Decision:
    """The four scores in the paper's order, and the pick: a method or `CPU_OFFLOAD`."""

    scores: tuple[MethodScore, ...]
    pick: str


def algorithm1(
    peak: Callable[[str, int], int], capacity: int, gpus: int, *, tp: int = 2
) -> Decision:
    """Decide by ``peak(method, batch)``, bytes per GPU, against ``capacity`` bytes per GPU.

    ``tp`` is the tensor-parallel degree of ``DP+TP``, which exists only where ``gpus`` is a
    multiple of it with at least two replicas; on one GPU only ``CDP`` exists. Where ``peak``
    is not monotone, the batch is one below which all fit (see `llmem.largest`).
    """
    scores = []
    for method in METHODS:
        exists = gpus > 1 if method in ("ADP", "TP") else method == "CDP" or _hybrid(gpus, tp)
        batch = largest_batch(partial(_fits, peak, method, capacity)) if exists else 0
        weight = {"CDP": CDP_BONUS * gpus, "ADP": gpus, "TP": 1, "DP+TP": gpus // tp}[method]
        scores.append(MethodScore(method, batch, batch * weight))
    best = max(scores, key=lambda s: s.score)
    return Decision(tuple(scores), best.method if best.score else CPU_OFFLOAD)


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch for which ``fits`` holds, 0 if none.

    The paper counts up from 1 until one does not fit; `llmem.largest` comes to the same in
    logarithmically many questions.
    """
    return largest.largest_batch(fits, limit=MAX_BATCH).batch


def _fits(peak: Callable[[str, int], int], method: str, capacity: int, batch: int) -> bool:
    return peak(method, batch) <= capacity


def _hybrid(gpus: int, tp: int) -> bool:
    return tp > 1 and gpus % tp == 0 and gpus // tp > 1
