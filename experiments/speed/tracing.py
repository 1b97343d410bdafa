"""What recording costs: ``python -m experiments.speed.tracing``.

The same training steps on meta tensors, in the same process, with and without the recorder; the
model is built anew each time, outside the clock. Prints CPU seconds (best of ``--repeat``), their
ratio, recorded ops and storages, and the peak resident memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from llmem.gpu.devices import get_device
from llmem.lifetimes import Trace
from llmem.spec import RunSpec, make_spec
from llmem.trace.build import prepare
from llmem.trace.kernels import kernels_of
from llmem.trace.optimizers import multi_tensor_ops_on_meta
from llmem.trace.run import DEFAULT_GPU, STEPS, frees_by_reference_count, quiet, trace_spec


@contextmanager
def scalars_are_true() -> Iterator[None]:
    """Branches on meta scalars (is the mask full?) go the way that the recorder lets them go."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.m.impl("_local_scalar_dense", "Meta", lambda _: True)  # type: ignore[union-attr]
        yield
    finally:
        library._destroy()


def bare(spec: RunSpec) -> float:
    """CPU seconds of what ``trace_spec`` runs, with nobody watching."""
    prepared = prepare(spec, device="meta", cuda=True)
    start = time.process_time()
    with ExitStack() as stack:
        stack.enter_context(kernels_of(get_device(DEFAULT_GPU), lambda _: None))
        stack.enter_context(multi_tensor_ops_on_meta())
        stack.enter_context(scalars_are_true())
        stack.enter_context(quiet())
        stack.enter_context(frees_by_reference_count())
        for _ in range(STEPS):
            prepared.step()
    return time.process_time() - start


def traced(spec: RunSpec) -> tuple[float, Trace]:
    """CPU seconds of the same steps recorded, hooks and tables included, and the trace."""
    whole = time.process_time()
    prepare(spec, device="meta", cuda=True)
    building = time.process_time() - whole
    whole = time.process_time()
    trace = trace_spec(spec, steps=STEPS)
    return time.process_time() - whole - building, trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["llama-3.1-8b", "llama-3.1-70b"])
    parser.add_argument("-b", type=int, default=1)
    parser.add_argument("-s", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'model':16} {'ckpt':5} {'bare s':>7} {'traced s':>8} {'ratio':>6} {'ops':>7} "
          f"{'storages':>8} {'RSS MiB':>8}")  # fmt: skip
    for model in arguments.models:
        for checkpointing in (False, True):
            spec = make_spec(
                model=model,
                per_device_train_batch_size=arguments.b,
                seq_length=arguments.s,
                gradient_checkpointing=checkpointing,
            )
            bare(spec)  # warm: imports, caches
            without, recorded = float("inf"), float("inf")
            for _ in range(arguments.repeat):  # in turn, so that both see the same machine
                without = min(without, bare(spec))
                seconds, trace = traced(spec)
                recorded = min(recorded, seconds)
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{model:16} {checkpointing!s:5} {without:7.2f} {recorded:8.2f} "
                  f"{recorded / without:6.2f} {len(trace.ops):7,} "
                  f"{len(trace.lifetimes):8,} {resident:8,.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
