"""FSDP2 as accelerate prepares it: its own ``fsdp2_prepare_model`` on a model, without a launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.parallel.fsdp.fsdp2_ranks import DTYPES
from llmem.spec import RunSpec

POLICIES = {
    "class": "TRANSFORMER_BASED_WRAP",
    "size": "SIZE_BASED_WRAP",
    "none": "NO_WRAP",
}


def prepare_model(model: torch.nn.Module, spec: RunSpec, mesh: Any, offload_policy: Any) -> Any:
    """Shard ``model`` in place over ``mesh``; returns it.

    accelerate's function gets its plugin, and of an Accelerator what it reads. Raises LlmemError
    without accelerate.
    """
    try:
        from accelerate import __version__
        from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
    except ImportError as error:
        raise LlmemError(f"--fsdp-units accelerate needs accelerate: {error}") from error
    if not hasattr(fsdp_utils, "_find_final_norm"):
        raise LlmemError(
            f"accelerate {__version__} shards other units than 1.15, which --fsdp-units accelerate "
            "stands for; install accelerate>=1.15"
        )
    classes = spec.fsdp_transformer_layer_cls_to_wrap
    by = "size" if spec.fsdp_min_num_params else "none" if classes == () else "class"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=spec.reshard_after_forward,
        mixed_precision_policy=_policy(spec),
        auto_wrap_policy=POLICIES[by],
        transformer_cls_names_to_wrap=list(classes) if classes else None,
        min_num_params=spec.fsdp_min_num_params,
        cpu_ram_efficient_loading=False,
        cpu_offload=offload_policy or False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=_WholeMesh(mesh),
        parallelism_config=SimpleNamespace(fsdp_dim_names=()),
        mixed_precision="no" if spec.autocast_dtype is None else spec.autocast_dtype,
        is_main_process=False,
        device=None,
    )
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


class _WholeMesh:
    """A mesh of nothing but the data-parallel ranks: whatever part is asked for, it is all."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def __getitem__(self, names: Any) -> Any:
        return self._mesh


def _policy(spec: RunSpec) -> Any:
    """``MixedPrecisionPolicy``: the plugin's ``set_mixed_precision``, but for ``--reduce-dtype``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if spec.autocast_dtype is None:
        return None
    dtype = getattr(torch, spec.autocast_dtype)
    reduced = getattr(torch, DTYPES[spec.reduce_dtype])
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=dtype)
