"""ZeRO's ``step``, traced with the real optimizer on this rank's flat fp32 partitions.

The tensor operations of DeepSpeed 0.19, in their order: the gradient norm in fp64
(``get_grad_norm_direct``, ``get_norm_dtype``), one flat fp32 gradient per partition, unscaling
and clipping in place, the optimizer on the flat master, and the copy back into the 16-bit
partition (``DeepSpeedZeroOptimizer.step`` of runtime/zero/stage_1_and_2.py and stage3.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llmem.gpu.devices import DeviceProfile
from llmem.lifetimes import Category, Phase, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.sharded_step import device_of, splice_optimizer
from llmem.parallel.zero.options import ZeroOptions
from llmem.spec import RunSpec


@dataclass(frozen=True)
class GroupStep:
    """One flat partition of the optimizer: sizes in elements.

    ``norms`` are the gradients whose norm is taken one by one, ``parts`` what is concatenated to
    the flat gradient (empty if the gradients already lie in one). ``held`` is the buffer that the
    gradients are views of and that is freed once they are joined (0: it stays).
    """

    numel: int
    norms: tuple[int, ...]
    parts: tuple[int, ...] = ()
    held: int = 0


@dataclass(frozen=True)
class StepTrace:
    """The traced rounds; ``released[step][group]`` is the tick at which ``held`` is freed."""

    trace: Trace
    released: list[list[int]]

    def splice(self, editor: Editor) -> list[list[int]]:
        """Put the rounds in place of clipping and optimizer; returns ``released`` there."""
        place = splice_optimizer(editor, [], self.trace)
        return [[place(tick) for tick in ticks] for ticks in self.released]


def trace_step(
    groups: Sequence[GroupStep],
    options: ZeroOptions,
    spec: RunSpec,
    *,
    steps: int,
    gradient_dtype: str,
) -> StepTrace:
    """Trace ``steps`` rounds on meta; ``gradient_dtype`` is that of the reduced gradients.

    No batch is in it: a plan, which asks at every batch size, is given the same rounds again.
    """
    dtypes = options.param_dtype, gradient_dtype
    with_norm = options.zero.compute_grad_norm
    return _rounds(
        tuple(groups), dtypes, with_norm, spec.optim, spec.sdpa_backend, device_of(spec), steps
    )


@lru_cache(maxsize=16)
def _rounds(
    groups: tuple[GroupStep, ...],
    dtypes: tuple[str, str],
    with_norm: bool,
    optim: str,
    sdpa_backend: str | None,
    device: DeviceProfile,
    steps: int,
) -> StepTrace:
    import torch

    from llmem.trace.kernels import kernels_of, scratch_of
    from llmem.trace.optimizers import multi_tensor_ops_on_meta, plan_optimizer
    from llmem.trace.recorder import Recorder
    from llmem.trace.run import frees_by_reference_count

    param_dtype, gradient_dtype = dtypes
    masters = [torch.nn.Parameter(_empty(g.numel, "float32")) for g in groups]
    optimizer = plan_optimizer(optim, cuda=device.is_cuda).build(masters)
    recorder = Recorder(
        devices=frozenset({"meta"} if device.is_cuda else {"meta", "cpu"}),
        scratch=scratch_of(device) if device.is_cuda else None,
    )
    recorder.add_model(torch.nn.ParameterList(masters))
    low = [_empty(g.numel, param_dtype) for g in groups]
    gradients = [[_empty(g.held or g.numel, gradient_dtype) for g in groups] for _ in range(steps)]
    for tensor in low:
        recorder.add_existing(tensor, Category.PARAMETER)
    rows = [[recorder.add_existing(t, Category.GRADIENT) for t in row] for row in gradients]
    with ExitStack() as stack:
        stack.enter_context(kernels_of(device, recorder.note, sdpa_backend))
        for context in (multi_tensor_ops_on_meta(), frees_by_reference_count(), recorder):
            stack.enter_context(context)
        stack.enter_context(torch.no_grad())
        for step in range(steps):
            recorder.start_step(step)
            round_ = _Round(groups, masters, low, gradients[step], optimizer, recorder)
            round_(with_norm)
    trace = recorder.finish()
    trace.optimizer = {
        "name": type(optimizer).__name__,
        **{k: v for k, v in trace.optimizer.items() if k != "name"},
    }
    death = trace.lifetimes.death
    return StepTrace(trace, [[int(death[row]) for row in of_step] for of_step in rows])


def _empty(numel: int, dtype: str) -> Any:
    import torch

    return torch.empty(numel, dtype=getattr(torch, dtype), device="meta")


@dataclass
class _Round:
    """One call is one ``step`` of DeepSpeed's optimizer; ``gradients`` are used up by it."""

    groups: Sequence[GroupStep]
    masters: list[Any]
    low: list[Any]
    gradients: list[Any]
    optimizer: Any
    recorder: Any

    def __call__(self, with_norm: bool) -> None:
        import torch

        scale = None
        with self.recorder.in_phase(Phase.CLIP):
            if with_norm:
                norms = [_norm(g, t) for g, t in zip(self.groups, self.gradients, strict=True)]
                scale = torch.linalg.vector_norm(torch.stack(norms)) + 1e-6
                del norms
        with self.recorder.in_phase(Phase.OPTIMIZER):
            for index in range(len(self.groups)):
                self._update(index, scale)

    def _update(self, index: int, scale: Any) -> None:
        import torch

        group, master = self.groups[index], self.masters[index]
        gradient = self.gradients[index]
        if len(group.parts) > 1:
            sizes = group.parts
            gradient = torch.cat([_part(gradient, numel) for numel in sizes])
        else:
            gradient = gradient[: group.numel]
        master.grad = gradient.to(master.dtype)
        del gradient
        if group.held:
            self.gradients[index] = None
        if scale is not None:
            master.grad.mul_(1.0 / scale)
        everyone = self.optimizer.param_groups
        self.optimizer.param_groups = [{**everyone[0], "params": [master]}]
        self.optimizer.step()
        self.optimizer.param_groups = everyone
        self.recorder.after_optimizer(self.optimizer)
        master.grad = None
        self.low[index].copy_(master)


def _part(buffer: Any, numel: int) -> Any:
    """A tensor of ``numel`` elements over the buffer (which one does not matter)."""
    return buffer.as_strided((numel,), (1 if numel <= buffer.numel() else 0,))


def _norm(group: GroupStep, gradient: Any) -> Any:
    """``get_grad_norm_direct``: each gradient is copied to fp64."""
    import torch

    norms = [
        torch.linalg.vector_norm(_part(gradient, numel).to(torch.float64)) for numel in group.norms
    ]
    if not norms:
        return torch.zeros((), device="meta")
    return torch.stack(norms).pow(2.0).sum().float().pow(0.5)
