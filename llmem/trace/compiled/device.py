"""A graph of meta tensors, as Inductor would get it from the target device.

AOTAutograd differentiates on meta, since fake tensors of a GPU cannot go backward on a machine that
has none. Inductor decides by device, so its graphs are relabelled before it sees them, and the GPU
answers its questions from a profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import _meta_registrations as meta_kernels
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from llmem.gpu.devices import DeviceProfile

HOST = torch.device("cpu")
META = torch.device("meta")
_LABELS = ("meta", "cpu", "cuda")


def relabel(graph: torch.fx.GraphModule, device: torch.device) -> None:
    """Every fake tensor and device argument in ``graph`` says ``device`` from here on."""
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = relabelled(node.meta["val"], device)
        node.args = torch.fx.node.map_aggregate(node.args, lambda arg: _named(arg, device))
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda arg: _named(arg, device))
    for inner in graph.children():
        if isinstance(inner, torch.fx.GraphModule):
            relabel(inner, device)


def relabelled(values: Any, device: torch.device) -> Any:
    """The fake tensors among ``values`` as ones of ``device``, with their shapes and strides."""
    return tree_map(lambda value: _moved(value, device), values)


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, FakeTensor) or value.fake_device.type not in _LABELS:
        return value
    if value.fake_device == device:
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _named(argument: Any, device: torch.device) -> Any:
    is_ours = isinstance(argument, torch.device) and argument.type in _LABELS
    return device if is_ours else argument


def device_of(profile: DeviceProfile) -> torch.device:
    """The device for which Inductor writes its program."""
    return torch.device("cuda", 0) if profile.is_cuda else HOST


@contextmanager
def answering_for(profile: DeviceProfile) -> Iterator[None]:
    """Inductor's questions about the GPU are answered from ``profile``."""
    if not profile.is_cuda:
        with _as_plain_meta():
            yield
        return
    import torch._inductor.scheduler as scheduler
    from torch._dynamo.device_interface import CudaInterface

    properties = _properties(profile)
    major, minor = profile.compute_capability

    def fixed(answer: Any) -> Any:
        return staticmethod(lambda *_, **__: answer)

    with ExitStack() as stack:
        stack.enter_context(_as_plain_meta())
        for name, answer in {
            "get_device_properties": properties,
            "get_compute_capability": major * 10 + minor,
            "current_device": 0,
            "is_triton_capable": True,
            "raise_if_triton_unavailable": None,
        }.items():
            if hasattr(CudaInterface, name):
                stack.enter_context(patch.object(CudaInterface, name, fixed(answer)))
        for name, answer in {
            "get_device_properties": properties,
            "get_device_capability": (major, minor),
            "current_device": 0,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, _answer=answer: _answer))
        stack.enter_context(patch.object(scheduler, "has_triton", lambda: True))
        yield


def _as_plain_meta() -> AbstractContextManager[Any]:
    """Fake tensors have the meta kernels that plain meta tensors have: those of a GPU.

    Where a graph says that it is of the host, some refuse what code that saw meta tensors does
    (``aten::histc`` of integers, by which transformers counts the tokens of each expert).
    """
    return patch.object(meta_kernels, "device_hint", lambda _: "cuda")


def _properties(profile: DeviceProfile) -> Any:
    """What ``torch.cuda.get_device_properties`` says, as far as Inductor reads it."""
    major, minor = profile.compute_capability
    return SimpleNamespace(
        name=profile.name,
        type="cuda",
        major=major,
        minor=minor,
        multi_processor_count=profile.sm_count,
        total_memory=profile.capacity,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=profile.max_threads_per_sm,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=profile.shared_memory_per_block,
        gcnArchName="",
    )
