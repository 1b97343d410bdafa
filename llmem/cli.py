"""The command line: parses and prints, computes nothing.

Everything heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from llmem import __version__
from llmem.errors import LlmemError
from llmem.options import run_options, spec_fields, split_names
from llmem.usage import SentenceGroup

json_option = click.option(
    "--json", "json_out", metavar="PATH|-", help="Write JSON; '-' prints it and nothing else."
)


@click.group("llmem", cls=SentenceGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmem")
def main() -> None:
    """How much memory every GPU of an LLM fine-tuning run will use, before it is started."""


@main.command()
@click.argument("model")
@run_options
@json_option
@click.option("--html", "html_out", metavar="PATH", help="Write a page with the timeline.")
@click.option("--snapshot", metavar="PATH", help="Write a pickle for pytorch.org/memory_viz.")
@click.option("--explain", is_flag=True, help="List the largest storages alive at the peak.")
@click.option("--top", type=click.IntRange(1), help="How many --explain lists; default: 12.")
def estimate(model: str, **options: Any) -> None:
    """Predict the memory of one run: peak, when, and because of what.

    MODEL is a preset (see `llmem models`), a Hub id, a folder or a config.json.
    """
    if options["top"] is not None and not options["explain"]:
        raise LlmemError("--top says how many --explain lists; add --explain")
    fields = spec_fields(model, options)
    from llmem.progress import working

    with working(f"Tracing {model}", quiet=options["json_out"] == "-"):
        from llmem.estimate import estimate as run

        result = run(**fields)
    if options["html_out"]:
        from llmem.report.html import write_page

        write_page(result, Path(options["html_out"]))
    if options["snapshot"]:
        from llmem.interop.snapshot import write_memory_viz

        write_memory_viz(result, Path(options["snapshot"]))
    document = result.to_json()
    if options["explain"]:
        from llmem.explain import largest_at_peak

        held = largest_at_peak(result.worst, options["top"] or 12)
        document["explain"] = [item.to_json() for item in held]
    if _write_json(document, options["json_out"]):
        return
    from llmem.report.text import print_estimate, print_explanation

    print_estimate(result)
    if options["explain"]:
        print_explanation(held)


def _only_training(fields: dict[str, Any]) -> None:
    if fields.get("task") == "generate":
        raise LlmemError("--task generate is known to llmem estimate alone; leave it out here")


@main.command()
@click.argument("model")
@run_options
@click.option("--strategies", metavar="A,B", help="Only these; default: all that apply.")
@click.option("--algorithm", type=click.Choice(["largest", "llmem"]), default="largest",
              help="llmem: the paper's Algorithm 1 over its four methods.")
@click.option("--by", type=click.Choice(["paper", "trace"]),
              help="Of --algorithm llmem: the paper's equations (default), or our own estimates.")
@json_option
def plan(model: str, **options: Any) -> None:
    """Which strategies fit, the largest batch of each, and the pick."""
    _check_plan(options)
    names = split_names(options["strategies"])
    if names is None and options["strategy"] is not None:
        names = (options["strategy"],)
    from llmem.plan import ORDER

    if options["algorithm"] == "llmem":
        _plan_llmem(spec_fields(model, options, trying=("gemini",)), options)
        return
    fields = _without_batch(spec_fields(model, options, trying=names or ORDER))
    _only_training(fields)
    from llmem.progress import working

    with working(f"Planning {model}", quiet=options["json_out"] == "-"):
        from llmem.plan import plan as run
        from llmem.spec import make_spec

        result = run(make_spec(**fields), strategies=names)
    if _write_json(result.to_json(), options["json_out"]):
        return
    from llmem.report.text import print_plan

    print_plan(result)


def _check_plan(options: dict[str, Any]) -> None:
    """Raises LlmemError for options that say what a plan is to find, or contradict each other."""
    if options["strategies"] is not None and options["strategy"] is not None:
        raise LlmemError("--strategy and --strategies exclude each other; give one of them")
    if options["algorithm"] != "llmem":
        if options["by"] is not None:
            raise LlmemError("--by is of LLMem's own plan; add --algorithm llmem")
        return
    if options["per_device_train_batch_size"] is not None:
        raise LlmemError("--algorithm llmem finds the batch sizes itself; leave -b out")
    for name in ("strategy", "strategies", "tp", "tp_plan"):
        if options[name] is not None:
            raise LlmemError(
                f"--algorithm llmem chooses among its own four methods; leave --"
                f"{name.replace('_', '-')} out"
            )


def _without_batch(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` less the batch size, which a plan finds; one that was given is named."""
    given = fields.pop("per_device_train_batch_size", None)
    if given is not None:
        note = f"batch size {given} as given is not used: a plan finds the largest"
        fields["notes"] = (*fields.get("notes", ()), note)
    return fields


