"""In which order a pipeline rank runs forwards and backwards of micro-batches.

Read in torch/distributed/pipelining/schedules.py (``ScheduleGPipe``, ``Schedule1F1B``,
``ScheduleInterleaved1F1B``, ``ScheduleInterleavedZeroBubble``) of torch 2.13; ``v_schedules`` has
the V-shaped ones.
"""

from __future__ import annotations

from llmem.errors import LlmemError
from llmem.parallel.pipeline.action import Action, Kind
from llmem.parallel.pipeline.v_schedules import dualpipev, zbv

LOOPED = ("interleaved", "interleaved-zero-bubble")
"""Schedules whose ranks have ``--virtual-stages`` stages each: stage ``s`` is on rank ``s % ranks``."""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose rank ``r`` of ``P`` has the stages ``r`` and ``2P - 1 - r``."""
SPLIT = ("interleaved-zero-bubble", *V_SHAPED)
"""Schedules that part backward into the gradient of the input and those of the parameters."""


def stages_per_rank(schedule: str, virtual_stages: int) -> int:
    """Stages of each rank; ``virtual_stages`` is what the looped schedules are given."""
    return virtual_stages if schedule in LOOPED else 2 if schedule in V_SHAPED else 1


def stages_on(schedule: str, ranks: int, rank: int, per_rank: int) -> list[int]:
    """The stages of ``rank``, in order.

    >>> stages_on("zbv", 4, 1, 2), stages_on("interleaved", 4, 1, 2)
    ([1, 6], [1, 5])
    """
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * per_rank, ranks))


def actions(
    schedule: str, ranks: int, rank: int, micro_batches: int, per_rank: int = 1
) -> list[Action]:
    """What ``rank`` does in one optimizer step; ``per_rank`` is the number of its stages.

    Raises LlmemError where torch refuses the number of micro-batches.

    >>> actions("1f1b", 2, 0, 3)
    [0F0, 0F1, 0B0, 0F2, 0B1, 0B2]
    """
    if schedule == "gpipe":
        every = range(micro_batches)
        return [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in every]
    if schedule == "1f1b":
        return _one_forward_one_backward(ranks, rank, micro_batches)
    if schedule == "zbv":
        return zbv(ranks, rank, micro_batches)
    if schedule == "dualpipev":
        return dualpipev(ranks, rank, micro_batches)
    return _interleaved(schedule, ranks, rank, micro_batches, per_rank)


def in_flight(done: list[Action]) -> int:
    """The most micro-batches (times stages) whose forward is done and whose backward is not."""
    most = now = 0
    for action in done:
        now += {Kind.FORWARD: 1, Kind.INPUT: 0}.get(action.kind, -1)
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
    order = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
    for micro in range(micro_batches):
        order.append(Action(Kind.BACKWARD, rank, micro))
        if ahead + micro < micro_batches:
            order.append(Action(Kind.FORWARD, rank, ahead + micro))
    return order


def _interleaved(
    schedule: str, ranks: int, rank: int, micro_batches: int, per_rank: int
) -> list[Action]:
    """Rounds of micro-batches go through a rank's stages one after the other.

    Zero bubble warms up half as long, and gives the parameters of a backward their gradients after
    the ``rank``-th backward that follows it.
    """
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise LlmemError(
            f"--pp-schedule {schedule} cuts {micro_batches} micro-batches into {rounds} rounds, "
            f"which does not divide; use a multiple of {ranks}"
        )
    split = schedule in SPLIT
    width, total = micro_batches // rounds, micro_batches * per_rank
    hop = 1 if split else 2
    warm_up = min((per_rank - 1) * width + hop * (ranks - 1 - rank), total)
    done: dict[tuple[Kind, int], int] = {}

    def next_one(kind: Kind, number: int) -> Action:
        local = number // width % per_rank
        stage = (local if kind is Kind.FORWARD else per_rank - 1 - local) * ranks + rank
        micro = done.get((kind, stage), 0)
        done[kind, stage] = micro + 1
        return Action(kind, stage, micro)

    order = [next_one(Kind.FORWARD, number) for number in range(warm_up)]
    for number in range(total):
        if warm_up + number < total:
            order.append(next_one(Kind.FORWARD, warm_up + number))
        order.append(next_one(Kind.INPUT if split else Kind.BACKWARD, number))
        if split and number >= rank:
            order.append(next_one(Kind.WEIGHT, number - rank))
    if split:
        order += [next_one(Kind.WEIGHT, number) for number in range(max(total - rank, 0), total)]
    return order
