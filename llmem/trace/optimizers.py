"""Build the real optimizer that a ``TrainingArguments.optim`` name stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from llmem.errors import LlmemError

LEARNING_RATE = 5e-5
"""``TrainingArguments.learning_rate``'s default; its value changes no byte."""


@dataclass(frozen=True)
class OptimizerPlan:
    """The class, its arguments and, in words, the implementation chosen and why."""

    build: Callable[[Iterable[Any]], torch.optim.Optimizer]
    name: str
    implementation: str
    why: str


def plan_optimizer(optim: str, *, cuda: bool) -> OptimizerPlan:
    """What ``optim`` means where the step runs.

    torch picks ``foreach`` on CUDA and the single-tensor loop on CPU when nothing is asked
    (``torch.optim.optimizer._default_to_fused_or_foreach``); on meta tensors it would pick the
    loop, so the choice is made here and passed on.
    """
    if optim == "adafactor":
        from transformers.optimization import Adafactor

        return OptimizerPlan(
            lambda p: Adafactor(p, lr=LEARNING_RATE, scale_parameter=False, relative_step=False),
            "transformers.Adafactor",
            "single-tensor",
            "the only one it has; scale_parameter and relative_step off as Trainer passes them",
        )
    classes: dict[str, tuple[Any, dict[str, Any]]] = {
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
    if optim not in classes:
        raise LlmemError(f"unknown optimizer '{optim}'; known are {', '.join(classes)}, adafactor")
    kind, options = classes[optim]
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
        lambda p: kind(p, lr=LEARNING_RATE, **options),
        f"torch.optim.{kind.__name__}",
        implementation,
        why,
    )


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