def _plan_llmem(fields: dict[str, Any], options: dict[str, Any]) -> None:
    from llmem.progress import working

    with working(f"Planning {fields['model']} as LLMem", quiet=options["json_out"] == "-"):
        from llmem.plan_llmem import plan_llmem
        from llmem.spec import make_spec

        result = plan_llmem(make_spec(**fields), by=options["by"] or "paper")
    if _write_json(result.to_json(), options["json_out"]):
        return
    from llmem.report.plan_llmem import print_llmem_plan

    print_llmem_plan(result)


@main.command()
@click.argument("model")
@run_options
@click.option("--baselines", metavar="A,B", help="Only these; default: all.")
@click.option("--base-bytes", type=click.IntRange(0), help="Measured bytes before the model (context, NCCL).")
@click.option("--measured", type=click.IntRange(1), metavar="BYTES", help="The true figure, to show errors.")
@json_option
def compare(model: str, **options: Any) -> None:
    """This estimator and every baseline, side by side."""
    fields = spec_fields(model, options)
    _only_training(fields)
    from llmem.progress import working

    with working(f"Estimating {model} by every method", quiet=options["json_out"] == "-"):
        from llmem.baselines.base import NAMES
        from llmem.compare import compare as run
        from llmem.spec import make_spec

        names = split_names(options["baselines"]) or NAMES
        document = run(
            make_spec(**fields),
            names=names,
            base_bytes=options["base_bytes"],
            measured=options["measured"],
        )
    if _write_json(document, options["json_out"]):
        return
    from llmem.report.text import print_comparison

    print_comparison(document)


@main.command()
@click.argument("model")
@run_options
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True)
@click.option("--fake-world", type=click.IntRange(2), help="Be rank 0 of so many on one GPU.")
@click.option("--history", is_flag=True, help="Also write the allocation history beside --out.")
@click.option("--out", metavar="RECORD", type=click.Path(path_type=Path), help="Record to write.")
@json_option
def measure(model: str, **options: Any) -> None:
    """Run it for real (torchrun inside) and write a record.

    On cpu the processes talk over gloo and live bytes are recorded; on cuda what torch and NVML
    count.
    """
    steps = options.pop("steps")  # of the run, not RunSpec's, which are traced
    fields = spec_fields(model, options)
    _only_training(fields)
    from llmem.progress import working

    with working(f"Training {model} for real", quiet=options["json_out"] == "-"):
        from llmem.measure import measure as run
        from llmem.spec import make_spec

        record = run(
            make_spec(**fields),
            device=options["device"],
            out=options["out"],
            steps=steps,
            fake_world=options["fake_world"],
            history=options["history"],
        )
    if _write_json(record, options["json_out"]):
        return
    from llmem.report.text import print_record

    print_record(record)


