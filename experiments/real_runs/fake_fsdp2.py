"""torch's own FSDP2 at full size, run on tensors without memory, beside the pass that models it.

    python -m experiments.real_runs.fake_fsdp2 [--only TEXT]

Truth here is torch's engine code, not a GPU: ``fully_shard`` shards a model of meta tensors in a
process group of N ranks whose collectives do nothing (``torch.testing._internal.distributed.
fake_pg``), and rank 0 trains. Hooks, streams' order of program, buffers and what autograd keeps are
torch's; kernels and their sizes on meta are those of CPU, so bytes are exact on both sides.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from llmem.estimate import Rank, estimate_trace
from llmem.gpu.devices import get_device
from llmem.lifetimes import NEVER, Category, Phase, Trace
from llmem.measure.engines import _fsdp2 as shard_fully
from llmem.measure.validate import steady_phases
from llmem.parallel import compute_dtype
from llmem.spec import RunSpec, make_spec
from llmem.timeline import Timeline, replay
from llmem.trace.build import prepare
from llmem.trace.kernels import kernels_of
from llmem.trace.optimizers import multi_tensor_ops_on_meta
from llmem.trace.recorder import Recorder
from llmem.trace.run import (
    frees_by_reference_count,
    new_tensors_are_dispatched,
    quiet,
    trace_spec,
)

UnitEvent = tuple[str, str]
"""(``gather``, ``free`` or ``reduce``, name of the unit: '' is the root)."""


class ResizeRecorder(Recorder):
    """A recorder that also sees storages emptied and filled again by ``UntypedStorage.resize_``.

    FSDP2 frees and allocates unsharded parameters that way (``free_storage`` and ``alloc_storage``
    of torch/distributed/fsdp/_fully_shard/_fsdp_param.py), which no dispatch mode sees.
    """

    def __init__(self, devices: frozenset[str] = frozenset({"meta", "cpu"})) -> None:
        super().__init__(devices=devices)
        self.unit_events: list[UnitEvent] = []
        self._empty: set[int] = set()

    def _died(self, ref: Any) -> None:
        if ref.cdata in self._empty:
            self._empty.remove(ref.cdata)
            self._live.pop(ref.cdata, None)
        else:
            super()._died(ref)

    def resized(self, storage: Any, nbytes: int) -> None:
        """A storage that the recorder knows has got ``nbytes``: a death, a birth, or both."""
        ref = self._live.get(storage._cdata)
        if ref is None:
            return
        if ref.cdata not in self._empty:
            self._free_row(ref.row, len(self._ops) - 1)
            self._empty.add(ref.cdata)
        if nbytes:
            self._empty.remove(ref.cdata)
            module = self._module_stack[-1]
            ref.row = self._new_row(nbytes, Category.COMMUNICATION, module, len(self._ops) - 1)

    @contextmanager
    def watch_resizes(self) -> Iterator[None]:
        original = torch.UntypedStorage.resize_
        recorder = self

        def resize_(storage: Any, nbytes: int) -> Any:
            if nbytes != storage.nbytes():
                recorder.resized(storage, nbytes)
            return original(storage, nbytes)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    @contextmanager
    def watch_units(self) -> Iterator[None]:
        """Note gathers and reductions by the names torch gives them, and frees as they happen."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        group: Any = module.FSDPParamGroup
        mark, frees = module.record_function, (group._to_sharded, group._to_sharded_post_forward)
        events = self.unit_events

        def record_function(label: str) -> Any:
            if found := _LABEL.fullmatch(label):
                events.append((_NAMED[found[1]], found[2] or ""))
            return mark(label)

        def to_sharded(self: Any) -> None:
            if self.is_unsharded:
                events.append(("free", self._module_fqn))
            frees[0](self)

        def to_sharded_post_forward(self: Any) -> None:
            events.append(("free", self._module_fqn))
            frees[1](self)

        module.record_function, group._to_sharded = record_function, to_sharded  # type: ignore
        group._to_sharded_post_forward = to_sharded_post_forward
        try:
            yield
        finally:
            module.record_function = mark  # type: ignore[assignment]
            group._to_sharded, group._to_sharded_post_forward = frees


_NAMED = {"all_gather": "gather", "post_backward_reduce": "reduce"}
_LABEL = re.compile(rf"FSDP::({'|'.join(_NAMED)})(?: \((.*)\))?")


