"""Published runs, predicted: errors, bounds, and whether a GPU capped at an estimate would do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from llmem.errors import LlmemError
from llmem.lifetimes import Lifetimes
from llmem.measure.published.files import Run, read
from llmem.spec import RunSpec


@dataclass(frozen=True)
class Prediction:
    """What ``llmem.estimate`` says about a run, bytes of the worst rank.

    ``upper`` is the most that reserved memory may be by the estimate's interval; ``outside`` lies
    outside the allocator and inside what the metric counts. ``lifetimes`` are those of the worst
    rank, for a replay under a cap.
    """

    nbytes: int
    upper: int
    outside: int
    seconds: float
    phase: str
    lifetimes: Lifetimes = field(repr=False)
    conf: str = ""


@dataclass(frozen=True)
class Graded:
    """A row and its prediction."""

    run: Run
    prediction: Prediction

    @property
    def predicted(self) -> int:
        return self.prediction.nbytes

    @property
    def error(self) -> float:
        """Signed, relative to the measured value."""
        return self.predicted / self.run.measured - 1

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "source": run.source, "run": run.name, "method": run.method, "metric": run.metric,
            "grade": run.grade,
            "measured": run.measured, "predicted": self.predicted, "error": self.error,
            "upper": self.prediction.upper, "peak_in": self.prediction.phase,
        }  # fmt: skip


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of a set of rows; fractions of the measured value, signed ones if not ``absolute``.

    ``margin`` is what all estimates would have had to be raised by, for no row to be
    under-estimated.
    """

    rows: int
    median: float
    mean: float
    median_signed: float
    largest: float
    under: float
    margin: float

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def summary_of(pairs: Iterable[tuple[int, int]]) -> ErrorSummary:
    """Summary of (estimate, measured) pairs, bytes."""
    pairs = list(pairs)
    errors = [estimate / measured - 1 for estimate, measured in pairs]
    sizes = [abs(error) for error in errors]
    return ErrorSummary(
        rows=len(errors),
        median=median(sizes),
        mean=sum(sizes) / len(sizes),
        median_signed=median(errors),
        largest=max(sizes),
        under=sum(error < 0 for error in errors) / len(errors),
        margin=max(0.0, *(measured / max(estimate, 1) - 1 for estimate, measured in pairs)),
    )


def grade(runs: Sequence[Run]) -> tuple[list[Graded], list[tuple[Run, str]]]:
    """Predictions of all rows that can be expressed, and the rest with the reason.

    Equal RunSpecs are traced once.
    """
    predict = Predictor()
    graded, left = [], []
    for run in runs:
        if run.spec is None:
            left.append((run, run.why_not or ""))
            continue
        try:
            graded.append(Graded(run, predict(run.spec, run.metric)))
        except LlmemError as error:
            left.append((run, str(error)))
    return graded, left


