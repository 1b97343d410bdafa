"""Start a measured run: one process per rank under torchrun, then gather their records."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from llmem.errors import LlmemError
from llmem.spec import RunSpec

SCHEMA = "llmem.record/1"
SMALL = 200_000
"""Bytes above which a record's file is gzipped, if its name leaves that open."""


def measure(
    spec: RunSpec,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    out: Path | str | None = None,
    steps: int = 3,
    fake_world: int | None = None,
    history: bool = False,
    timeout_s: float = 900,
) -> dict[str, Any]:
    """Train ``steps`` steps of ``spec`` for real on ``spec.gpus`` processes and record each rank.

    On ``cpu`` the processes talk over gloo and the record holds the live bytes of torch's CPU
    allocator: peaks by step and phase, and at each block's boundaries. On ``cuda`` it holds
    ``max_memory_allocated`` and ``max_memory_reserved`` of each step and what NVML shows.
    ``fake_world``: one process that sees itself as rank 0 of that many, with collectives that move
    nothing. ``history`` also writes each rank's full allocation history beside ``out``.

    Returns the record, written to ``out`` (JSON, gzip for ``.gz``): ``spec`` (the fields that
    differ from RunSpec's defaults), ``versions``, and ``ranks``. Each rank has ``steps`` in bytes:
    on cpu ``peak``, ``end`` and ``phases``, on cuda ``allocated``, ``reserved``, ``end`` and
    ``device_used``. On cpu also ``peak`` (over all steps), ``setup_peak``, ``boundaries`` ([step,
    phase, block, edge, live bytes] of the first and the last step), ``at_peak``, and ``left_out``
    (bytes not counted, by reason).
    Raises LlmemError if the device is missing, the model cannot travel to other processes, or a
    process fails.
    """
    _check(spec, device, steps, fake_world, history, out)
    where = None if out is None else Path(out)
    stem = _history_stem(where) if history and where else None
    [record] = measure_all(
        [spec],
        device=device,
        steps=steps,
        fake_world=fake_world,
        history=stem,
        timeout_s=timeout_s,
    )
    if where is not None:
        write_record(record, where)
    return record


def measure_all(
    specs: Sequence[RunSpec],
    *,
    device: str = "cpu",
    steps: int = 3,
    fake_world: int | None = None,
    history: Path | None = None,
    timeout_s: float = 900,
) -> list[dict[str, Any]]:
    """``measure`` for several specs with the same number of processes, started once."""
    if fake_world is not None:
        specs = [spec.model_copy(update={"gpus": fake_world}) for spec in specs]
    [gpus] = {spec.gpus for spec in specs}
    processes = 1 if fake_world is not None else gpus
    with tempfile.TemporaryDirectory(prefix="llmem-measure-") as folder:
        job: dict[str, Any] = {
            "specs": [spec_json(spec) for spec in specs],
            "device": device,
            "steps": steps,
            "fake_world": fake_world,
            "history": str(history or ""),
            "folder": folder,
        }
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        _run(path, processes, device, timeout_s)
        return [
            _record(
                {"device": device, "spec": fields, "steps": steps, "fake_world": fake_world},
                [Path(folder) / f"run{number}.rank{rank}.json" for rank in range(processes)],
            )
            for number, fields in enumerate(job["specs"])
        ]


def _record(head: dict[str, Any], rank_files: list[Path]) -> dict[str, Any]:
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in rank_files]
    [notes, *_] = [rank.pop("notes") for rank in ranks]
    return {"schema": SCHEMA, **head, "versions": _versions(), "notes": notes, "ranks": ranks}


def spec_json(spec: RunSpec) -> dict[str, Any]:
    """The fields of ``spec`` that differ from their defaults, as JSON can hold them."""
    if not isinstance(spec.model, (str, dict, os.PathLike)):
        raise LlmemError(
            "a module in memory cannot be sent to the measuring processes; give a preset, a path "
            "or a configuration"
        )
    fields = spec.model_dump(exclude_defaults=True)
    fields["model"] = spec.model if isinstance(spec.model, dict) else os.fspath(spec.model)
    return fields


