"""The error table of published runs, as text."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmem.measure.published.grading import ErrorSummary, Report, summary_of

COLUMNS = ("rows", "median", "mean", "largest", "too low", "safe margin")
"""``too low``: share of under-estimates; ``safe margin``: what would have made every row safe."""


def table_of(*first: str) -> Table:
    """A table with left-aligned columns ``first``, then those of `cells`."""
    table = Table(box=None, pad_edge=False)
    for name in (*first, *COLUMNS):
        table.add_column(name, justify="left" if name in first else "right", overflow="fold")
    return table


def cells(found: ErrorSummary) -> tuple[str, ...]:
    """The columns of a summary."""
    return (
        str(found.rows), f"{found.median:.2%}", f"{found.mean:.2%}", f"{found.largest:.2%}",
        f"{found.under:.0%}", f"+{found.margin:.2%}",
    )  # fmt: skip


def print_published(report: Report, console: Console | None = None) -> None:
    """Errors by source and metric, baselines under each; by method; and the rows left out."""
    console = console or Console(highlight=False)
    if report.graded:
        table = table_of("source", "metric", "estimator")
        groups = [*report.groups().items()]
        everything = [index for _, indices in groups for index in indices]
        if len(groups) > 1:
            groups.append((("all", "all"), everything))
        for (source, metric), indices in groups:
            pairs = [(report.graded[i].predicted, report.graded[i].run.measured) for i in indices]
            table.add_row(source, metric, "llmem", *cells(summary_of(pairs)))
            for name, (theirs, ours) in report.beside(indices).items():
                wins = " (wins)" if theirs.median < ours.median else ""
                table.add_row("", "", name + wins, *cells(theirs))
        console.print(table)
    by_method = report.methods()
    if by_method:
        table = table_of("source", "method", "metric")
        for (source, method, metric), indices in by_method.items():
            pairs = [(report.graded[i].predicted, report.graded[i].run.measured) for i in indices]
            table.add_row(source, method, metric, *cells(summary_of(pairs)))
        console.print()
        console.print(table)
    print_reasons(report.reasons().items(), console)


def print_reasons(reasons: Iterable[tuple[tuple[str, str], int]], console: Console) -> None:
    """Rows that are not expressed, most frequent reasons first."""
    listed = sorted(reasons, key=lambda item: -item[1])
    if listed:
        console.print(f"\nnot expressed: {sum(count for _, count in listed)} rows")
    for (source, why), count in listed:
        console.print(f"  {count:4} {escape(source)}: {escape(why)}", soft_wrap=True)