@contextmanager
def ranks_of_meta(world: int) -> Iterator[None]:
    """Rank 0 of ``world`` ranks on meta: nothing is sent, and FSDP2 takes meta for a device.

    FSDP2 refuses to train what is on meta, as that is where models wait to be loaded; the check
    goes, and the device of a CPU mesh becomes meta, with CPU's streams and events (which do
    nothing).
    """
    from torch.distributed._tools import fake_collectives  # collectives' kernels for meta
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert fake_collectives
    group: Any = _fsdp_param_group.FSDPParamGroup
    validate, device_of = group._validate_no_meta_params, _fully_shard._get_device_from_mesh
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    group._validate_no_meta_params = lambda self: None
    _fully_shard._get_device_from_mesh = lambda mesh: torch.device("meta")
    torch.meta = torch.cpu  # type: ignore[attr-defined]  # where torch looks for streams
    try:
        yield
    finally:
        del torch.meta  # type: ignore[attr-defined]
        _fully_shard._get_device_from_mesh = device_of
        group._validate_no_meta_params = validate
        dist.destroy_process_group()


@contextmanager
def shapes_unseen() -> Iterator[None]:
    """DTensor runs each new op once on fake tensors for its shapes: no allocation of a real run."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = original


class CopiesToHost(TorchDispatchMode):
    """Lets tensors of the device, which is meta, be copied to the host: only memory is looked at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = func is torch.ops.aten._to_copy.default and args[0].is_meta
        if copies and str(kwargs.get("device")) == "cpu":
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def move_shards_to_host(model: torch.nn.Module) -> None:
    """``to_empty``, as torch documents it for offloaded models made on meta; buffers stay there."""
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")


@dataclass(frozen=True)
class FakeRun:
    """What torch's FSDP2 did: bytes after every event, unit events of all steps in order."""

    timeline: Timeline
    trace: Trace
    unit_events: list[UnitEvent]
    seconds_per_step: float

    @property
    def peak(self) -> int:
        return int(self.timeline.requested.max())


def record_fake_fsdp2(spec: RunSpec, world: int) -> FakeRun:
    """Train ``spec.steps`` steps as rank 0 of ``world`` under torch's FSDP2, recorded."""
    spec = spec.model_copy(update={"gpus": world, "strategy": "fsdp2", "gpu": "cpu"})
    plain = spec.model_copy(update={"bf16": False, "fp16": False})
    offloaded = spec.offload == "all"
    recorder = ResizeRecorder(frozenset({"meta"} if offloaded else {"meta", "cpu"}))
    recorder.padding = spec.padding
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(ranks_of_meta(world))
        prepared = prepare(plain, device="meta", cuda=False)
        step = shard_fully(prepared, spec, "cpu")
        if offloaded:
            move_shards_to_host(prepared.model)
            stack.enter_context(CopiesToHost())
        step.watcher = recorder
        recorder.add_model(prepared.model)
        stack.enter_context(kernels_of(get_device("cpu"), recorder.note))
        stack.enter_context(multi_tensor_ops_on_meta())
        stack.enter_context(recorder.watch_composites("meta"))
        stack.enter_context(recorder.watch_modules(prepared.model, prepared.head))
        stack.enter_context(recorder.watch_resizes())
        stack.enter_context(recorder.watch_units())
        stack.enter_context(shapes_unseen())
        stack.enter_context(new_tensors_are_dispatched())
        stack.enter_context(frees_by_reference_count())
        start = time.perf_counter()
        with recorder:
            for _ in range(spec.steps):
                step()
        seconds = (time.perf_counter() - start) / spec.steps
    trace = recorder.finish()
    table = trace.lifetimes
    on_device = table.take(table.category != Category.PARAMETER) if offloaded else table
    timeline = replay(on_device, exact=True)
    return FakeRun(timeline, trace, recorder.unit_events, seconds)


# -- the pass beside it ----------------------------------------------------------------------------


