"""Trace a RunSpec, or anybody's own step."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile, get_device
from llmem.installed import installed
from llmem.lifetimes import Category, Phase, Trace
from llmem.parallel.fsdp.wrapping import units_together, wrapped_names
from llmem.spec import RunSpec
from llmem.trace import standins
from llmem.trace.adapters import as_on_the_host
from llmem.trace.as_transformers import behave_like
from llmem.trace.autocast import autocast_for
from llmem.trace.build import (
    Prepared,
    blocks_of,
    compute_in,
    head_modules,
    master_dtypes,
    prepare,
)
from llmem.trace.generate import check_generation, recorder_of
from llmem.trace.kernels import kernels_of, scratch_of
from llmem.trace.micro_batch import (
    cut_backward,
    one_micro_batch,
    traced_passes,
    without_optimizer,
)
from llmem.trace.mixed_precision import adapters_first_seen_in_fp32, inside_engine
from llmem.trace.optimizers import multi_tensor_ops_on_meta
from llmem.trace.quantize import layers_known, statistics
from llmem.trace.recorder import Recorder
from llmem.trace.split.context_parallel import sent_blocks_wait
from llmem.trace.split.expert_parallel import cast_inputs_of_experts, split_experts
from llmem.trace.split.process_group import rank_of
from llmem.trace.split.tensor_parallel import sharded_dimensions
from llmem.trace.standins.select import fuses_adapters, stand_ins_for

DEFAULT_GPU = "a100-80gb"
"""Whose kernels are assumed when no GPU is named."""

STEPS = 2
"""The first step makes the optimizer's state; the second finds it there."""


def trace_spec(
    spec: RunSpec,
    *,
    device: str = "meta",
    steps: int | None = None,
    compute_dtype: str | None = None,
    tp_rank: int = 0,
    cp_rank: int = 0,
) -> Trace:
    """Run ``steps`` training steps (default: ``spec.steps``) of ``spec`` and record them.

    ``device`` is ``meta`` (nothing is allocated) or ``cpu`` (the step really runs, for checks).
    This is the model on one device, whole or, under tensor parallelism, ``tp_rank``'s part of it;
    under context parallelism with ``cp_rank``'s part of each sequence (of both: rank ``cp_rank`` x tp +
    ``tp_rank``).
    ``compute_dtype`` is the dtype that a sharding engine gives parameters while it computes (then
    there is no autocast); the dtypes it keeps them in are the trace's ``masters``. For a pipeline it
    is one micro-batch, without optimizer.
    """
    if spec.task == "generate":
        check_generation(spec)
        steps = 1
    inner = max(spec.tp, spec.ep)  # neighbours, as in ``rank_mesh``
    group, rank = spec.cp * inner, cp_rank * inner + tp_rank
    alone = nullcontext() if group == 1 or device != "meta" else rank_of(group, rank)
    if spec.pp > 1:
        spec, steps = one_micro_batch(spec), traced_passes(spec)
    with alone, quiet(), layers_known(spec, device):
        trace = _trace_spec(spec, device, steps or spec.steps, compute_dtype)
    trace.tensor_rank = tp_rank, inner
    return trace


