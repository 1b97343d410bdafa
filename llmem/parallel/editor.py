"""Rewrite a trace's lifetimes: drop rows, end them elsewhere, add new ones, name new ops.

A pass describes what a rank does differently from the unsharded step. It works in ticks; between
two recorded events there is room for ``TICK`` new ones, and ``Editor.at`` hands out consecutive
places there, so that a pass only has to emit its events in the order in which they happen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmem.lifetimes import (
    NEVER,
    TICK,
    Category,
    HostWait,
    Lifetimes,
    Ops,
    Phase,
    Recorded,
    Trace,
)


@dataclass
class _NewOp:
    name: str
    module: str
    phase: Phase
    step: int
    tick: int


@dataclass
class Editor:
    """Collects the changes of one rank; ``finish`` gives the new lifetimes and trace."""

    trace: Trace
    _drop: NDArray[np.bool_] = field(init=False)
    _death: NDArray[np.int64] = field(init=False)
    _nbytes: NDArray[np.int64] = field(init=False)
    _rows: list[dict[str, int]] = field(default_factory=list)
    _ops: list[_NewOp] = field(default_factory=list)
    _used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _modules: dict[str, int] = field(init=False)
    _phase_ticks: list[tuple[int, Phase, int]] | None = None
    _emptied: list[int] = field(default_factory=list)
    _recorded: dict[int, Recorded] = field(default_factory=dict)
    """Of recorded rows; those of added lifetimes have the negative keys -1 - handle."""
    _host_waits: list[HostWait] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = self.trace.lifetimes
        self._drop = np.zeros(len(table), np.bool_)
        self._death = table.death.copy()
        self._nbytes = table.nbytes.copy()
        self._modules = {name: i for i, name in enumerate(self.trace.modules)}

    def at(self, tick: int) -> int:
        """The next free place after ``tick`` and before the recorded event that follows it."""
        return self.reserve(tick, 1)

    def reserve(self, tick: int, count: int) -> int:
        """The first of ``count`` consecutive free places after ``tick``."""
        slot = tick // TICK
        first = max(tick - slot * TICK, self._used[slot]) + 1
        if first + count >= TICK:
            raise OverflowError("a pass put more events between two recorded ones than fit")
        self._used[slot] = first + count - 1
        return slot * TICK + first

    def drop(self, rows: NDArray[Any]) -> None:
        """Remove lifetimes (a mask or indices)."""
        self._drop[rows] = True

    def end(self, rows: NDArray[Any] | int, tick: int) -> None:
        """Let recorded lifetimes die at ``tick`` instead."""
        self._death[rows] = tick

    def resize(self, rows: NDArray[Any] | int, nbytes: NDArray[np.int64] | int) -> None:
        """Give recorded lifetimes another size."""
        self._nbytes[rows] = nbytes

    def op(self, name: str, module: str, phase: Phase, step: int, tick: int) -> int:
        """Name a new op (a gather, a reduce); returns what ``add`` takes as ``op``."""
        self._ops.append(_NewOp(name, module, phase, step, tick))
        return -2 - len(self._ops)

    def add(
        self,
        nbytes: int,
        birth: int,
        *,
        category: Category = Category.COMMUNICATION,
        module: str = "",
        key: int = -1,
        stream: int = 0,
        op: int = -1,
        death: int = int(NEVER),
    ) -> int:
        """Add a lifetime; returns a handle for ``free``."""
        self._rows.append(
            {
                "nbytes": int(nbytes),
                "birth": birth,
                "death": death,
                "birth_op": op,
                "category": int(category),
                "module": self._modules.setdefault(module, len(self._modules)),
                "stream": stream,
                "key": key,
            }
        )
        return len(self._rows) - 1

    def free(self, handles: int | Iterable[int], tick: int) -> None:
        """End added lifetimes at a place after ``tick``, each at its own."""
        for handle in [handles] if isinstance(handles, int) else handles:
            self._rows[handle]["death"] = self.at(tick)

    def empty_cache(self, tick: int) -> None:
        """The engine gives what is free back to the driver at ``tick``."""
        self._emptied.append(tick)

    def record_stream(self, handle: int, how: Recorded) -> None:
        """``Tensor.record_stream`` on an added lifetime."""
        self._recorded[-1 - handle] = how

    def record_row(self, row: int, how: Recorded) -> None:
        """``Tensor.record_stream`` on a recorded lifetime."""
        self._recorded[row] = how

    def host_wait(self, wait: HostWait) -> None:
        """The engine lets the CPU wait for the GPU."""
        self._host_waits.append(wait)

    def set_phase_ticks(self, phase_ticks: list[tuple[int, Phase, int]]) -> None:
        self._phase_ticks = phase_ticks

    def finish(self) -> tuple[Lifetimes, Trace]:
        """The rank's lifetimes, and the trace with the new ops among the recorded ones."""
        ops, names, position, new_position = self._merged_ops()
        table = self.trace.lifetimes
        keep = np.flatnonzero(~self._drop)
        kept = table.with_columns(death=self._death, nbytes=self._nbytes).take(keep)
        kept = kept.with_columns(
            birth_op=_moved(kept.birth_op, position), death_op=_moved(kept.death_op, position)
        )
        for row in self._rows:
            if row["birth_op"] < -2:
                row["birth_op"] = int(new_position[-row["birth_op"] - 3])
        lifetimes = kept + Lifetimes.build(self._rows)
        new_row = np.full(len(table), -1, np.int64)
        new_row[keep] = np.arange(len(keep))
        touched = new_row[self.trace.touch_row]
        alive = touched >= 0
        trace = replace(
            self.trace,
            ops=ops,
            names=names,
            lifetimes=lifetimes,
            modules=list(self._modules),
            touch_op=_moved(self.trace.touch_op[alive], position),
            touch_row=touched[alive],
            touch_kind=self.trace.touch_kind[alive],
            phase_ticks=self._phase_ticks or self.trace.phase_ticks,
            cache_emptied=sorted([*self.trace.cache_emptied, *self._emptied]),
            recorded=self._recorded_rows(new_row, len(keep)),
            host_waits=sorted([*self.trace.host_waits, *self._host_waits]),
        )
        return lifetimes, trace

    def _recorded_rows(self, new_row: NDArray[np.int64], kept: int) -> dict[int, Recorded]:
        """What is recorded, by row of the new table."""
        before = {**self.trace.recorded, **self._recorded}
        moved = {
            int(new_row[key]) if key >= 0 else kept - 1 - key: how for key, how in before.items()
        }
        moved.pop(-1, None)
        return moved

    def _merged_ops(
        self,
    ) -> tuple[Ops, list[str], NDArray[np.int64], NDArray[np.int64]]:
        """Old and new ops by tick; where each old and each new one went."""
        old, new = self.trace.ops, self._ops
        names = {name: i for i, name in enumerate(self.trace.names)}
        columns = {
            "name": [names.setdefault(op.name, len(names)) for op in new],
            "module": [self._modules.setdefault(op.module, len(self._modules)) for op in new],
            "phase": [int(op.phase) for op in new],
            "step": [op.step for op in new],
            "tick": [op.tick for op in new],
            "recompute": [False] * len(new),
        }
        merged = {
            name: np.concatenate([getattr(old, name), np.array(values, getattr(old, name).dtype)])
            for name, values in columns.items()
        }
        order = np.argsort(merged["tick"], kind="stable")
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        ops = Ops(**{name: values[order] for name, values in merged.items()})
        return ops, list(names), position[: len(old)], position[len(old) :]


def _moved(index: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Op indices after the merge; negative ones (no op) stay."""
    moved = index.copy()
    known = index >= 0
    moved[known] = position[index[known]]
    return moved
