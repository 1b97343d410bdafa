"""One plot per engine: predicted over measured.

    python -m experiments.real_runs.plots [ENGINE ...]

Left: the peak of every rank of every committed record against the prediction. Right: live bytes at
each block's boundaries through the last step of one record, measured and predicted. Truth: the real
framework in real CPU processes over gloo (``records/``). Written to ``plots/<engine>.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from experiments.real_runs.matrix import RECORDS, STRATEGIES
from llmem.measure import validate
from llmem.measure.launch import read_record
from llmem.measure.validate import Row

PLOTS = Path(__file__).parent / "plots"
MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """A record's name, its RunSpec's fields and its rows."""

    name: str
    spec: dict[str, Any]
    rows: list[Row]

    def peaks(self) -> list[Row]:
        return [row for row in self.rows if row.metric == "peak"]

    def boundaries(self) -> list[Row]:
        """Those of rank 0 in the last step, in the order in which they were measured."""
        mine = [r for r in self.rows if r.rank == 0 and r.metric.startswith("boundary.")]
        last = max((int(row.metric.split(".")[1]) for row in mine), default=0)
        return [row for row in mine if int(row.metric.split(".")[1]) == last]


def compared(engine: str) -> Iterator[Compared]:
    """Every record of ``engine`` beside its prediction."""
    for path in sorted(RECORDS.glob(f"{engine}-*.json*")):
        record = read_record(path)
        yield Compared(path.name.split(".")[0], record["spec"], validate(record, boundaries=True))


def draw(engine: str, records: list[Compared]) -> Path:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), width_ratios=(1, 1.5))
    draw_peaks(left, records)
    draw_boundaries(right, typical(records))
    figure.suptitle(f"{engine}: predicted over measured (CPU processes over gloo)")
    figure.tight_layout()
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{engine}.png"
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    plt.close(figure)
    return path


def draw_peaks(axes: Any, records: list[Compared]) -> None:
    """Predicted over measured peaks of all ranks; mark by method, colour by precision."""
    for method, mark in (("full", "o"), ("lora", "^")):
        for bf16, colour in ((False, "tab:blue"), (True, "tab:orange")):
            chosen = [
                row
                for record in records
                if record.spec.get("method", "full") == method
                and bool(record.spec.get("bf16")) == bf16
                for row in record.peaks()
            ]
            label = f"{method}, {'bf16' if bf16 else 'fp32'} ({len(chosen)} ranks)"
            measured = [row.measured / MIB for row in chosen]
            predicted = [row.predicted / MIB for row in chosen]
            axes.scatter(measured, predicted, marker=mark, facecolors="none", edgecolors=colour,
                         label=label, zorder=2)  # fmt: skip
    rows = [row for record in records for row in record.peaks()]
    ends = [f(row.measured for row in rows) / MIB for f in (min, max)]
    axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
    worst = max((row.error for row in rows), key=abs)
    axes.set(title=f"peak of live bytes, largest error {worst:+.3%}", xlabel="measured, MiB",
             ylabel="predicted, MiB", xscale="log", yscale="log")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(mpl.ticker.ScalarFormatter())
        axis.set_minor_formatter(mpl.ticker.ScalarFormatter())
    axes.legend(fontsize=8)


def typical(records: list[Compared]) -> Compared:
    """The record whose timeline is drawn: full fine-tuning in bf16 on the most ranks."""
    def rank(record: Compared) -> tuple[bool, bool, int, int]:
        spec = record.spec
        full = spec.get("method", "full") == "full"
        return full, bool(spec.get("bf16")), spec["gpus"], len(record.boundaries())

    return max(records, key=rank)


def draw_boundaries(axes: Any, record: Compared) -> None:
    rows = record.boundaries()
    places = range(len(rows))
    axes.plot(places, [row.measured / MIB for row in rows], "o-", color="0.5", linewidth=3,
              markersize=8, label="measured")  # fmt: skip
    axes.plot(places, [row.predicted / MIB for row in rows], ".-", color="tab:red", linewidth=1,
              label="predicted")  # fmt: skip
    axes.set_xticks(places, [_place(row) for row in rows], rotation=90, fontsize=7)
    worst = max((abs(row.error) for row in rows), default=0.0)
    axes.set(title=f"{record.name}, rank 0: within {worst:.3%} of the peak at block boundaries",
             ylabel="live, MiB")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _place(row: Row) -> str:
    """``forward 3 enter``: phase, the block's number, edge."""
    _, _, phase, *unit, edge = row.metric.split(".")
    return f"{phase} {unit[-1]} {edge}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", default=STRATEGIES)
    mpl.use("Agg")
    for engine in parser.parse_args(arguments).engines:
        records = list(compared(engine))
        if not records:
            print(f"{engine}: no records yet; measure them with experiments/real_runs/matrix.py")
            continue
        print(f"{engine}: {len(records)} records, {draw(engine, records)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