def _trace_spec(spec: RunSpec, device: str, steps: int, compute_dtype: str | None) -> Trace:
    autocast = spec.autocast_dtype if compute_dtype and spec.autocast_inside_engine else None
    if compute_dtype is not None:
        spec = spec.model_copy(update={"bf16": False, "fp16": False})
    target = get_device(spec.gpu or DEFAULT_GPU)
    cuda = target.is_cuda
    with quiet():
        prepared = prepare(spec, device=device, cuda=cuda)
    if autocast is not None:
        mixed = inside_engine(autocast, device)
        prepared.step.forward_context = mixed.forward_context
        prepared.step.outputs_of = mixed.outputs_of
        adapters_first_seen_in_fp32(prepared.model)
    recorder = recorder_of(spec, device)(
        devices=frozenset({device} if cuda else {"meta", "cpu"}),
        scratch=scratch_of(target, spec.as_torch) if cuda else None,
    )
    recorder.padding = spec.padding or spec.packed  # positions start again: masks are not full
    recorder.assumptions += prepared.assumptions
    stages: AbstractContextManager[None] = nullcontext()
    if spec.pp > 1:
        without_optimizer(prepared.step)
        stages = cut_backward(prepared.step, spec, recorder)
    masters = master_dtypes(prepared.model, upcast=compute_dtype is not None)
    if compute_dtype is not None:
        compute_in(prepared.model, compute_dtype, adapters=not fuses_adapters(spec))
        cast_inputs_of_experts(prepared.model, compute_dtype)
    recorder.add_model(prepared.model)
    for name, tensor in statistics(prepared.model):
        recorder.add_existing(tensor, Category.PARAMETER, name)
    with ExitStack() as stack:
        if device == "meta":
            stack.enter_context(kernels_of(target, recorder.note, spec.sdpa_backend, spec.as_torch))
            stack.enter_context(stand_ins_for(spec, prepared.model, target, recorder.note))
            stack.enter_context(multi_tensor_ops_on_meta())
            stack.enter_context(autocast_for("cuda" if target.is_cuda else "cpu"))
            if cuda and spec.cp > 1 and spec.cp_comm != "ulysses":
                stack.enter_context(sent_blocks_wait())
        stack.enter_context(as_on_the_host(prepared.model, device, cuda=cuda))
        stack.enter_context(behave_like(spec.as_transformers, recorder.note))
        stack.enter_context(new_tensors_are_dispatched())  # before Dynamo guards torch.tensor
        if spec.compile:
            stack.enter_context(_compiled(prepared, spec, device, target, recorder))
        stack.enter_context(recorder.watch_composites(device))
        stack.enter_context(stages)
        _run(prepared, recorder, stack, steps)
    trace = recorder.finish()
    trace.masters = {p.key: masters[p.name] for p in trace.parameters}
    trace.wrapped = wrapped_names(prepared.model, spec)
    trace.together = units_together(prepared.model, spec)
    trace.experts = split_experts(prepared.model)
    cut = sharded_dimensions(prepared.model)
    trace.sharded = {p.key: cut[p.name] for p in trace.parameters if p.name in cut}
    return trace


def _compiled(
    prepared: Prepared, spec: RunSpec, device: str, target: DeviceProfile, recorder: Recorder
) -> AbstractContextManager[None]:
    """The step's model is compiled, and ``recorder`` watches the compiled programs."""
    from llmem.trace.compiled.regions import compiled

    if device != "meta":
        raise LlmemError("compiled code allocates unseen on real tensors; use `llmem measure` for that")
    return compiled(prepared.step, blocks_of(prepared.model), spec, target, recorder)


def _run(prepared: Prepared, recorder: Recorder, stack: ExitStack, steps: int) -> None:
    prepared.step.watcher = recorder
    stack.enter_context(quiet())
    stack.enter_context(recorder.watch_modules(prepared.model, prepared.head))
    stack.enter_context(recorder.watch_gradients())
    stack.enter_context(frees_by_reference_count())
    try:
        with recorder:
            for _ in range(steps):
                prepared.step()
    except (NotImplementedError, RuntimeError) as error:
        raise LlmemError(_untraceable(prepared.model, recorder, error)) from error
    except ValueError as error:  # raised by models that look at their arguments
        raise LlmemError(
            f"{type(prepared.model).__name__} of transformers {installed('transformers')} refuses the "
            f"batch: {str(error).strip().rstrip('.')}; install another version, or trace a step of "
            "your own"
        ) from error
    except (AttributeError, TypeError, KeyError, IndexError, AssertionError) as error:
        said = next(iter(str(error).strip().splitlines()), "no reason given").rstrip(".")
        raise LlmemError(
            f"{type(prepared.model).__name__} of transformers {installed('transformers')} fails "
            f"({type(error).__name__}: {said}); check its config, or trace a step of your own"
        ) from error


_READS_VALUES = ("nonzero", "index", "_local_scalar_dense")
"""Ops whose results depend on the values of a tensor, such as where a router sent each token."""


