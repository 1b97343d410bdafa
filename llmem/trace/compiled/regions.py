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

import torch

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.installed import installed
from llmem.lifetimes import Phase
from llmem.spec import RunSpec
from llmem.trace.checkpointing import is_reentrant
from llmem.trace.compiled import program
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
        ("--tp", spec.tp > 1), ("--cp", spec.cp > 1), ("--ep", spec.ep > 1), ("--pp", spec.pp > 1),
        ("quantised weights", spec.quantization != "none" or spec.method == "qlora"),
        ("--liger", spec.liger), (f"--kernels {spec.kernels}", spec.kernels != "model"),
        ("--optimizer-in-backward", spec.optimizer_in_backward),
        (f"--strategy {spec.strategy}", spec.strategy not in _STRATEGIES[scope]),
    ):  # fmt: skip
        if given:
            known = ", ".join(_STRATEGIES[scope])
            raise LlmemError(
                f"--compile with {option} is not supported (--compile-scope {scope} goes with "
                f"--strategy {known}); leave one of them out"
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
        module.forward = compile_it(_with_checkpoint(module, spec))


@contextmanager
def compiled(
    step: TrainingStep, blocks: list[str], spec: RunSpec, profile: DeviceProfile, recorder: Recorder
) -> Iterator[None]:
    """Inside, ``step`` runs with the parts of its model compiled that ``spec`` asks for.

    ``recorder`` will watch the programs. Raises LlmemError if they cannot be compiled.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    backend = _backend(profile)
    with _restored(step):
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
    dynamo.reset()


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
    from torch._dynamo.exc import TorchDynamoException

    asked = Recorder(frozenset({"meta"}))
    asked.padding = recorder.padding
    try:
        with asked, asked.in_phase(Phase.FORWARD):
            step.rehearse()
    except TorchDynamoException as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LlmemError(
            f"torch.compile of torch {installed('torch')} cannot compile {type(step.model).__name__} "
            f"({first.strip().rstrip('.')}); leave --compile out, or trace a step of your own"
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


def _said(spec: RunSpec, graphs: int, counters: Any) -> str:
    breaks = counters["graph_break"]
    stopped = (
        f", {sum(breaks.values())} graph breaks ({next(iter(breaks)).splitlines()[0]})" if breaks else ""
    )
    what = {"model": "the model", "blocks": "each layer", "regions": "each layer and what is around"}
    return (
        f"torch.compile: {what[spec.compile_scope]}, by Dynamo, AOTAutograd and Inductor of torch "
        f"{installed('torch')}: {graphs} graphs{stopped}; matrix products unpadded, nothing autotuned"
    )
