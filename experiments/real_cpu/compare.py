"""Predicted against real training steps on CPU: ``python -m experiments.real_cpu.compare``.

For every model and case the step is traced on meta tensors for CPU kernels, and run for real
twice: under the same recorder, and bare under ``torch.profiler``. The table says by how many
bytes the real peaks differ from the predicted one, and which storages are to blame.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from experiments.real_cpu.cases import CASES, spec_of
from experiments.real_cpu.models import MODELS
from experiments.real_cpu.profiled import Block, Profile, profile_spec
from llmem.lifetimes import Trace
from llmem.spec import RunSpec
from llmem.timeline import Timeline, replay
from llmem.trace.run import trace_spec

SCALAR = 8
"""Bytes of the largest scalar."""

NUMBER = "a Python number"
"""What makes an allocation outside any op: ``x * 0.5`` wraps 0.5 before it calls the op."""


@dataclass(frozen=True)
class Recorded:
    """Meta trace against the same recorder on real tensors."""

    predicted: int
    real: int
    difference: str
    """The first birth or death that differs; empty if the two sequences are the same."""


def against_recorder(spec: RunSpec) -> Recorded:
    """Peak of live storage bytes, and the whole sequence of births and deaths by size."""
    predicted, real = trace_spec(spec, device="meta"), trace_spec(spec, device="cpu")
    curves = [replay(trace.lifetimes, exact=True) for trace in (predicted, real)]
    moves = [_moves(curve) for curve in curves]
    difference = ""
    for index, pair in enumerate(zip_longest(*moves)):
        if pair[0] != pair[1]:
            names = (_describe(t, c, index) for t, c in zip((predicted, real), curves, strict=True))
            difference = f"event {index}: predicted {next(names)}, real {next(names)}"
            break
    peaks = [int(curve.requested.max()) for curve in curves]
    return Recorded(peaks[0], peaks[1], difference)


def _moves(curve: Timeline) -> list[int]:
    return [int(n) for n in curve.events.sign * curve.lifetimes.nbytes[curve.events.row]]


def _describe(trace: Trace, curve: Timeline, index: int) -> str:
    if index >= len(curve.events):
        return "nothing"
    row = int(curve.events.row[index])
    verb = "birth" if curve.events.sign[index] > 0 else "death"
    op = trace.op_name(int(curve.lifetimes.birth_op[row]))
    module = trace.modules[int(curve.lifetimes.module[row])]
    return f"{verb} of {curve.lifetimes.nbytes[row]} bytes ({op}, {module or 'no module'})"


@dataclass(frozen=True)
class Profiled:
    """Meta trace against the profiler: peaks with and without what kernels allocate inside."""

    predicted: int
    real: int
    real_without_scratch: int
    scratch: str
    """Bytes and ops of the scratch alive at the real peak."""
    unseen: str
    """Bytes and ops alive at the real peak beyond scratch that the prediction does not have."""
    only_real: Counter[str]
    """Allocations of the whole run (bytes and op) that have no predicted birth of that size."""
    only_predicted: Counter[str]


def against_profiler(spec: RunSpec) -> Profiled:
    """The bare step's peak, and what it is made of where it differs from the prediction."""
    trace = trace_spec(spec)
    curve = replay(trace.lifetimes, exact=True)
    profile = profile_spec(spec)
    scratch = profile.scratch(set(trace.names))
    real, when = profile.peak()
    quiet, quiet_when = profile.peak(scratch)
    at_peak = Counter(
        f"{profile.blocks[i].nbytes} bytes in {profile.blocks[i].within[0]}"
        for i in profile.alive(when)
        if i in scratch
    )
    unseen = _unseen(curve, profile, quiet_when, scratch)
    only_real, only_predicted = _unmatched(trace, profile, scratch)
    return Profiled(
        predicted=int(curve.requested.max()),
        real=real,
        real_without_scratch=quiet,
        scratch=_listed(at_peak),
        unseen=_listed(unseen),
        only_real=only_real,
        only_predicted=only_predicted,
    )


