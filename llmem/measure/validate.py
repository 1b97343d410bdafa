"""Predicted against measured: one row per rank and metric."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from llmem.errors import LlmemError


@dataclass(frozen=True)
class Row:
    """``measured`` and ``predicted`` in bytes; ``error`` is (predicted - measured) / measured.

    ``metric`` is ``peak`` (over all steps), ``first``, ``steady`` (the last step), or
    ``steady.<phase>``; on CUDA each with ``.allocated`` or ``.reserved`` after it. For
    ``boundary.<step>.<phase>.<unit>.<edge>`` the error is relative to the rank's measured peak.
    """

    rank: int
    metric: str
    measured: int
    predicted: int
    error: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def validate(
    record: dict[str, Any],
    estimate_fn: Callable[..., Any] | None = None,
    *,
    boundaries: bool = False,
) -> list[Row]:
    """Estimate a record's RunSpec and compare, rank by rank.

    ``estimate_fn`` takes a RunSpec and returns an ``Estimate`` (default ``llmem.estimate``). A CPU
    record is compared with requested bytes under CPU kernels, a CUDA record with allocated and
    reserved bytes. ``boundaries`` adds the live bytes at each block's boundaries (CPU only).
    Raises LlmemError if the estimate lacks a rank that was measured.
    """
    from llmem.spec import make_spec

    spec = make_spec(**record["spec"])
    on_cpu = record["device"] == "cpu"
    if on_cpu:
        spec = spec.model_copy(update={"gpu": "cpu"})
    elif spec.gpu is None:
        spec = spec.model_copy(update={"gpu": record["ranks"][0]["gpu"]})
    estimate = (estimate_fn or _estimate)(spec)
    rows: list[Row] = []
    for measured in record["ranks"]:
        predicted = _rank_of(estimate, measured["rank"])
        if on_cpu:
            rows += _cpu_rows(measured, predicted, spec)
            if boundaries:
                base = predicted.table.base or estimate.trace
                rows += _boundary_rows(measured, predicted, base, spec.strategy)
        else:
            rows += _cuda_rows(measured, predicted)
    return rows


def _estimate(spec: Any) -> Any:
    from llmem.estimate import estimate

    return estimate(spec)


def _rank_of(estimate: Any, rank: int) -> Any:
    for candidate in estimate.ranks:
        if rank in candidate.table.ranks:
            return candidate
    raise LlmemError(f"the estimate says nothing about rank {rank}, which the record has")


def _row(rank: int, metric: str, measured: int, predicted: int, whole: int | None = None) -> Row:
    return Row(rank, metric, measured, predicted, (predicted - measured) / (whole or measured))


def measured_peak(measured: dict[str, Any], spec: Any) -> int:
    """Bytes at a rank's peak.

    Under DDP the engine's setup counts, which sends whole parameters to the other ranks. The setup
    of a sharding engine does not: here it starts from a whole model in memory, as a GPU does not,
    but for ZeRO-3 without zero.Init. A pipeline's cuts the whole model, which no GPU would hold.
    """
    counts = (spec.strategy == "ddp" and spec.pp == 1) or _starts_whole(spec)
    return max(measured["peak"], measured["setup_peak"] if counts else 0)


def _starts_whole(spec: Any) -> bool:
    return spec.strategy == "zero3" and not spec.zero_init


def _cpu_rows(measured: dict[str, Any], predicted: Any, spec: Any) -> Iterator[Row]:
    rank, steps = measured["rank"], measured["steps"]
    yield _row(rank, "peak", measured_peak(measured, spec), predicted.peak.requested)
    if _starts_whole(spec):
        before = predicted.timeline.span(0, predicted.table.trace.step_ticks[0])
        setup = int(predicted.timeline.requested[slice(*before)].max())
        yield _row(rank, "setup", measured["setup_peak"], setup)
    yield _row(rank, "first", steps[0]["peak"], predicted.first.requested)
    if len(steps) < 2:
        return
    yield _row(rank, "steady", steps[-1]["peak"], predicted.steady.requested)
    phases = steady_phases(predicted)
    for phase, peak in steps[-1]["phases"].items():
        if phase in phases:
            yield _row(rank, f"steady.{phase}", peak, phases[phase])


def _cuda_rows(measured: dict[str, Any], predicted: Any) -> Iterator[Row]:
    rank, steps = measured["rank"], measured["steps"]
    for level in ("allocated", "reserved"):
        peak = max(step[level] for step in steps)
        yield _row(rank, f"peak.{level}", peak, getattr(predicted.peak, level))
        yield _row(rank, f"first.{level}", steps[0][level], getattr(predicted.first, level))
        if len(steps) > 1:
            yield _row(rank, f"steady.{level}", steps[-1][level], getattr(predicted.steady, level))


def steady_phases(predicted: Any) -> dict[str, int]:
    """Requested peak of each phase of a predicted rank's last step."""
    trace, timeline = predicted.table.trace, predicted.timeline
    starts = [*trace.phase_ticks, (trace.step_ticks[-1], None, -1)]
    ticks, curve = timeline.events.tick.tolist(), timeline.requested.tolist()
    last = max(step for _, _, step in trace.phase_ticks)
    peaks: dict[str, int] = {}
    for (start, phase, step), (end, _, _) in pairwise(starts):
        if step != last or phase is None:
            continue
        inside = curve[bisect_right(ticks, start) : bisect_right(ticks, end)]
        before = curve[max(bisect_right(ticks, start) - 1, 0)]
        peaks[phase.label] = max(peaks.get(phase.label, 0), before, *inside, 0)
    return peaks


