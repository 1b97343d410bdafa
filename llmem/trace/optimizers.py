"""Build the real optimizer that a ``TrainingArguments.optim`` name stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.optim_names import unknown_optimizer
from llmem.spec import RunSpec
from llmem.trace import optimizers_8bit
from llmem.trace.optimizers_8bit import Kind

LEARNING_RATE = 5e-5
"""``TrainingArguments.learning_rate``'s default; its value changes no byte."""

_TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "adamw_torch_fused": (torch.optim.AdamW, {"weight_decay": 0.0, "fused": True}),
    "adamw_torch_foreach": (torch.optim.AdamW, {"weight_decay": 0.0, "foreach": True}),
    "adamw_torch_single": (torch.optim.AdamW, {"weight_decay": 0.0, "foreach": False}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adafactor_torch": (torch.optim.Adafactor, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def _nothing(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Most optimizers treat all parameters alike."""


@dataclass(frozen=True)
class OptimizerPlan:
    """The class, its arguments and, in words, the implementation chosen and why.

    ``settle(model, optimizer)`` tells a new optimizer which parameters of the model it treats
    differently.
    """

    build: Callable[[Iterable[Any]], torch.optim.Optimizer]
    name: str
    implementation: str
    why: str
    settle: Callable[[torch.nn.Module, torch.optim.Optimizer], None] = _nothing


def plan_optimizer(optim: str, *, cuda: bool) -> OptimizerPlan:
    """What ``optim`` means where the step runs.

    torch picks ``foreach`` on CUDA and the single-tensor loop on CPU when nothing is asked
    (``torch.optim.optimizer._default_to_fused_or_foreach``); on meta tensors it would pick the
    loop, so the choice is made here and passed on. Raises LlmemError for an unknown name.
    """
    kind = optimizers_8bit.kind_of(optim)
    if kind is not None:
        return _bitsandbytes(kind, cuda=cuda)
    if optim == "adafactor":
        return OptimizerPlan(
            partial(_adafactor, cuda=cuda),
            "transformers.Adafactor",
            "single-tensor",
            "the only one it has; scale_parameter and relative_step off as Trainer passes them",
        )
    if optim not in _TORCH:
        raise LlmemError(unknown_optimizer(optim))
    cls, options = _TORCH[optim]
    if options.get("fused"):
        implementation, why = "fused", f"--optim {optim} asks for it"
    elif "foreach" in options:
        implementation = "foreach" if options["foreach"] else "single-tensor"
        why = f"--optim {optim} asks for it"
    elif optim == "adafactor_torch":
        implementation, why = "single-tensor", "torch.optim.Adafactor's default on every device"
    else:
        options = {**options, "foreach": cuda}
        implementation = "foreach" if cuda else "single-tensor"
        why = "torch's default for this device"
    return OptimizerPlan(
        lambda p: cls(p, lr=LEARNING_RATE, **options),
        f"torch.optim.{cls.__name__}",
        implementation,
        why,
    )


def _adafactor(parameters: Iterable[Any], *, cuda: bool) -> torch.optim.Optimizer:
    """transformers makes new states on the host and moves them to the gradient's device.

    Where that device is the host, there is nothing to move: on meta, new tensors are then made
    where the gradient is.
    """
    from transformers.optimization import Adafactor

    class OnHost(Adafactor):  # type: ignore[misc, unused-ignore]
        def step(self, closure: Any = None) -> Any:
            with self.param_groups[0]["params"][0].device:
                return super().step(closure)

    OnHost.__name__ = Adafactor.__name__
    cls = Adafactor if cuda else OnHost
    return cls(parameters, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)


def _bitsandbytes(kind: Kind, *, cuda: bool) -> OptimizerPlan:
    """Its states as bitsandbytes 0.50 makes them; its kernels allocate nothing."""
    how = "one kernel per parameter"
    if kind.bits == 8:
        how += (
            f"; states of 8 bits in blocks of {optimizers_8bit.BLOCK}, of fp32 below "
            f"{optimizers_8bit.MIN_8BIT_SIZE:,} elements and for nn.Embedding"
        )
    if kind.paged:
        how += (
            "; states of 100,000 elements or more in managed memory, which the GPU's allocator "
            "does not count: state_bytes says how much"
            if cuda
            else "; not paged on a CPU"
        )
    return OptimizerPlan(
        partial(optimizers_8bit.build, kind=kind, lr=LEARNING_RATE, cuda=cuda),
        f"bitsandbytes.optim.{kind.name}",
        how,
        "bitsandbytes 0.50",
        optimizers_8bit.keep_embeddings_in_32_bits if kind.bits == 8 else _nothing,
    )


def check_optimizer(spec: RunSpec) -> None:
    """Raises LlmemError for an optimizer that cannot work with the run's strategy."""
    if optimizers_8bit.kind_of(spec.optim) is None:
        return
    if spec.strategy == "fsdp2" or spec.tp > 1:
        raise LlmemError(
            f"bitsandbytes' {spec.optim} cannot update the DTensors of "
            f"{'--tp' if spec.tp > 1 else 'fsdp2'}; use adamw_torch or --strategy fsdp"
        )
    if spec.strategy == "fsdp" and spec.use_orig_params and "8bit" in spec.optim:
        raise LlmemError(
            f"{spec.optim} with --use-orig-params keeps embeddings' shards in 32 bits, which is "
            "not modelled; leave out --use-orig-params"
        )


@dataclass(frozen=True)
class StateSize:
    """What an optimizer keeps.

    ``elements``: numbers, those that Python holds (step counts) included; ``nbytes``: bytes of its
    tensors, wherever they are. A tensor that several parameters share counts once.
    """

    elements: int
    nbytes: int

    def to_json(self) -> dict[str, int]:
        return {"state_elements": self.elements, "state_bytes": self.nbytes}


def size_of_state(
    optimizer: torch.optim.Optimizer, local_of: Callable[[torch.Tensor], torch.Tensor]
) -> StateSize:
    """Counts ``optimizer.state``; ``local_of`` gives a tensor's part on this rank."""
    elements = nbytes = 0
    seen: set[int] = set()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                if id(value) in seen:
                    continue
                seen.add(id(value))
                numel = local_of(value).numel()
                elements += numel
                nbytes += numel * value.element_size()
            elif isinstance(value, (int, float)):
                elements += 1
    return StateSize(elements, nbytes)


def by_step(summary: dict[str, Any]) -> dict[str, Any]:
    """``summary`` (name, state_elements, state_bytes) with ``first`` and ``steady`` step.

    A summary has ``first`` itself where the first step leaves another state than the last.
    """
    keys = ("state_elements", "state_bytes")
    steady = {key: summary[key] for key in keys if key in summary}
    return {**summary, "first": summary.get("first", steady), "steady": steady}


_DEVICE_LISTS = (
    ("torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices"),
    ("torch.optim.optimizer", "_get_fused_kernels_supported_devices"),
)
"""Where torch looks up which devices have foreach and fused kernels."""


@contextmanager
def multi_tensor_ops_on_meta() -> Iterator[None]:
    """Let ``foreach=True`` and ``fused=True`` through on meta tensors, whose ops have meta kernels.

    torch checks the device against two lists, which are extended for the time of the trace. A
    torch without those names raises LlmemError.
    """
    with ExitStack() as stack:
        for module_name, name in _DEVICE_LISTS:
            module = import_module(module_name)
            original = getattr(module, name, None)
            if original is None:
                raise LlmemError(
                    f"torch {torch.__version__} has no {module_name}.{name}, so optimizers cannot be "
                    "traced with it; use a version that llmem was tested with (see constraints.txt)"
                )
            setattr(module, name, lambda known=original: [*known(), "meta"])
            stack.callback(setattr, module, name, original)
        yield