class Predictor:
    """Estimates by RunSpec, each made once; its answer for any metric."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[[str], Prediction] | LlmemError] = {}

    def __call__(self, spec: RunSpec, metric: str) -> Prediction:
        """Raises LlmemError where the run cannot be traced."""
        key = spec.model_dump_json(exclude={"notes"}, fallback=repr)
        if key not in self._known:
            try:
                self._known[key] = _estimated(spec)
            except LlmemError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, LlmemError):
            raise found
        return found(metric)


def _estimated(spec: RunSpec) -> Callable[[str], Prediction]:
    from llmem.estimate import estimate

    start = time.perf_counter()
    result = estimate(spec)
    seconds = time.perf_counter() - start
    worst = result.worst
    peak, outside = worst.peak, dict(result.outside)
    context = outside.get("cuda_context", 0)
    # Where the card is nearly full the allocator gives cached blocks back.
    clipped = result.fit is not None and result.fit.retries > 0 and result.fit.fits
    device = result.fit.device if clipped and result.fit else peak.device
    slack = peak.reserved - peak.allocated
    lifetimes, phase, conf = worst.table.lifetimes, worst.peak_at.phase, spec.alloc_conf
    del worst, result  # the trace is large; its lifetimes are enough

    def of(metric: str) -> Prediction:
        nbytes, inside = {
            "allocated": (peak.allocated, 0),
            "active": (peak.allocated, 0),
            "reserved": (peak.reserved - (peak.device - device), 0),
            "growth": (device - context, outside.get("library_handles", 0)),
            "device": (device, sum(outside.values())),
        }[metric]
        upper = nbytes if metric in ("allocated", "active") else peak.reserved + slack + inside
        return Prediction(nbytes, upper, inside, seconds, phase, lifetimes, conf)

    return of


def fits_capped(item: Graded, cap: int) -> bool:
    """Whether training would have fitted if the allocator had had ``cap`` bytes, by its model.

    The run may need less than it reserved, as cached blocks go back when memory is short. What the
    measured value has more (or less) than the predicted one is taken off the cap, so that this
    grades ``cap`` against what was measured.
    """
    from llmem.gpu.alloc_conf import AllocConf
    from llmem.timeline import replay

    shift = item.run.measured - item.prediction.nbytes
    room = cap - shift
    if room <= 0:
        return False
    conf = AllocConf.parse(item.prediction.conf)
    return replay(item.prediction.lifetimes, conf=conf, capacity=room).oom is None


@dataclass(frozen=True)
class Report:
    """All rows of some files: graded, left out with why, and what baselines say of the graded."""

    graded: list[Graded]
    left: list[tuple[Run, str]]
    baselines: dict[str, list[int | None]]

    def groups(self) -> dict[tuple[str, str], list[int]]:
        """Indices of graded rows by (source, metric)."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, item in enumerate(self.graded):
            found.setdefault((item.run.source, item.run.metric), []).append(index)
        return found

    def methods(self) -> dict[tuple[str, str, str], list[int]]:
        """Indices of graded rows by (source, method, metric), of sources with several methods."""
        found: dict[tuple[str, str, str], list[int]] = {}
        for (source, metric), indices in self.groups().items():
            if len({self.graded[i].run.method for i in indices}) > 1:
                for i in indices:
                    found.setdefault((source, self.graded[i].run.method, metric), []).append(i)
        return dict(sorted(found.items()))

    def reasons(self) -> dict[tuple[str, str], int]:
        """How many rows were left out, by (source, reason)."""
        counts: dict[tuple[str, str], int] = {}
        for run, why in self.left:
            counts[run.source, why] = counts.get((run.source, why), 0) + 1
        return counts

    def beside(self, indices: Sequence[int]) -> dict[str, tuple[ErrorSummary, ErrorSummary]]:
        """Per baseline, its summary and ours over those of the rows that it can express."""
        found = {}
        for name, says in self.baselines.items():
            both = [(says[i], self.graded[i]) for i in indices if says[i] is not None]
            if both:
                theirs = [(value or 0, item.run.measured) for value, item in both]
                ours = [(item.predicted, item.run.measured) for _, item in both]
                found[name] = summary_of(theirs), summary_of(ours)
        return found

    def to_json(self) -> dict[str, Any]:
        """``{"rows", "summary", "by_method", "not_expressed"}``: bytes, and errors as fractions."""
        rows = []
        for index, item in enumerate(self.graded):
            says = {name: values[index] for name, values in self.baselines.items()}
            rows.append({**item.to_json(), **({"baselines": says} if says else {})})
        return {
            "schema": "llmem.validate/1",
            "rows": rows,
            "summary": [
                {
                    "source": source, "metric": metric,
                    **summary_of(_pairs(self.graded[i] for i in indices)).to_json(),
                    "baselines": {
                        name: {"theirs": theirs.to_json(), "ours": ours.to_json()}
                        for name, (theirs, ours) in self.beside(indices).items()
                    },
                }
                for (source, metric), indices in self.groups().items()
            ],
            "by_method": [
                {
                    "source": source, "method": method, "metric": metric,
                    **summary_of(_pairs(self.graded[i] for i in indices)).to_json(),
                }
                for (source, method, metric), indices in self.methods().items()
            ],
            "not_expressed": [
                {"source": source, "rows": count, "why": why}
                for (source, why), count in self.reasons().items()
            ],
        }  # fmt: skip


def _pairs(items: Iterable[Graded]) -> list[tuple[int, int]]:
    return [(item.predicted, item.run.measured) for item in items]


def validate_published(files: Sequence[Path], *, baselines: Sequence[str] = ()) -> Report:
    """Grade all rows of ``files``, and ask ``baselines`` about the same ones.

    Raises LlmemError for a file or a baseline that is not known.
    """
    others = Baselines(baselines)
    graded, left = grade([run for path in files for run in read(path)])
    says: dict[str, list[int | None]] = {name: [] for name in others.names}
    for item in graded:
        for name, values in says.items():
            values.append(others.ask(name, item.run.spec)[0] if item.run.spec else None)
    return Report(graded, left, says)


# -- baselines --------------------------------------------------------------------------------------


class Baselines:
    """What the baselines ``names`` say about runs, each about each RunSpec once."""

    def __init__(self, names: Sequence[str]) -> None:
        from llmem.baselines.base import NAMES

        unknown = sorted(set(names) - set(NAMES))
        if unknown:
            raise LlmemError(f"unknown baseline {unknown[0]!r}; known are {', '.join(NAMES)}")
        self.names = tuple(names)
        self._known: dict[tuple[str, str], tuple[int | None, str | None, float]] = {}

    def ask(self, name: str, spec: RunSpec) -> tuple[int | None, str | None, float]:
        """Bytes above the process's base (context, NCCL), or None and why; seconds."""
        if callable(spec.model):
            return None, "the model is built by a function, without a config to read", 0.0
        key = (name, _as_baselines_see(spec))
        if key not in self._known:
            self._known[key] = _answer(name, spec)
        return self._known[key]


def _as_baselines_see(spec: RunSpec) -> str:
    unseen = {
        "gpu",
        "as_torch",
        "as_transformers",
        "zero_grad",
        "steps",
        "alloc_conf",
        "hold_outputs",
    }
    return spec.model_dump_json(exclude=unseen)


def _answer(name: str, spec: RunSpec) -> tuple[int | None, str | None, float]:
    from llmem.baselines.base import run

    try:
        result = run(name, _input(spec.model_dump_json()))
    except LlmemError as error:
        return None, str(error), 0.0
    return result.bytes, result.why_not, result.seconds


@lru_cache(maxsize=1)
def _input(described: str) -> Any:
    """The run (a RunSpec as JSON) as baselines see it.

    No baseline knows flash-attn's kernels: SDPA is in their place.
    """
    from llmem.compare import baseline_input

    spec = RunSpec.model_validate_json(described)
    if spec.attn_implementation == "flash_attention_2":
        spec = spec.model_copy(update={"attn_implementation": None})
    return baseline_input(spec, base_bytes=0)
