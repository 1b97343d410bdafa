"""The ranks of a process group: one of them alone on meta, and the device mesh of all.

A trace is of one rank, in a group that communicates with nobody. Ranks lie on a mesh in the order of
torchtitan's (``ParallelDims``: pp, dp_replicate, dp_shard, cp, tp) and accelerate's
(``ParallelismConfig``: dp_replicate, dp_shard, cp, tp): tensor-parallel ones are neighbours, then come
context-parallel ones, then data-parallel ones, then pipeline stages.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.library import Library

from llmem.errors import LlmemError
from llmem.spec import RunSpec

# -- meshes ----------------------------------------------------------------------------------------

MeshOf = Callable[[], Any]
"""Makes a mesh, or returns the one that it has made: not before a model is known to be split."""


def rank_mesh(spec: RunSpec, *, pp: int = 1) -> Any:
    """All ranks of the current process group as [pp, dp_replicate, dp_shard, cp, tp].

    The degrees of cp and tp are those of ``spec``; data-parallel dimensions take what the group has
    beyond, with more than one copy under HSDP. ``pp`` is 1 where a whole model is traced or cut, as a
    pipeline's one micro-batch is.
    """
    import torch.distributed as dist

    data = dist.get_world_size() // (pp * spec.cp * spec.tp)
    copies = max(data * spec.cp // spec.shard_ranks, 1)
    sizes = (pp, copies, data // copies, spec.cp, spec.tp)
    return make_mesh(sizes, ("pp", "dp_replicate", "dp_shard", "cp", "tp"))


def sharing(mesh: Any) -> Any:
    """The part of ``rank_mesh`` whose ranks FSDP shards over: dp_shard x cp, and copies of it under HSDP.

    torchtitan's ``fsdp`` (``dp_shard_cp`` until 2025), accelerate's ``dp_shard_cp``.
    """
    shard = "dp_shard"
    with torch.profiler.record_function("host:device mesh"):
        if mesh["cp"].size() > 1:
            shard = "dp_shard_cp"
            flat = mesh["dp_shard", "cp"]._flatten(shard)
        else:
            flat = mesh[shard]
        return flat if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", shard]


def make_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """A device mesh of the current process group, on the device that its backend serves."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    # Kept in host memory, which `llmem measure` tells by the range's name.
    with torch.profiler.record_function("host:device mesh"):
        return init_device_mesh(device, sizes, mesh_dim_names=names)


# -- one rank on meta ------------------------------------------------------------------------------


@contextmanager
def rank_of(degree: int, rank: int) -> Iterator[None]:
    """This process is ``rank`` of ``degree``, in a group whose collectives move nothing.

    Raises LlmemError if the process is already part of a group.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_available():
        raise LlmemError("this torch has no torch.distributed, which --tp needs; install another")
    if dist.is_initialized():
        raise LlmemError(
            "a rank of --tp cannot be traced inside a process group; trace in a process of its own"
        )
    with ExitStack() as stack:
        # init_process_group puts the rank's number before every uncaught error.
        stack.callback(setattr, sys, "excepthook", sys.excepthook)
        dist.init_process_group("fake", rank=rank, world_size=degree, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        _forget_shapes()
        stack.callback(_forget_shapes)
        _collectives_on_meta(stack)
        _propagation_unseen(stack)
        yield


def _forget_shapes() -> None:
    """DTensor keeps what it has worked out about ops, local shapes of this rank included."""
    from torch.distributed.tensor import debug

    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        clear = getattr(debug, name, None)
        if clear is not None:
            clear()
    native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if native is not None:
        native()


def _collectives_on_meta(stack: ExitStack) -> None:
    """Waiting for a collective returns its tensor; torch's meta kernels would make another one."""
    from torch.distributed import _functional_collectives as functional

    kernels: dict[str, Callable[[Any], Any]] = {
        "wait_tensor": lambda tensor: tensor,
        "_wrap_tensor_autograd": functional.AsyncCollectiveTensor,
    }
    library = Library("_c10d_functional", "IMPL")
    stack.callback(library._destroy)
    namespace = torch.ops._c10d_functional
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that are replaced on purpose
        for name, kernel in kernels.items():
            if hasattr(namespace, name):
                library.m.impl(name, "Meta", kernel)  # type: ignore[union-attr]


def _propagation_unseen(stack: ExitStack) -> None:
    """What DTensor and transformers compute on fake or meta tensors is not memory of the rank.

    Sharding propagation runs each new op once on fake tensors; transformers makes a meta tensor to
    read its strides.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
        _replace(stack, ShardingPropagator, name, _unseen(getattr(ShardingPropagator, name)))
    try:
        from transformers.distributed.tensor_parallel import TensorParallelLayer
    except ImportError:  # before 5.24, whose plan is refused; the other plans need none of it
        return
    _replace(
        stack, TensorParallelLayer, "_from_local_last_dim_shard", staticmethod(_last_dim_shard)
    )


def _unseen(function: Any) -> Any:
    """``function`` with no recorder watching."""
    from torch.utils._python_dispatch import _disable_current_modes

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _last_dim_shard(local: torch.Tensor, mesh: Any, size: int) -> Any:
    """``TensorParallelLayer._from_local_last_dim_shard`` with the strides worked out."""
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*local.shape[:-1], size))
    stride = make_contiguous_strides_for(shape)
    return DTensor.from_local(
        local, mesh, [Shard(-1)], run_check=False, shape=shape, stride=tuple(stride)
    )


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)
