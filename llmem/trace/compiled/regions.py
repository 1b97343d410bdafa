"""Which parts of a step torch.compile takes, and the rehearsal in which it compiles them.

``model``    the model's forward with what accelerate puts around it (``TrainingArguments.torch_compile``)
``blocks``   each layer by itself, its checkpoint included (torchtitan, torchtune)
``regions``  each layer, and each other module that has no layers in it (accelerate's
             ``use_regional_compilation``, ``compile_regions`` in accelerate/utils/other.py)

Compiling happens in a rehearsal, one forward and backward that nobody watches. In the step that is
recorded Dynamo finds its code ready, and only programs run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.installed import installed
from llmem.lifetimes import Phase
from llmem.parallel.pipeline.schedule import SPLIT
from llmem.spec import RunSpec
from llmem.trace.checkpointing import is_reentrant
from llmem.trace.compiled import program
from llmem.trace.compiled.composites import forget_kernels
from llmem.trace.compiled.constants import constants_become_fake
from llmem.trace.compiled.failures import reason_of, unlogged
from llmem.trace.in_backward import InBackward
from llmem.trace.recorder import Recorder
from llmem.trace.step import TrainingStep

_STRATEGIES = {"model": ("none", "ddp"), "blocks": ("none", "ddp", "fsdp2"), "regions": ("none", "ddp")}
"""In others, hooks inside of a region gather parameters, and Dynamo stops at each."""


def check_compile(spec: RunSpec) -> None:
    """Raises LlmemError if ``spec.compile`` does not go with the rest of the run."""
    if not spec.compile:
        return
    scope = spec.compile_scope
    for option, given in (
        ("--task generate", spec.task == "generate"),
        ("--ep", spec.ep > 1),
        ("quantised weights", spec.quantization != "none" or spec.method == "qlora"),
        ("--liger", spec.liger), (f"--kernels {spec.kernels}", spec.kernels != "model"),
        (f"--strategy {spec.strategy}", spec.strategy not in _STRATEGIES[scope]),
    ):  # fmt: skip
        if given:
            known = ", ".join(_STRATEGIES[scope])
            raise LlmemError(
                f"--compile with {option} is not supported (--compile-scope {scope} goes with "
                f"--strategy {known}); leave one of them out"
            )
    if scope == "model" and spec.strategy == "ddp" and spec.bucket_cap_mb < 1:
        raise LlmemError(
            f"--bucket-cap-mb {spec.bucket_cap_mb:g} with --compile is refused by torch, whose "
            "DDPOptimizer cuts the model's graph at buckets of 1 MiB or more; raise it, or use "
            "--compile-scope blocks"
        )
    if scope != "blocks" and max(spec.tp, spec.cp, spec.pp) > 1:
        raise LlmemError(
            f"--compile-scope {scope} with --tp, --cp or --pp is not supported: their hooks sit around "
            "layers; add --compile-scope blocks, which is what torchtitan compiles"
        )
    if spec.pp > 1 and spec.pp_schedule in SPLIT:
        raise LlmemError(
            f"--compile with --pp-schedule {spec.pp_schedule} is not supported: a compiled layer's "
            "backward is one piece; use 1f1b, gpipe or interleaved"
        )


def compile_parts(
    step: TrainingStep, blocks: list[str], spec: RunSpec, compile_it: Callable[[Any], Any]
) -> None:
    """The parts of ``step``'s model that ``spec`` asks for become what ``compile_it`` makes of them.

    ``blocks`` are the names of the model's layers.
    """
    if spec.compile_scope == "model":
        step.outputs_of_call = compile_it(step.outputs_of_call)
        return
    for module in _regions(step.model, blocks, spec.compile_scope):
        region = compile_it(_with_checkpoint(module, spec))
        module.forward = _on_arrived_tensors(region) if spec.tp > 1 else region


@contextmanager
def compiled(
    step: TrainingStep, blocks: list[str], spec: RunSpec, profile: DeviceProfile, recorder: Recorder
) -> Iterator[None]:
    """Inside, ``step`` runs with the parts of its model compiled that ``spec`` asks for.

    ``recorder`` will watch the programs. Raises LlmemError if they cannot be compiled.
    """
    from torch._dynamo.utils import counters

    backend = _backend(profile)
    with _forgotten(), unlogged(), constants_become_fake(), _restored(step), _own_calls_too(backend):
        compile_parts(step, blocks, spec, partial(torch.compile, backend=_split(backend, spec)))
        _rehearse(step, recorder)
        if not backend.graphs:
            raise LlmemError(
                f"torch.compile of torch {installed('torch')} compiled nothing under a dispatch mode; "
                "install torch 2.13, or leave --compile out"
            )
        recorder.note(_said(spec, backend.graphs, counters))
        ready = backend.graphs
        with program.watched_by(recorder):
            yield
        if backend.graphs != ready:
            raise LlmemError(
                f"torch.compile compiles {type(step.model).__name__} again in a later step, which "
                "hides what it allocates; leave --compile out"
            )


@contextmanager
def _forgotten() -> Iterator[None]:
    """Dynamo and dispatcher know nothing of what was before, and afterwards nothing of what was here."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    forget_kernels()
    try:
        yield
    finally:
        dynamo.reset()
        forget_kernels()