def _untraceable(model: Any, recorder: Recorder, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = recorder.current_module() or type(model).__name__
    if "overflow" in first:
        return f"the tensors of {where} are too large to count ({first}); lower -b or -s"
    here = installed("transformers")
    if here.startswith("4.") and recorder.last_op() in _READS_VALUES:
        return (
            f"{type(model).__name__} of transformers {here} branches on values of tensors "
            f"({recorder.last_op()} in {where}), which a trace on meta has not; later versions do so in "
            "fewer models (experts: since 5.0), so install 5.24"
        )
    return (
        f"{type(model).__name__} cannot be traced: in {where}, op {recorder.last_op() or 'none'}: "
        f"{first.rstrip('.')}; give the op a meta kernel (torch.library.register_fake) or trace "
        "another attention or expert implementation"
    )


@contextmanager
def new_tensors_are_dispatched() -> Iterator[None]:
    """``torch.tensor`` passes the dispatcher on meta as it does on every other device."""
    original = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        if made.is_meta:
            torch.ops.aten.lift_fresh(made)
        return made

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = original


@contextmanager
def frees_by_reference_count() -> Iterator[None]:
    """Keep the cyclic collector from freeing storages at moments of its own choosing."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of torch, transformers and peft about what a trace does on purpose.

    Some are printed, some logged (transformers, bitsandbytes); errors still are.
    """
    loggers = [logging.getLogger(name) for name in ("transformers", "bitsandbytes", "peft")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def trace(
    model_or_step: Any,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
    device: str = "meta",
    gpu: str | DeviceProfile | None = None,
    as_torch: str | None = None,
    **fields: Any,
) -> Trace:
    """Trace a model by name (or as a module), or your own ``step()``.

    With a callable step, everything it does on tensors of ``device`` is recorded, ``steps``
    times over; give ``model`` to have parameters and modules named, ``optimizer`` to have its
    state recognised, ``as_torch`` to assume the kernels of another version. Otherwise ``fields``
    are those of RunSpec.

    >>> import torch, llmem
    >>> layer = torch.nn.Linear(4, 4, device="meta")
    >>> t = llmem.trace(lambda: layer(torch.empty(2, 4, device="meta")).sum().backward(), model=layer)
    >>> [p.name for p in t.parameters]
    ['weight', 'bias']
    """
    is_model = isinstance(model_or_step, torch.nn.Module) or not callable(model_or_step)
    if is_model:
        from llmem.spec import make_spec

        name = gpu.name if isinstance(gpu, DeviceProfile) else gpu
        spec = make_spec(model=model_or_step, gpu=name, as_torch=as_torch, **fields)
        return trace_spec(spec, device=device, steps=steps)
    target = gpu if isinstance(gpu, DeviceProfile) else get_device(gpu or DEFAULT_GPU)
    return _trace_step(model_or_step, model, optimizer, steps, device, target, as_torch)


def _trace_step(
    step: Callable[[], Any],
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    steps: int,
    device: str,
    target: DeviceProfile,
    as_torch: str | None,
) -> Trace:
    recorder = Recorder(
        devices=frozenset({device}),
        scratch=scratch_of(target, as_torch) if target.is_cuda and device == "meta" else None,
    )
    if model is not None:
        recorder.add_model(model)
    if optimizer is not None:
        for state in optimizer.state.values():
            recorder.add_optimizer_state(state)
    with ExitStack() as stack:
        if device == "meta":
            stack.enter_context(kernels_of(target, recorder.note, None, as_torch))
            stack.enter_context(standins.active())
            stack.enter_context(multi_tensor_ops_on_meta())
            stack.enter_context(autocast_for("cuda" if target.is_cuda else "cpu"))
        if model is not None:
            stack.enter_context(recorder.watch_modules(model, head_modules(model)))
            stack.enter_context(recorder.watch_gradients())
        stack.enter_context(recorder.watch_phases(optimizer))
        stack.enter_context(recorder.watch_composites(device))
        stack.enter_context(new_tensors_are_dispatched())
        stack.enter_context(frees_by_reference_count())
        with recorder:
            for number in range(steps):
                recorder.start_step(number)
                with recorder.in_phase(Phase.FORWARD):
                    step()
    return recorder.finish()
