"""The parameters that ZeRO-3 gathers: which persist, and which modules ask for them.

DeepSpeed 0.19, runtime/zero/parameter_offload.py: ``mark_persistent_parameters`` and
``ZeROOrderedDict``.
"""

from __future__ import annotations

from llmem.lifetimes import Parameter, Trace
from llmem.parallel.zero.layout import owners_of
from llmem.parallel.zero.options import ZeroOptions
from llmem.parallel.zero.stage3_coordinator import Gathered

LORA_A = ".lora_A."
"""peft's LoRA layers read ``lora_A.weight.dtype`` in forward, which makes it an external parameter
of the layer as well (``ZeROOrderedDict.__getitem__``)."""


def gathered_by_key(parameters: list[Parameter], options: ZeroOptions) -> dict[int, Gathered]:
    """By key, with those that persist (``mark_persistent_parameters``)."""
    found, total = {}, 0
    for ds_id, p in enumerate(parameters):
        fits = p.numel + total <= options.zero.model_persistence_threshold
        persistent = fits and p.numel <= options.persistence
        total += p.numel if persistent else 0
        found[p.key] = Gathered(ds_id, p.key, p.numel, persistent, p.trainable)
    return found


def owned_by_module(
    trace: Trace, parameters: list[Parameter], gathered: dict[int, Gathered]
) -> dict[str, list[Gathered]]:
    """The parameters that each module fetches: its own, and those it was seen to touch."""
    owned: dict[str, list[Gathered]] = {}
    for parameter in parameters:
        modules = owners_of(trace, parameter)
        if LORA_A in parameter.name:
            modules.append(parameter.name.split(LORA_A)[0])
        for module in modules:
            owned.setdefault(module, []).append(gathered[parameter.key])
    return owned
