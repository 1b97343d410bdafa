"""FSDP1's rate limiter: how far ahead of the GPU the CPU may launch all-gathers.

``_FreeEventQueue`` (torch/distributed/fsdp/_limiter_utils.py), with ``limit_all_gathers=True``, which is
the default: each gathered parameter that is let go of leaves an event on the compute stream; an
all-gather first waits for the oldest event once two are there.
"""

from __future__ import annotations

from collections import deque

from llmem.lifetimes import HostWait
from llmem.parallel.editor import Editor

IN_FLIGHT = 2
"""``_max_num_inflight_all_gathers``."""


class FreeEventQueue:
    """The events of one rank, oldest first."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._events: deque[tuple[int, int]] = deque()

    def enqueue(self, tick: int, launched: int) -> None:
        """At ``tick`` a parameter is let go of, which was gathered by ``launched``."""
        self._events.append((self._editor.at(tick), launched))

    def wait(self, tick: int) -> None:
        """``dequeue_if_needed`` before an all-gather.

        All computing up to that event is done, hence the all-gather of the parameter it used, and the
        collectives of one group, which run in order, before that.
        """
        if len(self._events) >= IN_FLIGHT:
            freed, launched = self._events.popleft()
            self._editor.host_wait(HostWait(self._editor.at(tick), freed, launched))
