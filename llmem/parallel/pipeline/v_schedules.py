"""Schedules of torch.distributed.pipelining 2.13 whose stages lie on the ranks in a V.

Rank ``r`` of ``P`` has the stages ``r`` and ``2P - 1 - r``, so that the first and the last one are
on rank 0 and the two in the middle on rank ``P - 1``. Read in ``ScheduleZBVZeroBubble`` and
``ScheduleDualPipeV`` of torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from collections import Counter

from llmem.errors import LlmemError
from llmem.parallel.pipeline.action import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


class _Order:
    """Actions in a row, each on its stage's next micro-batch."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self.count: Counter[tuple[Kind, int]] = Counter()
        self.owed: list[int] = []
        """The local stages whose W is still to come, in the order of their I."""

    def add(self, *steps: tuple[Kind, int]) -> None:
        """(kind, 0 or 1 for the local stage) of each action."""
        for kind, local in steps:
            micro = self.count[kind, local]
            self.actions.append(Action(kind, self.stages[local], micro))
            self.count[kind, local] += 1
            if kind is B:
                self.count[I, local] += 1
                self.count[W, local] += 1
            elif kind is I:
                self.count[B, local] += 1
                self.owed.append(local)

    def pay(self) -> None:
        """The W that has waited longest, if any."""
        if self.owed:
            self.add((W, self.owed.pop(0)))


def zbv(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """Zero bubble in a V: forward, dI and dW take turns on both stages of a rank.

    >>> zbv(1, 0, 2)
    [0F0, 1F0, 1I0, 1W0, 0F1, 0I0, 0W0, 1F1, 1I1, 1W1, 0I1, 0W1]
    """
    number = max(2 * ranks - 1, micro_batches)  # fewer do not fill it; those too many are left out
    order = _Order(ranks, rank)
    count = order.count
    order.add(*[(F, 0)] * (2 * (ranks - rank) - 1))
    order.add(*[(F, 1), (F, 0)] * rank)
    order.add(*[(F, 1), (I, 1), (W, 1)] * (ranks - rank))
    while count[F, 1] < count[F, 0] or count[F, 0] < number:
        if count[F, 0] < number:
            order.add((F, 0))
        order.add((I, 0), (W, 0), (F, 1), (I, 1), (W, 1))
    order.add(*[(I, 0), (I, 1)] * rank)
    order.add(*[(I, 0), (W, 0)] * (ranks - rank))
    order.add(*[(W, 1)] * (count[I, 1] - count[W, 1]))
    order.add(*[(W, 0)] * (count[I, 0] - count[W, 0]))
    return [action for action in order.actions if action.micro < micro_batches]


def dualpipev(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """DeepSeek's DualPipe in a V; of an overlapped pair torch runs the forward first.

    Raises LlmemError where torch refuses the number of micro-batches.
    """
    if micro_batches < 2 * ranks:
        raise LlmemError(
            f"--pp-schedule dualpipev needs at least {2 * ranks} micro-batches for {2 * ranks} "
            "stages; raise --micro-batches or use zbv"
        )
    order, last = _Order(ranks, rank), ranks - rank - 1
    order.add(*[(F, 0)] * (2 * last))
    order.add(*[(F, 0), (F, 1)] * (rank + 1))
    for _ in range(last):
        order.add((I, 1))
        order.pay()
        order.add((F, 1))
    order.add(*[(F, 0), (B, 1), (F, 1), (B, 0)] * (micro_batches - 2 * ranks + rank + 1))
    order.add(*[(B, 1), (F, 1), (B, 0)] * last)
    half = (rank + 1) // 2
    for turn in range(rank + 1):  # the second half of these parts its backwards
        order.add((I if turn > half or (turn == half and rank % 2) else B, 1))
        order.add((I if turn >= half else B, 0))
    for _ in range(last):
        order.pay()
        order.add((I, 0))
    for _ in range(rank + 1):
        order.pay()
    return order.actions
