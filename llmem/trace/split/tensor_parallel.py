"""Tensor parallelism: shard a model by a plan, and trace one rank of it.

The plan is carried out by transformers itself (its ``tp_plan``, ``distributed/tensor_parallel.py``)
or by torch's ``parallelize_module`` (``llmem.trace.split.tp_plans``): parameters become DTensors and
linear layers redistribute their inputs and outputs; or it is acted out on plain tensors
(``llmem.trace.split.tp_colossal``, ``llmem.trace.split.tp_megatron``). On meta the same code runs in a process group
that communicates with nobody, so collectives are ops like any other, and allocate what the real
ones allocate: a functional all-reduce a copy of its input, an all-gather an
output of all shards, and DTensor's ``cat`` or padding around it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.spec import RunSpec
from llmem.trace.split import tp_colossal, tp_megatron, tp_plans
from llmem.trace.split.process_group import MeshOf

# -- the model -------------------------------------------------------------------------------------


def shard(model: torch.nn.Module, spec: RunSpec, notes: list[str], mesh: MeshOf) -> None:
    """Give every parameter of ``model`` its part of ``spec.tp`` ranks of ``mesh`` (``rank_mesh``).

    Raises LlmemError if ``spec.tp_plan`` does not know the model, or cannot be carried out.
    """
    if spec.method != "full":
        raise LlmemError(
            f"--tp with --method {spec.method} is not supported yet; use --method full"
        )
    if spec.tp_plan == "torchtitan":
        said = tp_plans.parallelize(model, spec, lambda: mesh()["tp"])
        _own_memory(model)
    elif spec.tp_plan == "colossal":
        said = tp_colossal.parallelize(model, spec, lambda: mesh()["tp"])
    elif spec.tp_plan == "megatron":
        said = tp_megatron.parallelize(model, spec, lambda: mesh()["tp"])
    else:
        plan = _plan(model, spec)
        _untie(model)
        apply_plan(model, plan, mesh()["tp"])
        styles = sorted(set(plan.values()))
        said = (
            f"tensor parallelism: transformers' tp_plan of {type(model).__name__} on {spec.tp} "
            f"ranks ({', '.join(styles)}), every rank of them on the same batch"
        )
    tie: Any = model.tie_weights
    tie()
    notes.append(said)


def _untie(model: torch.nn.Module) -> None:
    """Give tied names a parameter each: transformers shards before it ties, by name."""
    seen: set[torch.Tensor] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in seen:
                copy = torch.empty_like(parameter)
                module._parameters[name] = torch.nn.Parameter(copy, parameter.requires_grad)
            elif parameter is not None:
                seen.add(parameter)


def _plan(model: torch.nn.Module, spec: RunSpec) -> dict[str, str]:
    """The plan with its layer numbers filled in: name of a module or parameter -> style."""
    if hasattr(model, "_resolve_parallel_plans") and not getattr(model, "tp_plan", None):
        raise LlmemError(f"transformers has no tp_plan for {type(model).__name__}; leave --tp out")
    tp_plans.check_heads(model, spec)
    try:
        from transformers.distributed import DistributedConfig

        resolve: Any = model._resolve_parallel_plans
        return dict(resolve(DistributedConfig(tp_size=spec.tp, ep_size=spec.ep))[0])
    except (ImportError, AttributeError) as error:
        raise LlmemError(
            "--tp needs transformers 5.24 or later, which shards by DTensor, or --tp-plan torchtitan; "
            f"{installed('transformers')} is installed ({error})"
        ) from None
    except ValueError as error:
        raise LlmemError(
            f"transformers refuses --tp {spec.tp}: {str(error).splitlines()[0]}"
        ) from None


def apply_plan(model: torch.nn.Module, plan: dict[str, str], mesh: Any) -> None:
    """Shard the parameters that ``plan`` names and hook its modules (transformers' styles).

    The name of a parameter shards it, the name of its module hooks that; both are needed.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        apply_tensor_parallelism(model, mesh, plan)
    except (ValueError, RuntimeError) as error:
        raise LlmemError(
            f"transformers cannot shard {type(model).__name__}: {str(error).splitlines()[0]}"
        ) from error
    _own_memory(model)


def _own_memory(model: torch.nn.Module) -> None:
    """Let shards be no views of whole parameters, as loaded ones are none."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            parameter._local_tensor = local.clone(memory_format=torch.contiguous_format)


def mesh_of(model: torch.nn.Module) -> Any:
    """The mesh of all ranks (``rank_mesh``) of which ``shard`` used a part."""
    meshes = (getattr(p, "device_mesh", None) for p in model.parameters())
    return next(mesh for mesh in meshes if mesh is not None)._get_root_mesh()


def sharded_dimensions(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Parameter name -> (dimension, its whole size), for parameters of which ranks hold chunks."""
    found: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (plain := getattr(parameter, "sharded_dimension", None)) is not None:
            found[name] = plain
        for placement in getattr(parameter, "placements", ()):
            if placement.is_shard():
                dimension = placement.dim % parameter.dim()
                found[name] = dimension, parameter.shape[dimension]
    return found


# -- the step --------------------------------------------------------------------------------------


def by_mesh(tensors: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters grouped by device mesh, plain ones apart, as Trainer makes optimizer groups.

    transformers/trainer.py, ``create_optimizer``: one kernel call cannot span meshes.
    """
    groups: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
    for tensor in tensors:
        groups[getattr(tensor, "device_mesh", None)].append(tensor)
    return list(groups.values())


def clip_by_mesh(
    parameters: list[torch.nn.Parameter], max_norm: float, foreach: bool | None = None
) -> None:
    """Gradient clipping across meshes: ``Trainer._mixed_mesh_grad_norm`` of transformers.

    One norm per mesh, reduced over it, then the norm of those. DTensors are no tensors that torch's
    own choice of ``foreach`` knows, so they are taken one by one.
    """
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    groups = by_mesh([p for p in parameters if p.grad is not None])
    choice = [None if isinstance(group[0], DTensor) else foreach for group in groups]
    norms = []
    for group, multi in zip(groups, choice, strict=True):
        norm: Any = get_total_norm([p.grad for p in group if p.grad is not None], foreach=multi)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group, multi in zip(groups, choice, strict=True):
        clip_grads_with_norm_(group, max_norm, total, foreach=multi)
