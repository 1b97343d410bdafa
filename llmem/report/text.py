"""Print an estimate in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmem.estimate import Estimate, Levels, Rank
from llmem.explain import Held
from llmem.lifetimes import Phase
from llmem.report.ranks import spans, whose

GIB = 2**30
MIB = 2**20


def size(nbytes: int) -> str:
    """Bytes for people: GiB from one GiB on, KiB below a tenth of a MiB, powers of two.

    >>> size(3 * 2**30), size(5 * 2**20), size(512)
    ('3.00 GiB', '5.0 MiB', '0.5 KiB')
    """
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:,.2f} GiB"
    return f"{nbytes / MIB:,.1f} MiB" if 10 * abs(nbytes) >= MIB else f"{nbytes / 1024:,.1f} KiB"


def print_estimate(result: Estimate, console: Console | None = None) -> None:
    """The whole report: levels, place, breakdown, steps, timeline, assumptions, fit."""
    console = console or Console(highlight=False)
    worst = result.worst
    console.print(_headline(result), soft_wrap=True)
    console.print(_levels_table(worst))
    console.print(_place(worst))
    console.print(_breakdown_table(worst))
    if len(result.ranks) > 1:
        console.print()
        console.print(_ranks_table(result))
    console.print(_outside(result))
    _draw(worst, console)
    print_assumptions(result.assumptions, console)
    low, high = result.interval
    console.print(f"\nnvidia-smi between {size(low)} and {size(high)}")
    if result.fit is not None:
        colour = "green" if result.fit.fits else "red"
        console.print(f"[bold {colour}]{escape(result.fit.sentence)}[/bold {colour}]")
    else:
        console.print("Give --gpu NAME to hear whether it fits.")


def print_assumptions(notes: Sequence[str], console: Console) -> None:
    """One note a line; what does not fit its line goes on below its own first word."""
    console.print("[bold]Assumed[/bold]")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3)
    table.add_column(overflow="fold")
    for note in notes:
        table.add_row("  ·", escape(note))
    console.print(table)


def _headline(result: Estimate) -> str:
    spec = result.spec
    who = f", {whose(result)}" if spec.gpus > 1 else ""
    return (
        f"\n[bold]{escape(str(spec.model))}[/bold]  {spec.method}, batch "
        f"{spec.per_device_train_batch_size} x {spec.seq_length} tokens{who}"
    )


def _levels_table(rank: Rank) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("peak")
    for name in ("first step", "steady state", "overall"):
        table.add_column(name, justify="right")
    table.add_column("what it is")
    meanings = {
        "requested": "bytes the ops asked for",
        "allocated": "torch.cuda.max_memory_allocated",
        "reserved": "torch.cuda.max_memory_reserved",
        "device": "nvidia-smi",
    }
    for level, meaning in meanings.items():
        values = (getattr(item, level) for item in (rank.first, rank.steady, rank.peak))
        table.add_row(level, *(size(value) for value in values), f"[dim]{meaning}[/dim]")
    return table


def _place(rank: Rank) -> str:
    at = rank.peak_at
    where = f" of {at.module}" if at.module else ""
    step = "first step" if at.step == 0 else f"step {at.step + 1}"
    return escape(f"\nPeak in {at.phase}{where}, op {at.op or 'none'}, {step}\n")


def _breakdown_table(rank: Rank) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("at the peak")
    table.add_column("allocated", justify="right")
    table.add_column("share", justify="right")
    total = max(rank.peak.allocated, 1)
    for name, nbytes in rank.breakdown.items():
        if nbytes:
            table.add_row(LABELS.get(name, name), size(nbytes), f"{nbytes / total:.1%}")
    table.add_row("[bold]total[/bold]", f"[bold]{size(rank.peak.allocated)}[/bold]", "")
    return table


LABELS = {
    "optimizer_states": "optimizer states",
    "activations": "activations (body)",
    "logits_and_loss": "LM head: logits, loss",
    "other": "other (inputs, buffers, optimizer temporaries)",
}


def _ranks_table(result: Estimate) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", no_wrap=True)
    for level in vars(result.worst.peak):
        table.add_column(level, justify="right")
    table.add_column("peak in")
    for rank in result.ranks:
        levels: Levels = rank.peak
        table.add_row(
            spans(rank.table.ranks),
            *(size(value) for value in vars(levels).values()),
            escape(f"{rank.peak_at.phase} {rank.peak_at.module}".strip()),
        )
    return table


def _outside(result: Estimate) -> str:
    parts = [f"{name.replace('_', ' ')} {size(n)}" for name, n in result.outside.items() if n]
    return f"\nOutside the allocator: {', '.join(parts)}" if parts else ""


def _draw(rank: Rank, console: Console, height: int = 14) -> None:
    """Allocated and reserved bytes over the events of the last two steps."""
    import plotext

    start = rank.timeline.span(rank.table.trace.step_ticks[0], 2**62)[0]
    width = min(console.width, 110)
    points = 2 * width
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    curves = {"reserved": "dot", "allocated": "braille"}
    for name, marker in curves.items():
        curve = _squeeze(getattr(rank.timeline, name)[start:], points)
        plotext.plot(list(curve / GIB), label=name, marker=marker)
    plotext.xticks(*_phase_ticks(rank, start, points))
    plotext.ylim(0, None)
    plotext.title("GiB over the first and the following step")
    console.print(plotext.uncolorize(plotext.build()), markup=False, soft_wrap=True)


def _squeeze(curve: Any, points: int) -> Any:
    """The maximum of each of ``points`` equal stretches, so that no peak is lost."""
    if len(curve) <= points:
        return curve
    edges = np.linspace(0, len(curve), points + 1).astype(int)
    return np.maximum.reduceat(curve, edges[:-1])


def _phase_ticks(rank: Rank, start: int, points: int) -> tuple[list[float], list[str]]:
    total = len(rank.timeline.events) - start
    scale = min(points, total) / max(total, 1)
    shown = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
    ticks, labels = [], []
    for tick, phase, _ in rank.table.trace.phase_ticks:
        if phase in shown:
            ticks.append((rank.timeline.span(tick, tick)[0] - start) * scale)
            labels.append(shown[phase])
    return ticks, labels


def print_explanation(held: list[Held], console: Console | None = None) -> None:
    """The largest storages alive at the peak."""
    console = console or Console(highlight=False)
    console.print("\n[bold]Largest storages alive at the peak[/bold]")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in held:
        of = f"{item.module}, " if item.module else ""
        table.add_row(
            size(item.nbytes),
            item.kind.replace("_", " "),
            escape(
                f"{of}made by: {item.made_by}\nkept for: {item.waits_for}; freed by: {item.freed_by}"
            ),
        )
    console.print(table)


def print_plan(result: Any, console: Console | None = None) -> None:
    """The largest batch of each strategy, and the pick."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("strategy", "largest batch per GPU", "on the device", ""):
        table.add_column(name, justify="right" if "batch" in name or "device" in name else "left")
    for option in result.options:
        used = "" if option.device_bytes is None else size(option.device_bytes)
        table.add_row(
            option.strategy, str(option.batch or "none"), used, escape(option.sentence)
        )
    console.print(table)
    if result.pick is None:
        console.print("[bold red]nothing fits[/bold red]")
    else:
        batches = result.spec.batches
        console.print(
            f"[bold green]take {result.pick.strategy}, batch {result.pick.batch} per GPU, "
            f"{result.pick.batch * batches} sequences per step[/bold green]"
        )
    if result.assumptions:
        console.print()
        print_assumptions(result.assumptions, console)