def predicted_unit_events(rank: Rank) -> list[UnitEvent]:
    """The unit events of a predicted rank, in order.

    A free is the end of the unit's first unsharded parameter: all of a unit end together.
    """
    trace, table = rank.table.trace, rank.table.lifetimes
    named = {"all_gather": "gather", "reduce_scatter": "reduce"}
    found: list[tuple[int, UnitEvent]] = []
    for name, module, tick in zip(trace.ops.name, trace.ops.module, trace.ops.tick, strict=True):
        if trace.names[name] in named:
            found.append((int(tick), (named[trace.names[name]], trace.modules[module])))
    unsharded = (table.category == Category.COMMUNICATION) & (table.key >= 0)
    largest: dict[int, int] = {}  # a smaller one is what reshard_after_forward=N keeps
    for key, nbytes in zip(table.key[unsharded].tolist(), table.nbytes[unsharded].tolist(), strict=True):
        largest[key] = max(nbytes, largest.get(key, 0))
    whole = np.array([largest.get(key, 0) for key in table.key.tolist()]) == table.nbytes
    gathered = table.take(unsharded & whole & (table.death != NEVER))
    first: dict[int, int] = {}
    for module, key in zip(gathered.module.tolist(), gathered.key.tolist(), strict=True):
        first[module] = min(key, first.get(module, key))
    columns = (gathered.module, gathered.key, gathered.death)
    for module, key, death in zip(*(column.tolist() for column in columns), strict=True):
        if key == first[module]:
            found.append((death, ("free", trace.modules[module])))
    return [event for _, event in sorted(found, key=lambda item: item[0])]


@dataclass(frozen=True)
class Comparison:
    """Peaks in bytes; ``phase_error`` is the largest relative one of the last step's phases."""

    engine: FakeRun
    predicted: Rank
    seconds: float
    """What the prediction took, without the trace of the unsharded step that others share."""

    @property
    def error(self) -> float:
        return self.predicted.peak.requested / self.engine.peak - 1

    @property
    def phase_error(self) -> float:
        measured = steady_phases(SimpleNamespace(table=self.engine, timeline=self.engine.timeline))
        mine = steady_phases(self.predicted)
        between = Phase.SETUP.label  # what runs outside any phase
        named = [phase for phase in measured if phase != between]
        return max((mine[phase] / measured[phase] - 1 for phase in named), key=abs)

    @property
    def same_order(self) -> bool:
        return predicted_unit_events(self.predicted) == self.engine.unit_events


def compare(spec: RunSpec, trace: Trace | None = None) -> Comparison:
    """Run ``spec`` (fsdp2, gpu cpu) both ways; ``trace`` is its unsharded step's, if at hand."""
    engine = record_fake_fsdp2(spec, spec.gpus)
    if trace is None:
        trace = trace_spec(spec, compute_dtype=compute_dtype(spec))
    start = time.perf_counter()
    predicted = next(r for r in estimate_trace(trace, spec).ranks if 0 in r.table.ranks)
    return Comparison(engine, predicted, time.perf_counter() - start)


MODELS = {"llama-3.1-8b": (8, 64), "llama-3.1-70b": (64,), "mixtral-8x7b": (16,)}
"""The presets and on how many ranks each runs."""


def configurations() -> Iterator[list[tuple[str, RunSpec]]]:
    """Names and RunSpecs, those together that share the trace of their unsharded step."""
    for model, worlds in MODELS.items():
        for mixed in (True, False):
            for checkpointing in (False, True):
                group = []
                for world in worlds:
                    for reshard in (True, False):
                        spec = make_spec(
                            model=model, per_device_train_batch_size=1, seq_length=4096,
                            param_dtype="bf16", bf16=mixed, gradient_checkpointing=checkpointing,
                            gpus=world, strategy="fsdp2", gpu="cpu", reshard_after_forward=reshard,
                        )  # fmt: skip
                        parts = [model, str(world), "mixed" if mixed else "bf16"]
                        parts += ["ckpt"] * checkpointing + ["keep"] * (not reshard)
                        group.append(("-".join(parts), spec))
                yield group


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain this text")
    given = parser.parse_args(arguments)
    print("truth: torch's own FSDP2 code on meta tensors, fake process group, rank 0; b 1, s 4096")
    print("mixed: bf16 compute, fp32 masters and reduction; keep: reshard_after_forward=False")
    print(f"{'configuration':36} {'peak, bytes':>16} {'peak':>8} {'phases':>8} {'order':>6} "
          f"{'torch s/step':>12} {'pass s':>7}")  # fmt: skip
    for group in configurations():
        trace = None
        for name, spec in group:
            if given.only not in name:
                continue
            trace = trace or trace_spec(spec, compute_dtype=compute_dtype(spec))
            done = compare(spec, trace)
            order = "same" if done.same_order else "OTHER"
            print(f"{name:36} {done.engine.peak:16,} {done.error:+8.3%} {done.phase_error:+8.3%} "
                  f"{order:>6} {done.engine.seconds_per_step:12.1f} {done.seconds:7.1f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