def _unmatched(
    trace: Trace, profile: Profile, scratch: frozenset[int]
) -> tuple[Counter[str], Counter[str]]:
    """Births of either side that the other lacks, matched by size; scalars (8 bytes) left out."""
    table = trace.lifetimes
    predicted: dict[int, list[str]] = {}
    for row in np.flatnonzero((table.birth_op >= 0) & (table.nbytes > SCALAR)):
        name = trace.op_name(int(table.birth_op[row]))
        predicted.setdefault(int(table.nbytes[row]), []).append(name)

    def take(block: Block, names: Iterable[str]) -> bool:
        same = predicted.get(block.nbytes, [])
        name = next((name for name in names if name in same), None)
        if name is not None:
            same.remove(name)
        return name is not None

    kept = [b for i, b in enumerate(profile.blocks) if i not in scratch and b.nbytes > SCALAR]
    # First by size and op, then by size alone: some kernels call others.
    left = [block for block in kept if not take(block, block.ops)]
    # Checkpointing stops a recomputation inside its last op, which frees its own output then.
    for block in (profile.blocks[index] for index in sorted(scratch)):
        take(block, block.ops)
    left = [block for block in left if not take(block, list(predicted.get(block.nbytes, ())))]
    only_real = Counter(f"{b.nbytes} bytes of {b.ops[0] if b.ops else NUMBER}" for b in left)
    only_predicted = Counter(f"{n} bytes of {op}" for n, ops in predicted.items() for op in ops)
    return only_real, only_predicted


def _unseen(
    curve: Timeline, profile: Profile, when: int, scratch: frozenset[int]
) -> Counter[str]:
    """Real blocks alive at ``when`` with no predicted storage of equal size alive at its peak."""
    alive = curve.alive(curve.peak_index()) & (curve.lifetimes.birth_op >= 0)
    predicted = Counter(int(n) for n in curve.lifetimes.nbytes[np.flatnonzero(alive)])
    found: Counter[str] = Counter()
    for index in profile.alive(when):
        block = profile.blocks[index]
        if index in scratch:
            continue
        if predicted[block.nbytes]:
            predicted[block.nbytes] -= 1
        else:
            op = block.ops[0] if block.ops else NUMBER
            found[f"{block.nbytes} bytes of {op}"] += 1
    return found


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} x {what}" for what, n in counts.most_common(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    print(f"{'model':12} {'case':34} {'predicted':>10} {'recorder':>8} {'profiler':>9} "
          f"{'w/o scratch':>11}  explanation")  # fmt: skip
    rows = equal = same = 0
    worst, worst_quiet = 0.0, 0.0
    for model in arguments.models:
        for case in arguments.cases:
            spec = spec_of(model, case)
            recorded, profiled = against_recorder(spec), against_profiler(spec)
            gap = profiled.real - profiled.predicted
            quiet = profiled.real_without_scratch - profiled.predicted
            notes = [recorded.difference, profiled.scratch, profiled.unseen if quiet else ""]
            if profiled.only_real:
                notes.append(f"only real: {_listed(profiled.only_real)}")
            if profiled.only_predicted:
                notes.append(f"only predicted: {_listed(profiled.only_predicted)}")
            print(f"{model:12} {case:34} {recorded.predicted:10,} "
                  f"{recorded.real - recorded.predicted:+8,} {gap / profiled.predicted:+9.3%} "
                  f"{quiet:+11,}  {'; '.join(n for n in notes if n)}", flush=True)  # fmt: skip
            rows += 1
            equal += recorded.real == recorded.predicted
            same += not recorded.difference
            worst = max(worst, abs(gap) / profiled.predicted)
            worst_quiet = max(worst_quiet, abs(quiet) / profiled.predicted)
    print(f"{rows} runs: peak equal to the byte under the recorder in {equal}, whole sequence of "
          f"births and deaths in {same}; profiler's peak within {worst:.3%}, "
          f"{worst_quiet:.4%} without kernel scratch")  # fmt: skip


if __name__ == "__main__":
    main()
