"""What the engines do with experts of which each rank holds a part: their own units and groups.

Ranks that hold the same experts are every ``ep``-th; only they exchange the experts' gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.split.expert_parallel import replicas_of_experts, split_experts


def check_measurable(spec: RunSpec) -> None:
    """Raises LlmemError for an expert-parallel run that cannot be carried out here."""
    if spec.ep == 1:
        return
    if spec.routing_balance != 1:
        raise LlmemError(
            "--ep is measured with its tokens dealt out evenly; leave --routing-balance out"
        )
    if spec.fsdp_units == "accelerate":
        raise LlmemError(
            "accelerate's FSDP2 knows no mesh of experts; measure --ep without --fsdp-units accelerate"
        )
    if spec.ep_plan == "transformers" and spec.shard_ranks != spec.gpus // spec.tp:
        raise LlmemError(
            "hybrid sharding of ranks that share a batch cannot be measured; use --ep-plan alltoall"
        )


def shard_experts_apart(model: torch.nn.Module, spec: RunSpec, options: dict[str, Any]) -> None:
    """``fully_shard`` on each module of experts, over the ranks that hold the same ones.

    As ``apply_fully_sharded_data_parallelism`` of transformers 5.24 does: gradients are sums over all
    batches, divided by their number; where there is somebody to reduce with, as sums, which every
    backend can do. ``options`` are the other units', whose mesh is another.
    """
    from torch.distributed.fsdp import fully_shard

    for name in split_experts(model):
        module: Any = model.get_submodule(name)
        mesh = replicas_of_experts(model)
        fully_shard(module, **{**options, "mesh": mesh}, reshard_after_forward=spec.reshards)
        module.set_gradient_divide_factor(float(spec.batches))
        if mesh.size(-1) > 1:
            module.set_force_sum_reduction_for_comms(True)


def reduce_experts_apart(
    model: torch.nn.Module, spec: RunSpec, options: dict[str, Any]
) -> list[Any]:
    """Wrap each module of experts in a DistributedDataParallel of its own, for the whole one to skip.

    Where ranks share a batch, nobody else holds a rank's experts, or these are frozen, there is nothing to
    wrap; in the first case ``options`` get the group of those that hold the same part.
    """
    from torch.nn.parallel import DistributedDataParallel

    names = split_experts(model)
    if not names:
        return []
    group = replicas_of_experts(model).get_group()
    if spec.ep_plan == "transformers":
        options["process_group"] = group
        return []
    made = []
    trained = [n for n in names if any(p.requires_grad for p in model.get_submodule(n).parameters())]
    for name in trained if spec.gpus > spec.ep else ():
        parent, _, child = name.rpartition(".")
        apart = DistributedDataParallel(model.get_submodule(name), **{**options, "process_group": group})
        setattr(model.get_submodule(parent), child, apart)
        made.append(apart)
    inside = tuple(f"{name}." for name in names)
    ignored = [name for name, _ in model.named_parameters() if name.startswith(inside)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return made
