"""Lay a traced step of the hand-written decoder beside the CUDA allocator history of a real one.

    python -m experiments.cuda_logs.match --log FILE --ctx N [--autocast bf16] [--inference]

Prints the peak of active bytes, traced and recorded, and how many of the allocations of 2 KiB and
more fall in line when both are matched in order by size (longest common subsequence).
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import llmem
from experiments.cuda_logs.course_transformer import Shape, inference, training
from llmem.gpu.event_log import read_log
from llmem.gpu.replay import replay_log
from llmem.lifetimes import Trace
from llmem.timeline import replay

SMALLEST = 2048
"""Bytes; allocations below are not counted."""

CAUSES = ("aten_outer", "autograd_node")
"""Columns that say what made an allocation, where a log has them."""


@dataclass(frozen=True)
class Allocation:
    """One request: its bytes and, for reading, what asked for it."""

    nbytes: int
    why: str


@dataclass(frozen=True)
class Side:
    """What one side of the comparison saw: peaks in bytes, and its requests in order.

    ``active`` counts the allocator's blocks, ``requested`` what was asked for.
    """

    active: int
    requested: int
    allocations: list[Allocation]


@dataclass(frozen=True)
class Match:
    """Traced against recorded; ``pairs`` are indices into the two lists of allocations."""

    traced: Side
    recorded: Side
    pairs: list[tuple[int, int]]

    @property
    def peak_error(self) -> float:
        """(traced - recorded) / recorded."""
        return self.traced.active / self.recorded.active - 1

    @property
    def of_recorded(self) -> float:
        return len(self.pairs) / len(self.recorded.allocations)

    @property
    def of_traced(self) -> float:
        return len(self.pairs) / len(self.traced.allocations)


def recorded(log: Path) -> Side:
    """The history of a real step: an events CSV with its segments CSV beside it."""
    opener = gzip.open if log.suffix == ".gz" else open
    with opener(log, "rt") as file:
        rows = list(csv.DictReader(file))
    allocations = [
        Allocation(int(row["size"]), " ".join(row.get(name) or "-" for name in CAUSES))
        for row in rows
        if row["action"] == "alloc" and int(row["size"]) >= SMALLEST
    ]
    return Side(replay_log(log).allocated_peak_real, _requested_peak(log), allocations)


def _requested_peak(path: Path) -> int:
    """From what is held at the end of the record and the events that led there."""
    log = read_log(path)
    held = sum(
        block.requested
        for segment in log.segments or ()
        for block in segment.blocks
        if block.state != "inactive"
    )
    sign = {"alloc": 1, "free_completed": -1}
    level = list(accumulate(sign.get(event.action, 0) * event.size for event in log.events))
    return held - level[-1] + max(level)


def traced(trace: Trace) -> Side:
    """The last step of a trace, after the steps that warm it up."""
    timeline = replay(trace.lifetimes)
    first, last = timeline.span(trace.step_ticks[-2], trace.step_ticks[-1])
    events = timeline.events
    births = [int(events.row[i]) for i in range(first, last) if events.sign[i] > 0]
    start = next(i for i in range(first, last) if events.sign[i] > 0)
    table = trace.lifetimes
    allocations = [
        Allocation(int(table.nbytes[row]), _why(trace, row))
        for row in births
        if table.nbytes[row] >= SMALLEST
    ]
    peaks = (int(curve[start:last].max()) for curve in (timeline.allocated, timeline.requested))
    return Side(*peaks, allocations)


def _why(trace: Trace, row: int) -> str:
    op = int(trace.lifetimes.birth_op[row])
    return f"{trace.op_name(op)} {trace.modules[trace.lifetimes.module[row]]}"


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence (bit-parallel, Hyyrö 2004).

    >>> common("abcd", "xbd")
    [(1, 1), (3, 2)]
    """
    where: dict[Hashable, int] = {}
    for i, item in enumerate(a):
        where[item] = where.get(item, 0) | 1 << i
    full = (1 << len(a)) - 1
    rows, row = [], full
    for item in b:
        hits = row & where.get(item, 0)
        row = (row + hits | row - hits) & full
        rows.append(row)
    pairs, i, j = [], len(a), len(b)
    while i and j:
        if rows[j - 1] >> (i - 1) & 1:
            i -= 1
            continue
        j -= 1
        if not j or rows[j - 1] >> (i - 1) & 1:
            i -= 1
            pairs.append((i, j))
    return pairs[::-1]


def match(ours: Side, theirs: Side) -> Match:
    sizes = ([a.nbytes for a in side.allocations] for side in (ours, theirs))
    return Match(ours, theirs, common(*sizes))


def trace_step(context: int, autocast: str | None, *, is_inference: bool = False) -> Trace:
    """Trace the decoder's step on meta: one to warm up, one to look at."""
    around: Any = nullcontext if autocast is None else lambda: _autocast(autocast)
    step = (inference if is_inference else training)(Shape(context), "meta", around)
    optimizer = getattr(step, "optimizer", None)
    trace: Trace = llmem.trace(step, model=step.model, optimizer=optimizer, steps=2)  # type: ignore[operator]
    return trace


def _autocast(name: str) -> AbstractContextManager[Any]:
    from llmem.trace.autocast import autocast_on_meta

    return autocast_on_meta(name)


def unmatched(result: Match) -> list[tuple[str, Counter[tuple[int, str]]]]:
    """What either side saw alone, counted by bytes and cause."""
    sides = (("traced", result.traced, 0), ("recorded", result.recorded, 1))
    found = []
    for name, side, which in sides:
        paired = {pair[which] for pair in result.pairs}
        alone = (a for i, a in enumerate(side.allocations) if i not in paired)
        found.append((name, Counter((a.nbytes, a.why) for a in alone)))
    return found


def show(result: Match) -> None:
    ours, theirs = result.traced, result.recorded
    for level in ("active", "requested"):
        mine, real = getattr(ours, level), getattr(theirs, level)
        print(
            f"peak {level}: traced {mine / 2**20:,.1f} MiB, recorded {real / 2**20:,.1f} MiB, "
            f"{mine / real - 1:+.3%}"
        )
    print(
        f"allocations of 2 KiB and more, in order: {len(result.pairs)} match, "
        f"{result.of_recorded:.2%} of the log's {len(theirs.allocations)}, "
        f"{result.of_traced:.2%} of the trace's {len(ours.allocations)}"
    )
    for name, alone in unmatched(result):
        for (nbytes, why), count in alone.most_common(8):
            print(f"  only {name}: {count} x {nbytes:,} bytes  {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--log", type=Path, required=True, help="events CSV, also gzipped")
    parser.add_argument("--ctx", type=int, required=True, help="tokens per sequence")
    parser.add_argument("--autocast", choices=("bf16", "fp16"))
    parser.add_argument("--inference", action="store_true", help="the log shows one forward pass")
    options = parser.parse_args()
    names = {"bf16": "bfloat16", "fp16": "float16", None: None}
    trace = trace_step(options.ctx, names[options.autocast], is_inference=options.inference)
    show(match(traced(trace), recorded(options.log)))


if __name__ == "__main__":
    main()
