"""torch's own tensor parallelism at full size, on tensors without memory, beside the estimate.

    python -m experiments.real_runs.fake_tensor_parallel [--only TEXT]

Truth here is torch's engine code, not a GPU: DTensor, and FSDP2 over it on the other dimension of the
mesh, train a model of meta tensors in a process group whose collectives do nothing. FSDP2 x TP is
recorded as in ``fake_fsdp2``, against a pass that plays FSDP2's hooks over the trace of one
tensor-parallel rank. Of TP alone the trace is DTensor's own run, so there the count is another's:
torch's ``MemTracker`` (torch/distributed/_tools), which adds up living storages by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.real_runs.fake_fsdp2 import record_fake_fsdp2
from llmem.estimate import Rank, estimate_trace
from llmem.gpu.devices import get_device
from llmem.parallel import compute_dtype
from llmem.spec import RunSpec, make_spec
from llmem.trace.build import prepare
from llmem.trace.kernels import kernels_of
from llmem.trace.optimizers import multi_tensor_ops_on_meta
from llmem.trace.run import frees_by_reference_count, quiet, trace_spec
from llmem.trace.split import process_group
from llmem.trace.split.process_group import rank_of


@contextmanager
def collectives_on_meta() -> Iterator[None]:
    """What a traced tensor-parallel rank has around it, for a group that somebody else makes."""
    with ExitStack() as stack:
        process_group._forget_shapes()
        stack.callback(process_group._forget_shapes)
        process_group._collectives_on_meta(stack)
        process_group._propagation_unseen(stack)
        yield


class MasksAreFull(TorchDispatchMode):
    """Answers yes where code asks whether all of a mask on meta holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def peak_of_fsdp2_and_tp(spec: RunSpec) -> int:
    """Peak of live bytes of rank 0 under torch's FSDP2 x DTensor."""
    with collectives_on_meta():
        return record_fake_fsdp2(spec, spec.gpus).peak


def peak_of_tp(spec: RunSpec) -> int:
    """Peak of live bytes of rank 0 of ``spec.tp`` under DTensor, counted by torch's MemTracker."""
    tracker = MemTracker()
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(rank_of(spec.tp, 0))
        prepared = prepare(spec, device="meta", cuda=False)
        stack.enter_context(kernels_of(get_device("cpu"), lambda sentence: None))
        stack.enter_context(multi_tensor_ops_on_meta())
        stack.enter_context(frees_by_reference_count())
        tracker.track_external(prepared.model)
        with tracker, MasksAreFull():
            for _ in range(spec.steps):
                prepared.step()
                tracker.reset_mod_stats()  # it refuses a module's second step otherwise
    snapshot: dict[torch.device, dict[str, int]] = tracker.get_tracker_snapshot("peak")
    return sum(sum(v for k, v in kinds.items() if k != "Total") for kinds in snapshot.values())


@dataclass(frozen=True)
class Comparison:
    """Peaks of live bytes, and seconds of torch's run and of the estimate, its trace included."""

    engine: int
    predicted: Rank
    torch_seconds: float
    seconds: float

    @property
    def error(self) -> float:
        return self.predicted.peak.requested / self.engine - 1


def compare(spec: RunSpec) -> Comparison:
    """Run ``spec`` (gpu cpu, with tp) both ways."""
    start = time.perf_counter()
    engine = peak_of_tp(spec) if spec.strategy == "none" else peak_of_fsdp2_and_tp(spec)
    between = time.perf_counter()
    trace = trace_spec(spec, compute_dtype=compute_dtype(spec))
    predicted = next(r for r in estimate_trace(trace, spec).ranks if 0 in r.table.ranks)
    return Comparison(engine, predicted, between - start, time.perf_counter() - between)


PLANS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "titan-sp": {"tp_plan": "torchtitan", "sp": True},
    "titan-sp-loss": {"tp_plan": "torchtitan", "sp": True, "loss_parallel": True},
}
MESHES: dict[str, dict[str, Any]] = {
    "tp8": {"tp": 8, "gpus": 8, "param_dtype": "bf16"},
    "fsdp2-8x8": {"tp": 8, "gpus": 64, "strategy": "fsdp2", "param_dtype": "fp32", "bf16": True},
}


def configurations(model: Any = "llama-3.1-70b", tokens: int = 4096) -> Iterator[tuple[str, RunSpec]]:
    """Every plan on each mesh, with checkpointing, all in bf16 (FSDP2: fp32 masters)."""
    for mesh, where in MESHES.items():
        for plan, options in PLANS.items():
            yield f"{mesh}-{plan}", make_spec(
                model=model, per_device_train_batch_size=1, seq_length=tokens,
                gradient_checkpointing=True, gpu="cpu", **where, **options,
            )  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain this text")
    given = parser.parse_args(arguments)
    print("truth: torch's DTensor and FSDP2 on meta tensors, fake process group, rank 0; "
          "Llama-3.1-70B, b 1, s 4096, checkpointing")  # fmt: skip
    print(f"{'configuration':26} {'peak, bytes':>16} {'error':>8} {'torch s':>8} {'ours s':>7}")
    for name, spec in configurations():
        if given.only in name:
            done = compare(spec)
            print(f"{name:26} {done.engine:16,} {done.error:+8.3%} {done.torch_seconds:8.1f} "
                  f"{done.seconds:7.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
