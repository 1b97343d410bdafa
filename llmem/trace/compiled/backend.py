"""The backend that Dynamo hands its graphs to: Inductor's own pipeline, ending in a program on meta."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from sympy import Integer  # type: ignore[import-untyped]
from torch._functorch import partitioners
from torch._inductor import compile_fx as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

from llmem.gpu.devices import DeviceProfile
from llmem.trace.compiled.codegen import without_kernels
from llmem.trace.compiled.composites import composites_fall_apart
from llmem.trace.compiled.device import (
    HOST,
    META,
    answering_for,
    device_of,
    relabel,
    relabelled,
)
from llmem.trace.compiled.program import load

Boxed = Callable[[list[Any]], Any]


class Backend:
    """A backend for ``torch.compile`` that compiles as Inductor does on a device.

    The functions that it returns take meta tensors and allocate what Inductor's would.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._device = device_of(profile)
        self.graphs = 0
        """Forward graphs compiled so far."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        with _as_on(self._profile, self._device):
            inner: Any = self._inner
            return inductor.compile_fx(graph, inputs, inner_compile=inner)

    def _inner(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Boxed:
        with _as_on(self._profile, self._device):  # backward is compiled when it is first called
            return _lower(graph, inputs, self._device, options)


@contextmanager
def _as_on(profile: DeviceProfile, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(composites_fall_apart())
        stack.enter_context(answering_for(profile))
        stack.enter_context(without_kernels(device))
        stack.enter_context(_joint_passes_on_the_host())
        # A recomputed op's random state is a few bytes on the host, read from a GPU that is not there.
        stack.enter_context(patch.object(partitioners, "functionalize_rng_ops", _as_they_are))
        yield


def _as_they_are(joint: Any, forward: Any, backward: Any, *_: Any) -> tuple[Any, Any]:
    return forward, backward


@contextmanager
def _joint_passes_on_the_host() -> Iterator[None]:
    """Passes over the joint graph fold constants by computing them: they take it as one of the CPU."""
    original = inductor._recursive_joint_graph_passes

    def passes(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        relabel(graph, HOST)
        done = original(graph, *args, **(kwargs | {"input_device": HOST}))
        relabel(done, META)  # what AOTAutograd goes on with
        return done

    with patch.object(inductor, "_recursive_joint_graph_passes", passes):
        yield


def _lower(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device, options: dict[str, Any]
) -> Boxed:
    """Passes, scheduling and code of Inductor for one graph, as ``compile_fx`` does them.

    Passes run ops on fake tensors from Python, whose bindings ask for a guard of the device that
    builds without CUDA do not have: so they still see the host, and are told that it is a GPU.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))  # as Inductor's own driver does
    backward, inference = options.get("is_backward", False), options.get("is_inference", False)
    post_grad.view_to_reshape(graph)
    relabel(graph, HOST)
    with torch.no_grad():
        mode = inductor.fake_tensor_prop(graph, relabelled(list(inputs), HOST))
    inductor._recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode):
        with patch.object(post_grad, "is_gpu", lambda _: device.type == "cuda"):
            inductor._recursive_post_grad_passes(graph, is_inference=inference)
        relabel(graph, device)
        examples = relabelled(list(inputs), device)
        lowering = GraphLowering(
            graph, example_inputs=examples, is_backward=backward, is_inference=inference
        )
        with ExitStack() as stack:
            stack.enter_context(inductor.maybe_disable_comprehensive_padding(examples))
            stack.enter_context(V.set_debug_handler(DebugContext()))
            stack.enter_context(V.set_graph_handler(lowering))
            lowering.run(*examples)
            _tell_strides(lowering)
            source: Any = lowering.codegen()[0]
    run: Any = load(getattr(source, "value", source), dict(lowering.constants))
    run._boxed_call = True  # it takes its arguments out of the list
    return run  # type: ignore[no-any-return]


def _tell_strides(lowering: GraphLowering) -> None:
    """AOTAutograd learns how Inductor lays out what it saves for backward (padded, on a GPU)."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    for output in lowering.graph_outputs:
        strides: Any = None
        if isinstance(output, IRNode) and output.has_tensor_output():
            strides = output.get_stride()
            fixed = all(isinstance(stride, (int, Integer)) for stride in strides)
            strides = tuple(map(int, strides)) if fixed else None
        context.output_strides.append(strides)
