"""From a RunSpec to the model and the training step, ready to be traced or run."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch

from llmem import models
from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.adapters import check_adapters, with_adapters
from llmem.trace.as_transformers import dress
from llmem.trace.batch import batch_maker, note_packing
from llmem.trace.checkpointing import check_checkpointing, checkpoint_layers
from llmem.trace.compiled.regions import check_compile
from llmem.trace.in_backward import InBackward, check_in_backward, in_backward
from llmem.trace.losses import check_loss, chunk_loss
from llmem.trace.mixed_precision import mixed_precision
from llmem.trace.optimizers import OptimizerPlan, check_optimizer, plan_optimizer
from llmem.trace.quantize import finish, quantize
from llmem.trace.split.context_parallel import check_context_parallel, split_sequences
from llmem.trace.split.expert_parallel import check_expert_parallel, shard_experts
from llmem.trace.split.process_group import MeshOf, rank_mesh
from llmem.trace.split.tensor_parallel import by_mesh, clip_by_mesh, shard
from llmem.trace.split.tp_plans import check_tp_plan, step_class
from llmem.trace.step import TrainingStep


@dataclass
class Prepared:
    """A model, the step that trains it, and what was decided on the way."""

    model: torch.nn.Module
    step: TrainingStep
    optimizer_plan: OptimizerPlan
    head: set[str]
    assumptions: list[str] = field(default_factory=list)


def prepare(
    spec: RunSpec, *, device: str, cuda: bool, mesh: MeshOf | None = None
) -> Prepared:
    """Build what ``spec`` describes on ``device`` (``meta`` or ``cpu``).

    ``cuda`` says whose defaults count: those of a GPU or those of a CPU. ``mesh`` is that of all
    ranks (default: ``rank_mesh`` of the current process group).
    """
    mesh = mesh or cache(partial(rank_mesh, spec))
    notes: list[str] = [note_packing(spec)] if spec.packed else []
    for check in (
        check_adapters, check_optimizer, check_in_backward, check_checkpointing, check_loss,
        check_tp_plan, check_context_parallel, check_expert_parallel, check_compile,
    ):  # fmt: skip
        check(spec)
    model = build_model(spec, device, notes)
    dress(model, spec.as_transformers, notes.append)
    head = head_modules(model)
    quantize(model, spec, notes, cuda=cuda)
    if spec.method != "full":
        model = with_adapters(model, spec, notes, cuda=cuda)
        head = head_modules(model)
        finish(model, spec, notes)
    if spec.task == "generate":
        return _generation(model, spec, notes, head, device=device, cuda=cuda)
    _use_cache(model, spec, notes)
    if spec.gradient_checkpointing:
        checkpoint_layers(model, spec, notes, device=device)
    chunk_loss(model, spec, notes)
    plan = plan_optimizer(spec.optim, cuda=cuda)
    notes.append(f"optimizer: {plan.name}, {plan.implementation} ({plan.why})")
    if "max_grad_norm" not in spec.model_fields_set:
        why = "TrainingArguments' default; --max-grad-norm 0 turns it off"
        notes.append(f"gradients: clipped to norm {spec.max_grad_norm:g} ({why})")
    if spec.tp > 1:
        shard(model, spec, notes, mesh)
    if spec.ep > 1:
        shard_experts(model, spec, notes)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise LlmemError("no parameter of this model is trained; check --method and its targets")
    mixed = mixed_precision(spec, model, device, cuda=cuda, notes=notes)
    if spec.optimizer_in_backward:
        optimizer: torch.optim.Optimizer = in_backward(plan, model, trainable)
    else:
        optimizer = plan.build({"params": group} for group in by_mesh(trainable))
        plan.settle(model, optimizer)
    step = step_class(spec)(
        model=model,
        optimizer=optimizer,
        make_batch=batch_maker(model, spec, device),
        max_grad_norm=spec.max_grad_norm,
        clip_foreach=True,  # torch's own choice on CUDA and on CPU tensors
        clip=clip_by_mesh if spec.tp > 1 or spec.ep > 1 else torch.nn.utils.clip_grad_norm_,
        accumulation=spec.gradient_accumulation_steps,
        forward_context=mixed.forward_context,
        outputs_of=mixed.outputs_of,
        scaler=mixed.scaler,
        zero_grad=spec.zero_grad,
        hold_outputs=spec.hold_outputs,
    )
    if spec.cp > 1:
        split_sequences(step, spec, notes, mesh)
    if isinstance(optimizer, InBackward):
        optimizer.attach(step)
        notes.append("optimizer: one for each parameter, run in backward as its gradient is ready")
    return Prepared(model, step, plan, head, notes)


def _generation(
    model: torch.nn.Module, spec: RunSpec, notes: list[str], head: set[str], *, device: str, cuda: bool
) -> Prepared:
    from llmem.trace.generate import generation_step

    step = generation_step(model, spec, batch_maker(model, spec, device), notes)
    return Prepared(model, cast(Any, step), plan_optimizer(spec.optim, cuda=cuda), head, notes)


def build_model(spec: RunSpec, device: str, notes: list[str]) -> torch.nn.Module:
    """The bare model of ``spec``: built from its source, or the module or callable given."""
    if isinstance(spec.model, torch.nn.Module):
        notes.append("model: the nn.Module given")
        changed = (
            spec.method != "full" or spec.loss == "chunked" or spec.optimizer_in_backward
        )  # for good
        return deepcopy(spec.model) if changed else spec.model
    if callable(spec.model):
        with torch.device(device):
            made = spec.model()
        if not isinstance(made, torch.nn.Module):
            raise LlmemError(f"{spec.model!r} returned {type(made).__name__}, not an nn.Module")
        notes.append(f"model: what {getattr(spec.model, '__name__', spec.model)} returns")
        return made
    source = models.resolve(spec.model)
    attention = spec.attn_implementation
    model = models.build(
        source, dtype=spec.param_dtype, attn_implementation=attention, device=device
    )
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    why = "--param-dtype" if spec.param_dtype else "the config's own dtype"
    notes.append(f"model: {source.name} ({source.origin}), class {type(model).__name__}")
    notes.append(f"parameters: {' and '.join(dtypes)} ({why})")
    used = getattr(model.config, "_attn_implementation", None)
    chosen = "--attn-implementation" if attention else "transformers' default for this class"
    notes.append(f"attention: {used} ({chosen})")
    return model


def _use_cache(model: torch.nn.Module, spec: RunSpec, notes: list[str]) -> None:
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "use_cache", False):
        return
    config.use_cache = spec.use_cache
    if not spec.use_cache:
        notes.append("use_cache: off (TrainingArguments.use_cache's default)")
    elif spec.hold_outputs:
        notes.append("use_cache: on, keys and values live until the next forward")


def head_modules(model: torch.nn.Module) -> set[str]:
    """Names of the modules that turn hidden states into logits."""
    names: set[str] = set()
    getter = getattr(model, "get_output_embeddings", None)
    output = getter() if getter is not None else None
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if module is output or last in ("lm_head", "embed_out", "score", "classifier", "qa_outputs"):
            names.add(name)
    return names


def blocks_of(model: torch.nn.Module) -> list[str]:
    """Names of the modules that sharding engines wrap: the classes in ``_no_split_modules``."""
    classes: set[str] = set()
    for module in model.modules():
        classes.update(getattr(module, "_no_split_modules", None) or ())
    return [name for name, module in model.named_modules() if type(module).__name__ in classes]


def master_dtypes(model: torch.nn.Module, *, upcast: bool) -> dict[str, str]:
    """The dtype in which an engine keeps each parameter, by every name that it has.

    ``upcast``: trained parameters become fp32 masters, as accelerate makes them under FSDP with
    mixed precision (accelerate/utils/fsdp_utils.py and accelerator.py, since 0.24).
    """
    return {
        name: "float32"
        if upcast and parameter.requires_grad
        else str(parameter.dtype).removeprefix("torch.")
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def compute_in(model: torch.nn.Module, dtype: str, *, adapters: bool = True) -> None:
    """Give every floating-point parameter the dtype that it has while the engine computes.

    Not LoRA's without ``adapters``: the engine ignores them.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or (not adapters and ".lora_" in name):
            continue
        converted = parameter.data.to(getattr(torch, dtype))
        if type(converted) is torch.Tensor:
            parameter.data = converted
        else:  # setting the data of a DTensor leaves its local tensor as it was
            new = torch.nn.Parameter(converted, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, new)
