"""``llmem measure`` and ``llmem validate``: parse and print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from llmem.errors import LlmemError
from llmem.options import run_options, spec_fields


@click.command()
@click.argument("model")
@run_options
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="RECORD")
@click.option("--steps", type=int, default=3, show_default=True, help="Optimizer steps to train.")
@click.option("--fake-world", type=int, metavar="N", help="One process as rank 0 of N.")
@click.option("--history", is_flag=True, help="Write each rank's allocation history beside --out.")
@click.option("--timeout", type=float, default=900, show_default=True, help="Seconds.")
@click.option("--json", "json_out", metavar="PATH|-", help="Where the record goes; '-' prints it.")
def measure(model: str, json_out: str | None, out: Path | None, **options: Any) -> None:
    """Train a few steps for real and write down what every rank allocated.

    On cpu the processes talk over gloo. MODEL is what `llmem estimate` takes.
    """
    run = {name: options.pop(name) for name in ("device", "steps", "fake_world", "history")}
    timeout = options.pop("timeout")
    fields = spec_fields(model, options)
    from llmem.measure import measure as measure_run
    from llmem.progress import working
    from llmem.spec import make_spec

    target = Path(json_out) if out is None and json_out not in (None, "-") else out
    with working(f"Training {model}", quiet=json_out == "-"):
        record = measure_run(make_spec(**fields), out=target, timeout_s=timeout, **run)
    if json_out == "-":
        click.echo(json.dumps(record))
        return
    for rank in record["ranks"]:
        click.echo(f"rank {rank['rank']}: {_summary(rank)}")
    if target is not None:
        click.echo(f"record: {target}; compare it with `llmem validate {target}`")


@click.command()
@click.argument("records", nargs=-1, required=True, metavar="RECORD...")
@click.option("--boundaries", is_flag=True, help="Also at each block's boundaries (cpu).")
@click.option("--json", "json_out", metavar="PATH|-", help="Write JSON; '-' prints it.")
def validate(records: tuple[str, ...], boundaries: bool, json_out: str | None) -> None:
    """Predicted against measured: one line per rank and metric of each RECORD."""
    from llmem.measure import validate as compare
    from llmem.measure.launch import read_record

    document: list[dict[str, Any]] = []
    for path in records:
        rows = compare(read_record(path), boundaries=boundaries)
        document.append({"record": path, "rows": [row.to_json() for row in rows]})
    text = json.dumps({"schema": "llmem.validation/1", "records": document}, indent=2)
    if json_out == "-":
        click.echo(text)
        return
    if json_out is not None:
        try:
            Path(json_out).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise LlmemError(f"cannot write {json_out}: {error.strerror}; choose another") from None
    for found in document:
        click.echo(found["record"])
        for row in found["rows"]:
            click.echo(
                f"  rank {row['rank']}  {row['metric']:28} measured {row['measured']:>16,}  "
                f"predicted {row['predicted']:>16,}  {row['error']:+9.3%}"
            )


def _summary(rank: dict[str, Any]) -> str:
    """A rank's peaks in MiB (powers of two)."""
    mib = 2**20
    if "peak" in rank:
        steps = ", ".join(f"{step['peak'] / mib:,.2f}" for step in rank["steps"])
        return f"peak of live bytes by step: {steps} MiB"
    allocated = ", ".join(f"{step['allocated'] / mib:,.1f}" for step in rank["steps"])
    reserved = ", ".join(f"{step['reserved'] / mib:,.1f}" for step in rank["steps"])
    return f"allocated {allocated} MiB; reserved {reserved} MiB by step on {rank['gpu']}"