def write_record(record: dict[str, Any], path: Path) -> Path:
    """Write a record as JSON; gzip if ``path`` ends in ``.gz`` or the text is large.

    Returns where it went: a large record's name gets ``.gz`` appended.
    """
    text = _compact(record)
    if path.suffix != ".gz" and len(text) > SMALL:
        path = path.with_name(path.name + ".gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            # No time stamp, so that equal records are equal files.
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LlmemError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    return path


def read_record(path: Path | str) -> dict[str, Any]:
    """A record from its file. Raises LlmemError if it is none."""
    path = Path(path)
    try:
        data = path.read_bytes()
        record = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise LlmemError(
            f"{path} cannot be read as a record: {said}; give what `llmem measure --out` wrote"
        ) from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise LlmemError(f"{path} is no record of `llmem measure`; its schema is not {SCHEMA}")
    if lacking := sorted({"spec", "ranks"} - record.keys()):
        raise LlmemError(f"{path} has no {' and no '.join(lacking)}; measure the run again")
    return record


def _compact(record: dict[str, Any]) -> str:
    """JSON with one line per rank and key: small, and readable in a diff."""
    lines = []
    for key, value in record.items():
        if key == "ranks":
            ranks = ",\n".join("  " + json.dumps(rank, separators=(",", ":")) for rank in value)
            lines.append(f' "ranks": [\n{ranks}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _check(
    spec: RunSpec, device: str, steps: int, fake_world: int | None, history: bool, out: Any
) -> None:
    if steps < 1:
        raise LlmemError(f"--steps {steps} measures nothing; give at least 1")
    if fake_world is not None and fake_world < 1:
        raise LlmemError(f"--fake-world {fake_world} is no number of ranks; give at least 1")
    if fake_world is not None and device == "cpu" and spec.strategy == "ddp":
        raise LlmemError("torch's fake process group runs no DDP on a CPU; give --gpus in place of --fake-world")
    if history and out is None:
        raise LlmemError("an allocation history needs a place: give --out as well")
    if device not in ("cpu", "cuda"):
        raise LlmemError(f"--device {device} is not known; use cpu or cuda")
    if device == "cuda":
        _check_cuda(1 if fake_world is not None else spec.gpus)


def _check_cuda(processes: int) -> None:
    import torch

    if not torch.cuda.is_available():
        raise LlmemError(
            f"torch {torch.__version__} sees no CUDA device here; use --device cpu, or run where "
            "there is a GPU"
        )
    there = torch.cuda.device_count()
    if there < processes:
        raise LlmemError(
            f"{processes} processes need {processes} GPUs and {there} are here; use --fake-world "
            f"{processes} to see rank 0 of {processes} on one GPU"
        )


def _history_stem(out: Path) -> Path:
    return out.with_name(out.name.removesuffix(".gz").removesuffix(".json") + ".history").resolve()


def _run(job: Path, processes: int, device: str, timeout_s: float) -> None:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    command += ["-m", "llmem.measure.worker", str(job)]
    try:
        done = subprocess.run(
            command,
            env=_environment(device),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LlmemError(f"the run took longer than {timeout_s:g} s and was ended") from None
    if done.returncode:
        raise LlmemError(failure(job.parent, done.stderr))


def _environment(device: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        # One thread per process: ranks share the cores, and kernels' scratch depends on threads.
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def failure(folder: Path, stderr: str) -> str:
    """One sentence about why a process ended: its own if it left one, else its first error."""
    for path in sorted(folder.glob("error*.txt")):
        return path.read_text(encoding="utf-8")
    errors = [line for line in stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
    reason = errors[0].strip() if errors else (stderr.strip().splitlines() or ["no message"])[-1]
    return f"a process of the measured run failed: {reason}"


def _versions() -> dict[str, str]:
    from llmem.estimate import versions

    return versions()
