"""How long a rank of torch.distributed.pipelining holds what stages hand to each other.

Between ranks: the handle of a send holds its tensor, and receive buffers stay (stage.py's
``args_recv_info``, ``grad_recv_info``). Where dI runs alone, the gradient of a stage's input also is
the ``.grad`` of its buffer (``stage_backward_input``), which the next step's start clears
(``clear_runtime_states``). Between two stages of one rank (V-shaped schedules) the tensor itself takes
the place of the buffer (``set_local_fwd_input``, ``set_local_bwd_input``), until the same micro-batch of
the next step replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmem.lifetimes import NEVER
from llmem.parallel.pipeline.action import Action, Kind
from llmem.parallel.pipeline.places import Plan


class HandedOver:
    """Ticks until which one rank of ``schedule`` holds outputs, gradients and buffers."""

    def __init__(self, schedule: str, order: list[Action], stages: int, *, megatron: bool) -> None:
        self._order = order
        self._mine = {action.stage for action in order}
        self._last = stages - 1
        # GPipe and the runtime of multi-stage schedules keep all their sends until the step is done.
        self._waits_at_the_end = schedule != "1f1b"
        self._megatron = megatron
        backwards = [action for action in order if not action.forward]
        self._next = dict(zip(backwards[:-1], backwards[1:], strict=True))

    def output(self, action: Action, plan: Plan, following: Plan | None) -> int:
        """Until when the output of a forward is held.

        By ``fwd_cache`` until its backward returns, and by the send's handle. 1F1B drops a handle
        when it sends again; the last one of the warm-up it keeps until all forwards are done.
        """
        if action.stage + 1 in self._mine:
            return int(NEVER) if following is None else following.after(action)
        if self._waits_at_the_end:
            return plan.end
        if self._megatron:  # ``deallocate_output_tensor``, once it is sent
            return plan.copies[action][1].end
        ends = [plan.backward(action)[-1].end]
        ahead = next(i for i, done in enumerate(self._order) if not done.forward)
        if action.micro == ahead - 2:
            forwards = [i for i, done in enumerate(self._order) if done.forward]
            ends.append(plan.copies[self._order[forwards[-1] + 1]][0].end)
        return max(ends)

    def gradient(self, action: Action, plan: Plan, following: Plan | None) -> int:
        """Until when the gradient of a backward's input is held, which the first stage drops."""
        if action.stage == 0:
            return plan.copies[action][0].end
        if action.stage - 1 in self._mine:
            return int(NEVER) if following is None else following.after(action)
        if action.kind is Kind.INPUT:
            return int(NEVER) if following is None else following.begin
        if self._waits_at_the_end or action not in self._next:
            return plan.end
        return plan.copies[self._next[action]][0].end

    def buffers(self, micro_batches: int) -> Iterator[tuple[int, int, bool]]:
        """(stage, micro-batch, whether of an input) of every receive buffer; Megatron-LM has none."""
        for stage in sorted(self._mine) if not self._megatron else ():
            for is_input in [True] * (stage > 0) + [False] * (stage < self._last):
                for micro in range(micro_batches):
                    yield stage, micro, is_input

    def buffer(self, stage: int, micro: int, is_input: bool, first: Plan) -> int:
        """Until when a receive buffer is held: in the ``first`` step a neighbour here replaces it."""
        neighbour = stage - 1 if is_input else stage + 1
        if neighbour not in self._mine:
            return int(NEVER)
        if is_input:
            return first.after(first.forward(neighbour, micro))
        return first.after(first.first_backward(neighbour, micro))
