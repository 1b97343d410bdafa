"""Which parameters ZeRO-3 gathers, waits for, prefetches and releases at each module hook.

The bookkeeping of DeepSpeed 0.19, runtime/zero/partitioned_param_coordinator.py
(``PartitionedParameterCoordinator``): the first micro-batch is recorded as an order of modules;
from then on parameters are prefetched along it and kept if they are used again soon. Sizes count
elements. What happens to memory is told to a ``Sink``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol


@dataclass(eq=False)
class Gathered:
    """A parameter as the coordinator sees it; ``ds_id`` is its place in ``model.parameters()``."""

    ds_id: int
    key: int
    numel: int
    persistent: bool
    trainable: bool
    available: bool = False
    group: Group | None = None
    """The all-gather it is in flight with."""
    active: set[str] = field(default_factory=set)
    """Modules that are using it."""


@dataclass(eq=False)
class Group:
    """Parameters gathered by one call; ``waiting`` are those nobody has asked for yet."""

    members: list[Gathered]
    waiting: set[int]
    unpacked: bool = False


class Sink(Protocol):
    """Where gathers and frees go."""

    def gather(self, group: Group) -> None: ...
    def unpack(self, group: Group) -> None: ...
    def drop(self, group: Group) -> None: ...
    def free(self, parameter: Gathered) -> None: ...


@dataclass(frozen=True)
class Limits:
    """stage3_prefetch_bucket_size, stage3_max_live_parameters, stage3_max_reuse_distance."""

    prefetch: int
    max_live: int
    max_reuse: int


class Coordinator:
    """One rank's coordinator; call its hooks in the order in which the modules run."""

    def __init__(
        self, owned: Mapping[str, list[Gathered]], limits: Limits, sink: Sink
    ) -> None:
        """``owned``: the parameters that each module has itself."""
        self.owned = owned
        self.limits = limits
        self.sink = sink
        self.everything = sorted(
            {p.ds_id: p for ps in owned.values() for p in ps}.values(), key=lambda p: p.ds_id
        )
        self._recording = False
        self._complete = False
        self._order: list[str] = []
        self._param_order: list[tuple[Gathered, int]] = []
        self._before: list[int] = [0]
        self._uses: dict[int, list[int]] = {}
        self._queue: deque[tuple[Gathered, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._step_id = 0
        self._live = 0
        self._in_backward: dict[str, None] = {}
        self._recomputed: dict[str, dict[int, Gathered]] = defaultdict(dict)

    # -- hooks -----------------------------------------------------------------------------------

    def start_forward(self) -> None:
        """``reset_step``: the root module's first forward hook."""
        for parameter in self.everything:
            if parameter.group is not None:
                self._wait(parameter)
                self._release(parameter)
        if not self._complete:
            if self._recording:
                self._freeze()
            else:
                self._recording = True
        self._queue = deque(self._param_order)
        self._fetched_for = {}
        self._step_id = self._live = 0

    def fetch(self, module: str, *, forward: bool, recompute: bool = False) -> None:
        """Before a module's forward or backward: gather what it needs, then prefetch."""
        if self._recording and not self._complete:
            self._order.append(module)
        needed = self.owned.get(module, [])
        if not forward:
            self._in_backward.setdefault(module)
        self._gather(needed)
        for parameter in needed:
            parameter.active.add(module)
            if recompute and self._in_backward and not parameter.trainable:
                owner = next(reversed(self._in_backward))
                self._recomputed[owner][parameter.ds_id] = parameter
                parameter.active.add(owner)
            if parameter.group is not None:
                self._wait(parameter)
        if self._complete:
            self._pass_in_queue(needed)
            self._prefetch()
        self._step_id += 1

    def release(self, module: str, *, forward: bool) -> None:
        """After a module's forward or backward (``release_sub_module``)."""
        mine = {p.ds_id: p for p in self.owned.get(module, [])}
        free = set(mine)
        if self._complete:
            free = {i for i, p in mine.items() if not p.persistent and not self._needed_soon(p)}
        if not forward:
            again = self._recomputed.pop(module, {})
            free |= {i for i, p in again.items() if not p.persistent}
            mine |= again
            self._in_backward.pop(module, None)
        for ds_id, parameter in mine.items():
            parameter.active.discard(module)
            if ds_id in free:
                self._release(parameter)

    def release_leftovers(self) -> None:
        """At the end of backward: modules whose input needed no gradient."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            left = {p.ds_id: p for p in self.owned.get(module, [])}
            left |= self._recomputed.pop(module, {})
            for parameter in left.values():
                parameter.active.discard(module)
                if not parameter.persistent:
                    self._release(parameter)

    def release_everything(self) -> None:
        """Before the optimizer's step (``release_and_reset_all``)."""
        for parameter in self.everything:
            if parameter.group is not None:
                self._wait(parameter)
            parameter.active.clear()
            self._release(parameter)

    # -- recording -------------------------------------------------------------------------------

    def _freeze(self) -> None:
        """The recorded order of modules becomes the order of parameters to fetch."""
        self._complete = True
        sizes = []
        for index, module in enumerate(self._order):
            owned = sorted(self.owned.get(module, []), key=lambda p: p.ds_id)
            sizes.append(sum(p.numel for p in owned))
            for parameter in owned:
                self._param_order.append((parameter, index))
                self._uses.setdefault(parameter.ds_id, []).append(index)
        self._before = [0, *accumulate(sizes)]

    def _needed_soon(self, parameter: Gathered) -> bool:
        """Used again within max_reuse_distance, or by a module that prefetching went past."""
        now = self._step_id
        if self._fetched_for.get(parameter.ds_id, -1) > now:
            return True
        uses = self._uses.get(parameter.ds_id, [])
        at = bisect_left(uses, now)
        if at == len(uses):
            return False
        return self._before[uses[at]] - self._before[now] < self.limits.max_reuse

    # -- gathering -------------------------------------------------------------------------------

    def _gather(self, wanted: Iterable[Gathered]) -> None:
        missing = [p for p in wanted if not p.available and p.group is None]
        if not missing:
            return
        self._live += sum(p.numel for p in missing)
        group = Group(sorted(missing, key=lambda p: p.ds_id), {p.ds_id for p in missing})
        for parameter in missing:
            parameter.group = group
        self.sink.gather(group)

    def _wait(self, parameter: Gathered) -> None:
        group = parameter.group
        assert group is not None
        if not group.unpacked:
            group.unpacked = True
            self.sink.unpack(group)
            for member in group.members:
                member.available = True
        parameter.group = None
        group.waiting.discard(parameter.ds_id)
        if not group.waiting:
            self.sink.drop(group)

    def _pass_in_queue(self, needed: list[Gathered]) -> None:
        """Take what was just fetched off the queue of what to prefetch."""
        now = self._step_id
        fetched = {p.ds_id for p in needed if self._fetched_for.get(p.ds_id, -1) < now}
        seen: set[int] = set()
        while self._queue and len(seen) < len(fetched):
            parameter, last_used = self._queue.popleft()
            self._fetched_for[parameter.ds_id] = last_used
            seen.add(parameter.ds_id)

    def _prefetch(self) -> None:
        room = min(self.limits.max_live - self._live, self.limits.prefetch)
        wanted: dict[int, Gathered] = {}
        numel = 0
        while self._queue and numel < room:
            parameter, last_used = self._queue.popleft()
            missing = not parameter.available and parameter.group is None
            last = self._fetched_for.get(parameter.ds_id, -1)
            self._fetched_for[parameter.ds_id] = max(last, last_used)
            if missing and parameter.ds_id not in wanted:
                wanted[parameter.ds_id] = parameter
                numel += parameter.numel
        self._gather(wanted.values())

    def _release(self, parameter: Gathered) -> None:
        if parameter.available and not parameter.active:
            parameter.available = False
            self._live -= parameter.numel
            self.sink.free(parameter)
