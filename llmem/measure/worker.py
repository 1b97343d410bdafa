"""One process of a measured run: ``python -m llmem.measure.worker JOB.json`` under torchrun.

Writes ``rank<R>.json`` into the job's folder, or ``error<R>.txt`` with one sentence.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError


def main(path: str) -> int:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    rank = int(os.environ.get("RANK", "0"))
    try:
        record = run(job)
    except LlmemError as error:
        (folder / f"error{rank}.txt").write_text(str(error), encoding="utf-8")
        return 2
    (folder / f"rank{rank}.json").write_text(json.dumps(record), encoding="utf-8")
    return 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Build the job's RunSpec under its engine, train ``steps`` steps, return the rank's record."""
    import torch.distributed as dist

    from llmem.measure.engines import build
    from llmem.measure.marks import StepMarks
    from llmem.spec import make_spec
    from llmem.trace.run import quiet

    spec = make_spec(**job["spec"])
    start_process_group(job["device"], job["fake_world"])
    recorder = recorder_of(job)
    recorder.start()
    with quiet():
        wrapped = build(spec, job["device"])
        marks = StepMarks()
        wrapped.watch(marks)
        marks.watch_units(wrapped.blocks)
        gc.collect()
        # Reference cycles would be freed at moments of the collector's choosing.
        gc.disable()
        recorder.before_steps()
        for _ in range(job["steps"]):
            wrapped.step()
            recorder.after_step()
    record = recorder.finish()
    gc.enable()
    record |= {"rank": dist.get_rank(), "notes": wrapped.notes}
    dist.barrier()
    dist.destroy_process_group()
    return record


def start_process_group(device: str, fake_world: int | None) -> None:
    """nccl on GPUs, gloo (on copies) on CPU, or the view of rank 0 of ``fake_world`` in this one process."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if fake_world is None:
        from llmem.measure.gloo import register

        dist.init_process_group("nccl" if device == "cuda" else register())
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=fake_world, store=FakeStore())


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
