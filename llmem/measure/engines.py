"""The real frameworks around a prepared model: DDP and FSDP as torch runs them.

Each engine takes what ``prepare`` built and returns the step that trains it under the engine, with
the arguments that accelerate passes where RunSpec has no field for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.lifetimes import Phase
from llmem.measure import accelerate_fsdp2, gloo
from llmem.measure.cpu_memory import HOST
from llmem.measure.expert_engines import (
    check_measurable,
    reduce_experts_apart,
    shard_experts_apart,
)
from llmem.measure.marks import Mark
from llmem.parallel.fsdp.fsdp2_ranks import DTYPES
from llmem.parallel.fsdp.wrapping import wrapped_names
from llmem.spec import RunSpec, checkpoints_calls
from llmem.trace.build import Prepared, blocks_of, prepare
from llmem.trace.compiled.regions import compile_parts
from llmem.trace.mixed_precision import inside_engine
from llmem.trace.split import tensor_parallel
from llmem.trace.split.expert_parallel import replicas_of_experts
from llmem.trace.split.process_group import sharing
from llmem.trace.step import Watcher


@dataclass
class Wrapped:
    """A step under its engine: call ``step`` with its ``watcher`` set; ``blocks`` are the units.

    ``host_bytes``: the loader's batch, which stays in host memory on a GPU machine.
    """

    step: Any
    blocks: list[tuple[str, torch.nn.Module]]
    notes: list[str]
    host_bytes: int

    def watch(self, watcher: Watcher) -> None:
        self.step.watcher = watcher


def build(spec: RunSpec, device: str) -> Wrapped:
    """The model of ``spec`` on ``device`` under its strategy, in an initialised process group.

    Raises LlmemError for a strategy that cannot be run here.
    """
    wrap = _ENGINES.get(spec.strategy)
    if wrap is None:
        raise LlmemError(
            f"--strategy {spec.strategy} cannot be measured yet; use one of {', '.join(_ENGINES)}"
        )
    if spec.offload != "none" and device == "cpu" and spec.strategy.startswith("fsdp"):
        raise LlmemError(
            "on CPU all memory is the host's, so --offload has nothing to show there; use --device "
            "cuda, or `llmem estimate`"
        )
    if spec.pp > 1:
        from llmem.measure.pipeline_run import build_pipeline

        return build_pipeline(spec, device)
    if spec.tp > 1 and spec.strategy not in ("none", "fsdp2"):
        raise LlmemError(
            f"--tp with --strategy {spec.strategy} cannot be measured; use --strategy fsdp2 or none"
        )
    check_measurable(spec)
    prepared = _prepare(spec, device)
    prepared.step.clip_foreach = None  # torch's own choice for the tensors that it meets
    blocks = [(name, prepared.model.get_submodule(name)) for name in blocks_of(prepared.model)]
    host_bytes = sum(tensor.nbytes for tensor in prepared.step.make_batch().values())
    if device == "cuda":
        _move_batches(prepared)
    if spec.compile:
        gloo.hide_from_dynamo()
    if spec.compile and spec.compile_scope != "model":
        compile_parts(prepared.step, [name for name, _ in blocks], spec, torch.compile)
    with torch.profiler.record_function(Mark.name("phase", 0, Phase.SETUP)):
        step = wrap(prepared, spec, device)
    if spec.compile and spec.compile_scope == "model":  # around the engine, as accelerate does
        compile_parts(step, [], spec, torch.compile)
        blocks = []  # one program: a mark inside of it would change what is compiled
    return Wrapped(step, blocks, prepared.assumptions, host_bytes)


def _prepare(spec: RunSpec, device: str) -> Prepared:
    """A sharding engine gets the model in host memory, from where it takes its shards, and has its
    own mixed precision in place of autocast."""
    cuda = device == "cuda"
    if spec.strategy in ("none", "ddp"):
        return prepare(spec, device=device, cuda=cuda)
    plain = spec.model_copy(update={"bf16": False, "fp16": False})
    return prepare(plain, device="cpu", cuda=cuda)


def _move_batches(prepared: Prepared) -> None:
    make = prepared.step.make_batch
    prepared.step.make_batch = lambda: {k: v.to("cuda") for k, v in make().items()}


class MicroBatches:
    """The context of each forward: ``inner``, and no gradient exchange before the last one.

    ``exchange(last)`` is entered around the forward of each micro-batch.
    """

    def __init__(
        self,
        spec: RunSpec,
        inner: Callable[[], AbstractContextManager[Any]],
        exchange: Callable[[bool], AbstractContextManager[Any]],
    ) -> None:
        self._accumulation = spec.gradient_accumulation_steps
        self._inner = inner
        self._exchange = exchange
        self._count = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._count += 1
        with self._exchange(self._count % self._accumulation == 0), self._inner():
            yield


def _single(prepared: Prepared, spec: RunSpec, device: str) -> Any:
    return prepared.step


def _ddp(prepared: Prepared, spec: RunSpec, device: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    options: dict[str, Any] = {
        "device_ids": [torch.cuda.current_device()] if device == "cuda" else None,
        "bucket_cap_mb": spec.bucket_cap_mb,
        "gradient_as_bucket_view": spec.gradient_as_bucket_view,
    }
    apart = reduce_experts_apart(prepared.model, spec, options)
    model = DistributedDataParallel(prepared.model, **options)
    step = prepared.step
    step.model = model

    @contextmanager
    def exchange(last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for part in () if last else [*apart, model]:
                stack.enter_context(part.no_sync())
            yield

    step.forward_context = MicroBatches(spec, step.forward_context, exchange)
    return step


def _fsdp2(prepared: Prepared, spec: RunSpec, device: str) -> Any:
    """``fully_shard`` on each block, then on the root, or as accelerate's ``fsdp2_prepare_model``."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    model: Any = prepared.model
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if spec.offload == "all" else None
    mesh = _data_mesh(model, spec, device)
    if spec.fsdp_units == "accelerate":
        accelerate_fsdp2.prepare_model(model, spec, mesh, offload)
    else:
        # Inner modules first, as accelerate goes.
        names = sorted(wrapped_names(model, spec), key=lambda name: -name.count("."))
        shard_blocks(model, [model.get_submodule(name) for name in names], spec, mesh, offload)
    if hasattr(model, "tie_weights"):
        model.tie_weights()

    def synchronise(last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    step = prepared.step
    trained = [p for p in model.parameters() if p.requires_grad]
    step.optimizer = prepared.optimizer_plan.build(
        {"params": group} for group in tensor_parallel.by_mesh(trained)
    )
    step.forward_context = MicroBatches(spec, step.forward_context, synchronise)
    return step


def shard_blocks(
    model: torch.nn.Module,
    blocks: Iterable[torch.nn.Module],
    spec: RunSpec,
    mesh: Any,
    offload_policy: Any = None,
) -> None:
    """``fully_shard`` on ``blocks``, then on ``model``; trained parameters in fp32 as accelerate
    makes them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if spec.autocast_dtype:
        _upcast_trained(model)
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, spec.autocast_dtype),
            reduce_dtype=getattr(torch, DTYPES[spec.reduce_dtype]),
        )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    shard_experts_apart(model, spec, options)
    for block in blocks:
        fully_shard(block, reshard_after_forward=spec.reshards, **options)
    fully_shard(model, **options)


def _fsdp1(prepared: Prepared, spec: RunSpec, device: str) -> Any:
    """``FullyShardedDataParallel`` as accelerate's ``Accelerator.prepare_model`` sets it up."""
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    step, model = prepared.step, prepared.model
    policy = None
    if spec.autocast_dtype:
        dtype = getattr(torch, spec.autocast_dtype)
        policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
        mixed = inside_engine(spec.autocast_dtype, device)
        step.forward_context, step.outputs_of = mixed.forward_context, mixed.outputs_of
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
    hybrid = spec.shard_ranks < spec.gpus
    names = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") if hybrid else ("FULL_SHARD", "SHARD_GRAD_OP")
    sharded: Any = FSDP(
        model,
        sharding_strategy=ShardingStrategy[names[0 if spec.reshards else 1]],
        device_mesh=_data_mesh(model, spec, device) if hybrid else None,
        auto_wrap_policy=_wrap_policy(model, spec),
        mixed_precision=policy,
        cpu_offload=CPUOffload(offload_params=spec.offload == "all"),
        backward_prefetch=prefetch.get(spec.backward_prefetch),
        use_orig_params=spec.use_orig_params,
        device_id=torch.device(device),
    )
    part: Any
    for part in FSDP.fsdp_modules(sharded) if policy else ():
        flat: Any = part._flat_param
        if flat is not None and flat.requires_grad:
            flat.data = flat.data.float()
            part._handle._orig_param_dtype = torch.float32
    by_call = checkpoints_calls(spec.as_transformers) and not checkpoints_calls(None)
    if spec.gradient_checkpointing and by_call:
        _checkpoint_calls(FSDP.fsdp_modules(sharded))

    def synchronise(last: bool) -> AbstractContextManager[Any]:
        unit: Any
        for unit in FSDP.fsdp_modules(sharded):
            unit._sync_gradients = last
        return nullcontext()

    step.model = sharded
    step.clip = lambda parameters, norm, foreach: sharded.clip_grad_norm_(norm)
    step.optimizer = prepared.optimizer_plan.build(
        p for p in sharded.parameters() if p.requires_grad
    )
    step.forward_context = MicroBatches(spec, step.forward_context, synchronise)
    return step


def _checkpoint_calls(parts: list[Any]) -> None:
    """Checkpoint the calls of FSDP's units, as a model did that held them as its layers."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Checkpointed(FSDP):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            run = partial(super().__call__, **kwargs)
            module: Any = self.module
            return module._gradient_checkpointing_func(run, *args)

    for part in parts:
        if isinstance(part.module, GradientCheckpointingLayer):
            part.module.gradient_checkpointing = False
            part.__class__ = Checkpointed


def _wrap_policy(model: torch.nn.Module, spec: RunSpec) -> Any:
    """Blocks, and under adapters peft's ``fsdp_auto_wrap_policy``, which Trainer uses."""
    from torch.distributed.fsdp.wrap import CustomPolicy

    blocks = {id(model.get_submodule(name)) for name in wrapped_names(model, spec)}

    def wraps(module: torch.nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        leaf = not any(True for _ in module.children())
        trained = weight is not None and weight.requires_grad
        return id(module) in blocks or (spec.method != "full" and leaf and trained)

    return CustomPolicy(wraps)


def _data_mesh(model: torch.nn.Module, spec: RunSpec, device: str) -> Any:
    """The mesh of the ranks that share a copy of ``model``, or of a tensor-parallel part of it."""
    from torch.distributed.device_mesh import init_device_mesh

    shard = spec.shard_ranks
    if spec.ep > spec.tp and spec.ep_plan == "transformers":
        return replicas_of_experts(model)
    if spec.tp > 1:
        return sharing(tensor_parallel.mesh_of(model))
    sizes = (spec.gpus,) if shard == spec.gpus else (spec.gpus // shard, shard)
    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    with torch.profiler.record_function(HOST + "device mesh"):
        return init_device_mesh(device, sizes, mesh_dim_names=names)


def _deepspeed(prepared: Prepared, spec: RunSpec, device: str) -> Any:
    from llmem.measure.deepspeed_run import wrap

    return wrap(prepared, spec, device)


def _upcast_trained(model: torch.nn.Module) -> None:
    """fp32 masters of trained parameters (accelerate's ``fsdp2_prepare_model``)."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _zero(prepared: Prepared, spec: RunSpec, device: str) -> Any:
    try:
        from llmem.measure.deepspeed_run import wrap
    except ImportError as error:
        raise LlmemError(f"--strategy {spec.strategy} needs deepspeed: {error}") from error
    return wrap(prepared, spec, device)


_ENGINES: dict[str, Callable[[Prepared, RunSpec, str], Any]] = {
    "none": _single,
    "ddp": _ddp,
    "fsdp": _fsdp1,
    "fsdp2": _fsdp2,
    "zero1": _deepspeed,
    "zero2": _deepspeed,
    "zero3": _deepspeed,
}