@contextmanager
def _restored(step: TrainingStep) -> Iterator[None]:
    """What ``compile_parts`` replaces comes back."""
    call = step.outputs_of_call
    kept = [(module, dict(vars(module))) for module in step.model.modules()]
    try:
        yield
    finally:
        step.outputs_of_call = call
        for module, attributes in kept:
            for name in ("forward", "gradient_checkpointing"):
                if name in attributes:
                    setattr(module, name, attributes[name])
                else:
                    vars(module).pop(name, None)


@contextmanager
def _own_calls_too(backend: Any) -> Iterator[None]:
    """``torch.compile`` in the model's own code (around its loss, say) compiles by ``backend`` too."""

    def compile_by(_: Any, graph: Any, inputs: Any, **__: Any) -> Any:
        return backend(graph, inputs)

    with patch.object(torch._TorchCompileInductorWrapper, "__call__", compile_by):
        yield


def _split(backend: Any, spec: RunSpec) -> Any:
    """Under DDP Dynamo cuts the model's graph where DDP's buckets end (``optimize_ddp``)."""
    if spec.strategy != "ddp" or spec.compile_scope != "model":
        return backend
    from torch._dynamo.backends.distributed import DDPOptimizer

    cap = int(spec.bucket_cap_mb * 2**20)
    return DDPOptimizer(bucket_bytes_cap=cap, backend_compile_fn=backend).compile_fn


def _backend(profile: DeviceProfile) -> Any:
    try:
        from llmem.trace.compiled.backend import Backend
    except (ImportError, AttributeError) as error:
        raise LlmemError(
            f"--compile reads Inductor of torch 2.13, and {installed('torch')} is installed "
            f"({error}); install that version, or leave --compile out"
        ) from error
    return Backend(profile)


def _rehearse(step: TrainingStep, recorder: Recorder) -> None:
    """One micro-batch whose gradients are dropped; Dynamo compiles what it meets.

    A recorder of its own answers what code outside of compiled regions asks of masks.
    """
    asked = Recorder(frozenset({"meta"}))
    asked.padding = recorder.padding
    try:
        with asked, asked.in_phase(Phase.FORWARD):
            step.rehearse()
        if isinstance(step.optimizer, InBackward):
            step.optimizer.state.clear()  # its hooks have stepped
    except LlmemError:
        raise
    except Exception as error:  # of any of three compilers, or of the model itself
        raise LlmemError(
            f"torch.compile of torch {installed('torch')} cannot compile {type(step.model).__name__} "
            f"({reason_of(error)}); leave --compile out, or trace a step of your own"
        ) from error


def _regions(model: torch.nn.Module, blocks: list[str], scope: str) -> list[torch.nn.Module]:
    layers = [model.get_submodule(name) for name in blocks]
    if not layers:
        raise LlmemError(
            f"{type(model).__name__} names no layers (_no_split_modules); use --compile-scope model"
        )
    return layers if scope == "blocks" else layers + _without(model, set(map(id, layers)))


def _without(module: torch.nn.Module, layers: set[int]) -> list[torch.nn.Module]:
    """The largest modules in ``module`` that hold no layer and are none."""
    if id(module) in layers:
        return []
    if not any(id(inner) in layers for inner in module.modules()):
        return [module]
    return [found for child in module.children() for found in _without(child, layers)]


def _with_checkpoint(module: torch.nn.Module, spec: RunSpec) -> Callable[..., Any]:
    """``module``'s forward; a layer that checkpoints itself does it inside of the region.

    As if its call were compiled: transformers' ``GradientCheckpointingLayer.__call__``.
    """
    forward = module.forward
    if not getattr(module, "gradient_checkpointing", False) or not spec.gradient_checkpointing:
        return forward
    if is_reentrant(spec):
        raise LlmemError("Dynamo does not trace reentrant checkpoints; add --no-use-reentrant")
    checkpoint: Any = module._gradient_checkpointing_func
    vars(module)["gradient_checkpointing"] = False

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args)

    return checkpointed


def _on_arrived_tensors(region: Callable[..., Any]) -> Callable[..., Any]:
    """``region``, called with results of collectives once they have arrived.

    AOTAutograd of torch 2.13 waits for them itself, but their gradients end there
    (``_functorch/_aot_autograd/frontend_utils.py``).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return region(*map(_arrived, args), **{name: _arrived(arg) for name, arg in kwargs.items()})

    return call


def _arrived(value: Any) -> Any:
    return _Arrived.apply(value) if hasattr(value, "trigger_wait") else value  # type: ignore[no-untyped-call]


class _Arrived(torch.autograd.Function):
    """The tensor that a collective has filled, from the one that stands for it until then."""

    @staticmethod
    def forward(ctx: Any, pending: Any) -> torch.Tensor:
        arrived: torch.Tensor = pending.trigger_wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


def _said(spec: RunSpec, graphs: int, counters: Any) -> str:
    breaks = counters["graph_break"]  # counted again for each function around one
    stopped = f", cut where Dynamo stops ({next(iter(breaks)).splitlines()[0]})" if breaks else ""
    plural = "" if graphs == 1 else "s"
    what = {"model": "the model", "blocks": "each layer", "regions": "each layer and what is around"}
    return (
        f"torch.compile: {what[spec.compile_scope]}, by Dynamo, AOTAutograd and Inductor of torch "
        f"{installed('torch')}: {graphs} graph{plural}{stopped}; matrix products unpadded, nothing autotuned"
    )