@main.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--boundaries", is_flag=True, help="Also at each block's boundaries (CPU records).")
@click.option("--baselines", metavar="A,B", help="Put these beside it (CSV files).")
@json_option
def validate(
    records: tuple[Path, ...], boundaries: bool, baselines: str | None, json_out: str | None
) -> None:
    """Predicted against measured: the error table of records, or of a CSV of published runs.

    RECORD is what `llmem measure` wrote, or a CSV whose columns are known (see
    llmem.measure.published.files): then errors by source and metric, and the rows left out with why.
    """
    published = any(path.suffix == ".csv" for path in records)
    if boundaries and published:
        raise LlmemError("--boundaries is of records that were measured on a CPU; leave it out for a CSV")
    if baselines is not None and not published:
        raise LlmemError("--baselines is of CSV files; for one run use `llmem compare --baselines`")
    if published:
        _validate_published(records, baselines, json_out)
        return
    from llmem.progress import working

    results: dict[str, list[Any]] = {}
    with working("Predicting what was measured", quiet=json_out == "-"):
        from llmem.measure import validate as run
        from llmem.measure.launch import read_record

        for path in records:
            results[path.name] = run(read_record(path), boundaries=boundaries)
    rows = [{"record": name, **row.to_json()} for name, found in results.items() for row in found]
    if _write_json({"rows": rows}, json_out):
        return
    from llmem.report.text import print_validation

    print_validation(results)


def _validate_published(
    files: tuple[Path, ...], baselines: str | None, json_out: str | None
) -> None:
    from llmem.progress import working

    with working("Predicting published runs", quiet=json_out == "-"):
        from llmem.measure.published.grading import validate_published

        report = validate_published(files, baselines=split_names(baselines) or ())
    if _write_json(report.to_json(), json_out):
        return
    from llmem.report.published import print_published

    print_published(report)


@main.command()
@json_option
def models(json_out: str | None) -> None:
    """Models known by name."""
    from llmem.models.presets import list_presets

    presets = list_presets()
    document = [
        {"name": p.name, "hub_id": p.hub_id, "parameters": p.parameters or p.parameters_rounded}
        for p in presets
    ]
    if _write_json(document, json_out):
        return
    for entry in document:
        count = entry["parameters"]
        size = f"{count:,}" if isinstance(count, int) else str(count)
        click.echo(f"{entry['name']:32} {size:>15}  {entry['hub_id']}")


@main.command()
@json_option
def gpus(json_out: str | None) -> None:
    """GPUs known by name: capacity and what sits outside the allocator."""
    from llmem.gpu.devices import list_devices

    devices = [d for d in list_devices() if d.is_cuda]
    document = [
        {
            "name": d.name,
            "capacity": d.capacity,
            "compute_capability": ".".join(map(str, d.compute_capability)),
            "context": d.context.value,
            "library_handles": d.handles.value,
        }
        for d in devices
    ]
    if _write_json(document, json_out):
        return
    click.echo(f"{'name':18} {'capacity':>12} {'sm':>5} {'context':>9} {'libraries':>10}")
    for d in devices:
        major, minor = d.compute_capability
        click.echo(
            f"{d.name:18} {d.capacity / 2**30:8.2f} GiB {major}.{minor:<3} "
            f"{d.context.value / 2**20:5.0f} MiB {d.handles.value / 2**20:6.0f} MiB"
        )


@main.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--alloc-conf", metavar="CONF", help="What PYTORCH_ALLOC_CONF was set to.")
@json_option
def replay(log: Path, alloc_conf: str | None, json_out: str | None) -> None:
    """Run a CUDA allocator history through the allocator model.

    LOG is an event CSV (may be .gz) or a torch memory snapshot pickle.
    """
    from llmem.gpu.alloc_conf import AllocConf
    from llmem.gpu.replay import replay_log

    conf = AllocConf.parse(alloc_conf) if alloc_conf else None
    report = replay_log(log, conf)
    if _write_json(report.to_json(), json_out):
        return
    from llmem.report.text import print_replay

    print_replay(report)


def _write_json(document: Any, where: str | None) -> bool:
    """Write ``document``; True if it went to standard output, which then holds nothing else."""
    if where is None:
        return False
    text = json.dumps(document, indent=2)
    if where == "-":
        click.echo(text)
        return True
    try:
        Path(where).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise LlmemError(f"cannot write {where}: {error.strerror}; choose another --json") from None
    return False


if __name__ == "__main__":
    sys.exit(main())
