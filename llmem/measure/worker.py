"""One process of a measured run: ``python -m llmem.measure.worker JOB.json`` under torchrun.

Writes ``run<I>.rank<R>.json`` for each RunSpec of the job into the job's folder, or
``error<R>.txt`` with one sentence.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError


def main(path: str) -> int:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    rank = int(os.environ.get("RANK", "0"))
    try:
        start_process_group(job["device"], job["fake_world"])
        for number, fields in enumerate(job["specs"]):
            record = json.dumps(run(fields, job))
            (folder / f"run{number}.rank{rank}.json").write_text(record, encoding="utf-8")
        stop_process_group()
    except LlmemError as error:
        (folder / f"error{rank}.txt").write_text(str(error), encoding="utf-8")
        return 2
    return 0


def run(fields: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Build a RunSpec under its engine, train the job's steps; returns the rank's record."""
    import torch.distributed as dist

    from llmem.measure.engines import build
    from llmem.measure.marks import StepMarks
    from llmem.spec import make_spec
    from llmem.trace.as_transformers import behave_like
    from llmem.trace.run import frees_by_reference_count, quiet

    recorder = recorder_of(job)
    spec = make_spec(**fields)
    with quiet(), without_onednn(), behave_like(spec.as_transformers, lambda _: None):
        recorder.start()
        wrapped = build(spec, job["device"])
        marks = StepMarks()
        wrapped.watch(marks)
        marks.watch_units(wrapped.blocks)
        with frees_by_reference_count():
            recorder.before_steps(wrapped)
            for _ in range(job["steps"]):
                wrapped.step()
                if spec.compile:
                    gc.collect()  # a frame that Dynamo gave up is held, tensors and all, in cycles
                recorder.after_step()
            record: dict[str, Any] = recorder.finish()
    del wrapped
    gc.collect()
    dist.barrier()
    return {"rank": dist.get_rank(), **record}


@contextmanager
def without_onednn() -> Iterator[None]:
    """Multiply bf16 matrices on CPU without oneDNN, whose packed copies no GPU kernel makes."""
    import torch

    with torch.backends.mkldnn.flags(enabled=False):
        yield


def start_process_group(device: str, fake_world: int | None) -> None:
    """nccl on GPUs, gloo on copies on CPU, or rank 0 of ``fake_world`` in this one process."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if fake_world is not None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=fake_world, store=FakeStore())
        return
    from torch._C._distributed_c10d import HashStore

    from llmem.measure.gloo import register

    backend = "nccl" if device == "cuda" else register()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())


def stop_process_group() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def recorder_of(job: dict[str, Any]) -> Any:
    """The recorder of the job's device."""
    history = Path(job["history"]) if job["history"] else None
    if job["device"] == "cuda":
        from llmem.measure.cuda_record import CudaRecorder, cuda_counters

        return CudaRecorder(cuda_counters(), history)
    from llmem.measure.cpu_record import CpuRecorder

    return CpuRecorder(history)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
