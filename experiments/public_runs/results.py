"""The rows of ``compare`` as a CSV file, so that a page can draw them without the quarter of an hour.

One line per graded row: who measured it, what the run was, and bytes: measured, ours, the upper end
of our interval, each baseline's (empty where it cannot express the row) and what the four tools of
xMem's evaluation said. Written by ``python -m experiments.public_runs.compare --csv``.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from llmem.measure.published.grading import Graded, Report

RESULTS = Path(__file__).parent / "results" / "compare.csv"
FACTS = (
    "source", "run", "metric", "grade", "method", "strategy", "gpus", "measured", "ours", "upper",
    "seconds",
)  # fmt: skip
TOOLS = ("xMem", "DNNMem", "SchedTune", "LLMem")
"""The tools of xMem's own evaluation; columns ``xMem:DNNMem`` and so on."""


def facts(item: Graded) -> dict[str, Any]:
    """The columns of a row that do not depend on other estimators."""
    run, spec = item.run, item.run.spec
    assert spec is not None
    return {
        "source": run.source, "run": run.name, "metric": run.metric, "grade": run.grade,
        "method": spec.method, "strategy": spec.strategy, "gpus": spec.gpus,
        "measured": run.measured, "ours": item.predicted, "upper": item.prediction.upper,
        "seconds": f"{item.prediction.seconds:.1f}",
    }  # fmt: skip


def lines(report: Report) -> list[dict[str, Any]]:
    """All graded rows of ``report`` in its order."""
    found = []
    for index, item in enumerate(report.graded):
        claims = {f"xMem:{t}": item.run.claims[t].nbytes for t in TOOLS if t in item.run.claims}
        says = {name: values[index] for name, values in report.baselines.items()}
        found.append({**facts(item), **says, **claims})
    return found


def write(report: Report, path: Path) -> None:
    """Write the rows to ``path``, one column per baseline that was asked."""
    columns = [*FACTS, *report.baselines, *(f"xMem:{tool}" for tool in TOOLS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(lines(report))
