"""A pipeline stage under FSDP2, as torchtitan applies it: layers first, then the stage."""

from __future__ import annotations

from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.measure.cpu_memory import HOST
from llmem.spec import RunSpec


def data_mesh(spec: RunSpec) -> Any:
    """The mesh of the replicas of this rank's stages; ranks are numbered (pp, replica)."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes, names = (spec.pp, spec.gpus // spec.pp), ("pp", "replica")
    if spec.dp_replicate_size or spec.hybrid_shard:
        raise LlmemError("--hybrid-shard with --pp cannot be measured; leave one of them out")
    with torch.profiler.record_function(HOST + "device mesh"):
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)["replica"]
