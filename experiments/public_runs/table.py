"""Predicted against measured: the rows of an experiment, their errors, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

DATA = Path(__file__).parent / "data"
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One published measurement and what is predicted for it, both in bytes."""

    name: str
    measured: int
    predicted: int
    reason: str = ""
    """Why the prediction is off, where it is."""

    @property
    def error(self) -> float:
        """Signed, relative to the measured value."""
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Summary:
    """How a set of rows fares: median absolute error, and the share within a bound."""

    rows: int
    median: float
    within: float
    bound: float

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, median error {self.median:.2%}, "
            f"{self.within:.1%} within {self.bound:.0%}"
        )


def summarise(rows: Sequence[Row], bound: float) -> Summary:
    """Median of the absolute errors, and the share of rows whose error is at most ``bound``."""
    errors = [abs(row.error) for row in rows]
    inside = sum(error <= bound for error in errors) / len(errors)
    return Summary(len(rows), median(errors), inside, bound)


def show(rows: Sequence[Row]) -> None:
    """Print measured and predicted MiB, the error, and the reason where there is one."""
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'measured':>12} {'predicted':>12} {'error':>8}  MiB")
    for row in rows:
        print(
            f"{row.name:{width}}  {row.measured / MIB:12,.3f} {row.predicted / MIB:12,.3f} "
            f"{row.error:+8.2%}  {row.reason}".rstrip()
        )
