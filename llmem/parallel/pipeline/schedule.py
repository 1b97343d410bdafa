"""In which order a pipeline rank runs forwards and backwards of micro-batches.

Read in torch/distributed/pipelining/schedules.py (``ScheduleGPipe``, ``Schedule1F1B``,
``ScheduleInterleaved1F1B``) of torch 2.13. Stage ``s`` is on rank ``s % ranks``.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmem.errors import LlmemError


@dataclass(frozen=True)
class Action:
    """The forward or backward of one micro-batch through one stage."""

    forward: bool
    stage: int
    micro: int


def actions(
    schedule: str, ranks: int, rank: int, micro_batches: int, per_rank: int = 1
) -> list[Action]:
    """What ``rank`` does in one optimizer step; ``per_rank`` is the number of its stages.

    Raises LlmemError where torch refuses the number of micro-batches.

    >>> "".join("FB"[not a.forward] + str(a.micro) for a in actions("1f1b", 2, 0, 3))
    'F0F1B0F2B1B2'
    """
    if schedule == "gpipe":
        every = range(micro_batches)
        return [Action(forward, rank, m) for forward in (True, False) for m in every]
    if schedule == "1f1b":
        return _one_forward_one_backward(ranks, rank, micro_batches)
    return _interleaved(ranks, rank, micro_batches, per_rank)


def in_flight(done: list[Action]) -> int:
    """The most micro-batches (times stages) whose forward is done and whose backward is not."""
    most = now = 0
    for action in done:
        now += 1 if action.forward else -1
        most = max(most, now)
    return most


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """Forwards until the pipeline is full, then a backward before each further forward."""
    if micro_batches < ranks:
        raise LlmemError(
            f"--pp-schedule 1f1b needs at least {ranks} micro-batches for {ranks} stages; raise "
            "--micro-batches or use gpipe"
        )
    ahead = ranks - rank
    order = [Action(True, rank, m) for m in range(ahead)]
    for micro in range(micro_batches):
        order.append(Action(False, rank, micro))
        if ahead + micro < micro_batches:
            order.append(Action(True, rank, ahead + micro))
    return order


def _interleaved(ranks: int, rank: int, micro_batches: int, per_rank: int) -> list[Action]:
    """Rounds of micro-batches go through a rank's stages one after the other."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise LlmemError(
            f"--pp-schedule interleaved cuts {micro_batches} micro-batches into {rounds} rounds, "
            f"which does not divide; use a multiple of {ranks}"
        )
    width, total = micro_batches // rounds, micro_batches * per_rank
    warm_up = min((per_rank - 1) * width + 2 * (ranks - 1 - rank), total)
    done: dict[tuple[bool, int], int] = {}

    def next_one(forward: bool, number: int) -> Action:
        local = number // width % per_rank
        stage = (local if forward else per_rank - 1 - local) * ranks + rank
        micro = done.get((forward, stage), 0)
        done[forward, stage] = micro + 1
        return Action(forward, stage, micro)

    order = [next_one(True, number) for number in range(warm_up)]
    for number in range(total):
        if warm_up + number < total:
            order.append(next_one(True, warm_up + number))
        order.append(next_one(False, number))
    return order
