"""Every estimator on the same published runs: ``python -m experiments.public_runs.compare``.

Kind of truth: 3, published measured runs (data/README.md). Two questions.

1. xMem's own runs. Its files hold what four tools said about each run, how long they took, and
   whether a second run, whose allocator was capped at the estimate, ran out of memory. Ours stands
   beside them on the same rows. A second run of ours was never made: the allocator model decides,
   against the measured value (``llmem.measure.published.grading.fits_capped``), and how often that model agrees
   with the second runs that were made is printed too. Caps are whole percents of the card, as xMem's.
   xMem's and its DNNMem's estimates hold a CUDA context that the measured growth does not have, and
   xMem's seconds leave out the CPU training that it needs.
2. All public runs that both can express, on one GPU and on several: ours beside each baseline of
   ``llmem compare``. Where the counter is torch's or NVML's growth, the baseline's base (context and
   NCCL) is taken as 0. Most baselines do not know adapters and answer as if all were trained, so full
   fine-tuning is also shown alone. Where a baseline wins is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from experiments.public_runs import results
from experiments.public_runs.results import TOOLS
from experiments.public_runs.table import DATA
from llmem.measure.published.files import Claim, read
from llmem.measure.published.grading import (
    ErrorSummary,
    Graded,
    Report,
    fits_capped,
    grade,
    summary_of,
    validate_published,
)
from llmem.report.published import print_reasons

FILES = ("xmem_runs.csv", "fms_acceleration_a100.csv", "public_runs.csv")
BASELINES = (
    "dnnmem", "llmem-paper", "llmem-code", "params-x4", "deepspeed", "accelerate", "eleutherai",
    "eleutherai-fixed", "megatron",
)  # fmt: skip
"""All but ``xmem``, which would need a real CPU step of every run; its own figures are in part 1."""



def whole_percent(cap: int, total: int) -> int:
    """``cap`` as a whole percent of the card, bytes, as ``set_per_process_memory_fraction`` got it."""
    return int(round(cap / total, 2) * total)


@dataclass(frozen=True)
class Second:
    """Second runs: how many, how many ran out of memory; and of how many both are known, agree."""

    runs: int
    oom: int
    known: int = 0
    agree: int = 0

    def __str__(self) -> str:
        return f"{self.oom} of {self.runs}" if self.runs else ""


def second_of_tool(items: Sequence[tuple[Graded, Claim]]) -> tuple[Second, Second]:
    """As recorded, and as the allocator model has it on the same rows."""
    capped = [(g, c) for g, c in items if c.cap is not None and c.capped_oom is not None]
    model = [not fits_capped(g, c.cap or 0) for g, c in capped]
    same = sum(oom == c.capped_oom for oom, (_, c) in zip(model, capped, strict=True))
    recorded = Second(len(capped), sum(bool(c.capped_oom) for _, c in capped))
    return recorded, Second(len(capped), sum(model), len(capped), same)


def second_of_ours(items: Sequence[Graded], cap: Callable[[Graded], int]) -> Second:
    """By the allocator model, at ``cap``; runs that were predicted not to fit are not made."""
    made = [g for g in items if g.run.total and cap(g) <= g.run.total]
    oom = [g for g in made if not fits_capped(g, whole_percent(cap(g), g.run.total or 1))]
    return Second(len(made), len(oom))


def with_largest(item: Graded) -> int:
    """Our upper bound and one block of the largest size, bytes.

    Batches of these runs differ in length: a shorter one first can leave a cached block in which
    the largest tensor of the longest does not fit, so that it is held twice.
    """
    return item.prediction.upper + int(item.prediction.lifetimes.nbytes.max())


# -- part 1 -------------------------------------------------------------------------------------------


def xmem_part(items: Sequence[Graded], console: Console) -> None:
    """The four tools and ours on xMem's rows."""
    console.print("\n[bold]1. xMem's runs: growth of NVML's used memory, one GPU[/bold]")
    table = Table(box=None, pad_edge=False)
    for name in ("estimator", "rows", "median", "mean", "signed", "largest", "too low", "seconds",
                 "capped: OOM as run", "OOM by the model", "model agrees"):  # fmt: skip
        table.add_column(name, justify="left" if name == "estimator" else "right")
    ours = summary_of((g.predicted, g.run.measured) for g in items)
    seconds = median(g.prediction.seconds for g in items)
    table.add_row("llmem", *_errors(ours), f"{seconds:.1f}", "",
                  str(second_of_ours(items, lambda g: g.predicted)), "")  # fmt: skip
    upper = summary_of((g.prediction.upper, g.run.measured) for g in items)
    table.add_row("llmem, interval.high", *_errors(upper), f"{seconds:.1f}", "",
                  str(second_of_ours(items, lambda g: g.prediction.upper)), "")  # fmt: skip
    wide = summary_of((with_largest(g), g.run.measured) for g in items)
    table.add_row("llmem, high + largest block", *_errors(wide), f"{seconds:.1f}", "",
                  str(second_of_ours(items, with_largest)), "")  # fmt: skip
    for tool in TOOLS:
        said = [(g, g.run.claims[tool]) for g in items if tool in g.run.claims]
        said = [(g, claim) for g, claim in said if claim.nbytes is not None]
        theirs = summary_of((claim.nbytes or 0, g.run.measured) for g, claim in said)
        recorded, model = second_of_tool(said)
        agree = f"{model.agree} of {model.known}" if model.known else ""
        table.add_row(tool, *_errors(theirs), f"{median(c.seconds for _, c in said):.1f}",
                      str(recorded), str(model), agree)  # fmt: skip
    console.print(table)
    below = sorted((g for g in items if g.prediction.upper < g.run.measured), key=lambda g: g.error)
    console.print(f"above our interval.high: {len(below)} of {len(items)} runs")
    for g in below:
        console.print(f"  {g.run.name}: {g.error:+.1%}, interval.high "
                      f"{g.prediction.upper / g.run.measured - 1:+.1%}")  # fmt: skip
    for kind, letter in (("fixed shape", "A"), ("batch 10 and more", "B"), ("smaller batch", "C")):
        group = [(g.predicted, g.run.measured) for g in items if g.run.grade == letter]
        if group:
            found = summary_of(group)
            console.print(f"{kind}: {found.rows} rows, median error {found.median:.2%}")