def _boundary_rows(
    measured: dict[str, Any], predicted: Any, unsharded: Any, strategy: str
) -> Iterator[Row]:
    """Boundaries of the first and the last step; the estimate's last step is the steady one."""
    there = predicted_boundaries(predicted, unsharded, before_gathers=strategy == "zero3")
    last = max((step for step, *_ in measured["boundaries"]), default=0)
    last_predicted = max((step for step, *_ in there), default=0)
    # Of several micro-batches the last one counts, as it does in the prediction.
    seen = {(step, phase, unit, edge): live for step, phase, unit, edge, live in measured["boundaries"]}
    for (step, phase, unit, edge), live in seen.items():
        if strategy == "fsdp" and phase == "backward":
            continue  # the mark sits among FSDP1's hooks on the same tensor
        if strategy == "fsdp2" and unsharded.experts and phase == "backward":
            continue  # those of the experts' own unit run at the same moment, after the mark
        key = (last_predicted if step == last else step, phase, unit, edge)
        if key in there:
            name = f"boundary.{step}.{phase}.{unit}.{edge}"
            yield _row(measured["rank"], name, live, there[key], measured["peak"])


def predicted_boundaries(
    predicted: Any, unsharded: Any, *, before_gathers: bool = False
) -> dict[tuple[int, str, str, str], int]:
    """Live bytes where a predicted rank's blocks start and stop to compute.

    The ticks of the blocks are those of the ``unsharded`` trace; the engine's events sit between
    two recorded ones: all of them are done when a block starts, none when it stops.
    ``before_gathers``: backward of a block is entered before the engine fetches its parameters
    (DeepSpeed's hooks sit on the submodules, after the block's own mark).
    """
    from llmem.lifetimes import TICK
    from llmem.parallel.units import units_of

    ticks, curve = predicted.timeline.events.tick.tolist(), predicted.timeline.requested.tolist()

    def live(tick: int) -> int:
        index = bisect_right(ticks, tick) - 1
        return curve[index] if index >= 0 else 0

    found: dict[tuple[int, str, str, str], int] = {}
    for unit in units_of(unsharded, unsharded.wrapped):
        if unit.is_root:
            continue
        for step, windows in unit.forward.items():
            window = windows[-1]
            found[step, "forward", unit.name, "enter"] = live((window.start // TICK + 1) * TICK - 1)
            found[step, "forward", unit.name, "exit"] = live(window.end // TICK * TICK)
        for step, windows in unit.backward.items():
            slot = windows[-1].start // TICK
            tick = slot * TICK if before_gathers else (slot + 1) * TICK - 1
            found[step, "backward", unit.name, "enter"] = live(tick)
    return found
