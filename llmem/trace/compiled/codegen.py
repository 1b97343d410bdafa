"""Inductor's program without the text of its kernels.

Scheduling, fusion, reuse in place, buffers, padded strides and frees are Inductor's own. A kernel is
never written out: where the program would launch it, it calls the op ``llmem::fused`` with the
kernel's name and the tensors that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.codegen import common
from torch._inductor.codegen.common import DeviceOpOverrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.ir import Buffer
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V


@contextmanager
def without_kernels(device: torch.device) -> Iterator[None]:
    """Inductor writes programs for ``device`` whose kernels are names."""
    kind = device.type
    scheduling: Any = _GpuScheduling if kind == "cuda" else _CpuScheduling
    common.init_backend_registration()
    common.get_device_op_overrides(kind)  # fills the registries, before they are changed
    with ExitStack() as stack:
        for registry, value in (
            (common.device_codegens, common.DeviceCodegen(scheduling, _Program)),
            (common.device_op_overrides_dict, _NoDevice()),
        ):
            stack.enter_context(patch.dict(registry, {kind: value}))
        stack.enter_context(patch.object(Scheduler, "enter_context", _announce(Scheduler.enter_context)))
        yield


def _announce(original: Callable[..., Any]) -> Callable[..., Any]:
    """The program also says which module it is in."""

    def enter_context(scheduler: Any, node: Any) -> Any:
        if (place := _module_of(node)) is not None:
            V.graph.wrapper_code.writeline(f"place({place!r})")
        return original(scheduler, node)

    return enter_context


def _module_of(node: Any) -> str | None:
    """Path of the module that the last of the ops fused in ``node`` comes from.

    The code of a compiled region's own module has no path: its ops count as those fused with them.
    """
    for part in reversed(node.get_nodes()):
        placed = [origin for origin in getattr(part.node, "origins", ()) if _stack_of(origin)]
        if placed:
            path = list(_stack_of(max(placed)).values())[-1][0]  # nodes of FX are ordered
            return str(path)
    return None


def _stack_of(origin: Any) -> Any:
    """The modules around an op, from the outermost in; of a backward's op, those of its forward's."""
    return origin.meta.get("nn_module_stack") or origin.meta.get("fwd_nn_module_stack")


class _Program(PythonWrapperCodegen):
    """The program's text."""

    @staticmethod
    def create(*args: Any, **kwargs: Any) -> Any:
        if args[0]:  # a subgraph of its own
            return PythonWrapperCodegen.create(*args, **kwargs)
        return _Program()

    def generate_kernel_call(self, kernel_name: str, call_args: Any, **_: Any) -> None:
        graph = V.graph
        tensors = [
            arg
            for arg in map(str, call_args)
            if arg in graph.graph_inputs or isinstance(graph.try_get_buffer(arg), Buffer)
        ]
        self.writeline(f"fused([{', '.join(tensors)}], {kernel_name!r})")

    def define_kernel(self, *_: Any, **__: Any) -> None:
        return None

    def write_triton_header_once(self) -> None:  # type: ignore[override]  # a cached method there
        return None


class _Silent(TritonKernel):  # type: ignore[misc]
    inductor_meta: dict[str, Any] = {}  # noqa: RUF012  made with the text, for the launch
    triton_meta: dict[str, Any] = {}  # noqa: RUF012

    def codegen_kernel(self, name: str | None = None) -> str:
        return ""


class _GpuScheduling(TritonScheduling):  # type: ignore[misc]
    """``CUDACombinedScheduling`` without CUTLASS templates, which only autotuning uses."""

    kernel_type = _Silent

    def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
        return f"triton_{get_fused_kernel_name(node_schedule, 'original_aten')}"


class _CpuScheduling(CppScheduling):  # type: ignore[misc]
    def define_kernel(self, src_code: str, nodes: Any, kernel_args: Any = None) -> str:
        return f"cpp_{get_fused_kernel_name(nodes, 'original_aten')}"


class _NoDevice(DeviceOpOverrides):
    """What a program says to its device: nothing."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"{name} = int"

    def set_device(self, device_idx: int) -> str:
        return "pass"

    def synchronize(self) -> str:
        return "pass"

    def device_guard(self, device_idx: int) -> str:
        return "nullcontext()"