def print_record(record: dict[str, Any], console: Console | None = None) -> None:
    """What each rank reached in each step of a measured run."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", "what", "peak"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for rank in record["ranks"]:
        for step in rank["steps"]:
            for name in ("peak", "allocated", "reserved"):
                if name in step:
                    what = "live bytes" if name == "peak" else name
                    table.add_row(str(rank["rank"]), str(step["step"]), what, size(step[name]))
    console.print(table)


def print_validation(results: dict[str, list[Any]], console: Console | None = None) -> None:
    """The worst rank of each metric of each record, and the errors of all peaks."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("record", "metric", "rank", "measured", "predicted", "error"):
        left = name in ("record", "metric")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    peaks: list[float] = []
    for record, rows in results.items():
        peaks += [abs(row.error) for row in rows if row.metric.startswith("peak")]
        for metric in dict.fromkeys(row.metric for row in rows):
            worst = max((r for r in rows if r.metric == metric), key=lambda r: abs(r.error))
            table.add_row(
                record, metric, str(worst.rank), f"{worst.measured:,}", f"{worst.predicted:,}",
                f"{worst.error:+.3%}",
            )  # fmt: skip
    console.print(table)
    console.print(
        f"{len(results)} record{'s' * (len(results) != 1)}, {len(peaks)} peaks: median error {np.median(peaks):.4%}, "
        f"largest {max(peaks):.4%}, within 0.1%: {np.mean(np.array(peaks) <= 0.001):.0%}"
    )


def print_comparison(document: dict[str, Any], console: Console | None = None) -> None:
    """One line per estimator: bytes, error against the measured figure, seconds, what it lacks."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    measured = document["measured"]
    against = ("error",) if measured else ()
    for name in ("estimator", "bytes", *against, "seconds", "leaves out, or why it cannot say"):
        table.add_column(name, justify="right" if name in ("bytes", "error", "seconds") else "left")
    for name, entry in document["estimates"].items():
        nbytes = entry["bytes"]
        error = "" if nbytes is None or not measured else f"{nbytes / measured - 1:+.1%}"
        table.add_row(
            name,
            "" if nbytes is None else size(nbytes),
            *((error,) if measured else ()),
            f"{entry['seconds']:.2f}",
            escape(entry["why_not"] or "; ".join(entry["leaves_out"])),
        )
    console.print(table)
    if measured:
        console.print(f"measured: {size(measured)}")


def print_replay(report: Any, console: Console | None = None) -> None:
    """Real against replayed, and the first difference."""
    console = console or Console(highlight=False)
    document = report.to_json()
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("real", justify="right")
    table.add_column("replayed", justify="right")
    for name, unit in (("reserved", size), ("allocated_peak", size), ("segments", str)):
        real, replayed = document[f"{name}_real"], document[f"{name}_replayed"]
        table.add_row(name.replace("_", " "), unit(real), unit(replayed))
    console.print(table)
    difference = document["first_difference"]
    console.print(
        "no difference" if difference is None else escape(f"first difference: {difference}")
    )
    for note in document.get("notes", []):
        console.print(f"  · {escape(str(note))}")