def _errors(found: ErrorSummary) -> tuple[str, ...]:
    return (
        str(found.rows), f"{found.median:.2%}", f"{found.mean:.2%}", f"{found.median_signed:+.2%}",
        f"{found.largest:.1%}", f"{found.under:.0%}",
    )  # fmt: skip


# -- part 2 -------------------------------------------------------------------------------------------


def side_by_side(report: Report, console: Console) -> None:
    """Each baseline and ours on the rows that both can express."""
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(report.graded):
        where = "one GPU" if _gpus(item) == 1 else "several GPUs"
        what = "full" if item.run.spec and item.run.spec.method == "full" else "adapters"
        for title in (where, f"{where}, {what}"):
            groups.setdefault(title, []).append(index)
    for title, indices in groups.items():
        console.print(f"\n[bold]2. All public runs that both can express, {title}[/bold]")
        table = Table(box=None, pad_edge=False)
        for name in ("baseline", "rows", "its median", "ours", "its mean", "ours", "its too low",
                     "ours", "it is nearer"):  # fmt: skip
            table.add_column(name, justify="left" if name == "baseline" else "right")
        for name, (theirs, ours) in report.beside(indices).items():
            nearer = nearer_rows(report, name, indices)
            table.add_row(
                name, str(ours.rows), f"{theirs.median:.2%}", f"{ours.median:.2%}",
                f"{theirs.mean:.2%}", f"{ours.mean:.2%}", f"{theirs.under:.0%}",
                f"{ours.under:.0%}", f"{len(nearer)} rows",
            )  # fmt: skip
        console.print(table)
    wins(report, console)


def nearer_rows(report: Report, name: str, indices: Iterable[int]) -> list[int]:
    """Rows where the baseline's error is smaller than ours."""
    found = []
    for i in indices:
        value, item = report.baselines[name][i], report.graded[i]
        if value is not None and abs(value / item.run.measured - 1) < abs(item.error):
            found.append(i)
    return found


def wins(report: Report, console: Console) -> None:
    """Where a baseline is nearer: by source and counter, and whether its median is."""
    console.print("\nwhere a baseline is nearer to the measured value than ours:")
    any_row = False
    for (source, metric), indices in report.groups().items():
        for name in report.baselines:
            nearer = nearer_rows(report, name, indices)
            if not nearer:
                continue
            any_row = True
            theirs, ours = report.beside(indices)[name]
            verdict = "wins" if theirs.median < ours.median else "loses"
            console.print(
                f"  {source}, {metric}: {name} on {len(nearer)} of {ours.rows} rows; by the median "
                f"it {verdict} ({theirs.median:.2%}, ours {ours.median:.2%})",
                soft_wrap=True,
            )
    if not any_row:
        console.print("  nowhere")


def _gpus(item: Graded) -> int:
    return item.run.spec.gpus if item.run.spec else 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("xmem", "fms", "public"), help="one file, not all")
    parser.add_argument("--part", choices=("1", "2"), help="only one of the two questions")
    parser.add_argument("--csv", nargs="?", type=Path, const=results.RESULTS, metavar="FILE",
                        help="also write every row (default results/compare.csv)")  # fmt: skip
    given = parser.parse_args(arguments)
    if given.csv and given.part == "1":
        parser.error("--csv writes the rows of both parts; leave out --part 1")
    console = Console(highlight=False, width=160)
    files = [DATA / name for name in FILES if not given.only or name.startswith(given.only)]
    if given.part == "1":
        graded, _ = grade(read(DATA / FILES[0]))
        xmem_part(graded, console)
        return
    report = validate_published(files, baselines=BASELINES)
    if given.csv:
        results.write(report, given.csv)
    xmem = [item for item in report.graded if item.run.source == "xMem"]
    if xmem and given.part != "2":
        xmem_part(xmem, console)
    side_by_side(report, console)
    print_reasons(report.reasons().items(), console)


if __name__ == "__main__":
    main()
