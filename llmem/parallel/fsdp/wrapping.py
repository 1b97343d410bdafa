"""Which modules FSDP shards on their own: by class, or by number of parameters.

Read in torch/distributed/fsdp/wrap.py (``transformer_auto_wrap_policy``, ``_recursive_wrap`` with
``size_based_auto_wrap_policy``) and accelerate/utils/fsdp_utils.py
(``fsdp2_prepare_auto_wrap_policy``). The default is the classes in ``_no_split_modules``.
"""

from __future__ import annotations

from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.lifetimes import Together
from llmem.spec import RunSpec

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"""``EXCLUDE_WRAP_MODULES``; ``fully_shard`` refuses them too."""


def wrapped_names(model: torch.nn.Module, spec: RunSpec) -> list[str]:
    """Names of the modules of ``model`` that are units under ``spec``, the root left out.

    Raises LlmemError for a class that the model does not have, and for sizes with which accelerate's
    FSDP2 fails.
    """
    found = _chosen(model, spec)
    if found != _blocks(model):
        _check_tied(model, found)
    return found


def _blocks(model: torch.nn.Module) -> list[str]:
    from llmem.trace.build import blocks_of

    return blocks_of(model)


def _chosen(model: torch.nn.Module, spec: RunSpec) -> list[str]:
    classes = spec.fsdp_transformer_layer_cls_to_wrap
    if spec.fsdp_min_num_params:
        by_size = _by_size_2 if spec.strategy == "fsdp2" else _by_size_1
        return by_size(model, spec.fsdp_min_num_params)
    if classes is None:
        return _blocks(model)
    there = {type(module).__name__: type(module) for module in model.modules() if module is not model}
    for name in classes:
        if name not in there:
            raise LlmemError(
                f"the model has no module of class {name} to wrap; --fsdp-transformer-layer-cls-to-wrap "
                f"can name {', '.join(sorted(there))}"
            )
    chosen = tuple(there[name] for name in classes)
    return [name for name, module in model.named_modules() if name and isinstance(module, chosen)]


def _check_tied(model: torch.nn.Module, wrapped: list[str]) -> None:
    """A weight that two units share is untied by FSDP1; FSDP2 refuses it since torch 2.13."""
    unit_of: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = [unit for unit in wrapped if name.startswith(unit + ".")]
        unit = max(inside, key=len, default="")
        first, owner = unit_of.setdefault(id(parameter), (name, unit))
        if owner != unit:
            raise LlmemError(
                f"{first} and {name} are one weight, which FSDP cannot shard in two units "
                f"({owner or 'the root'} and {unit or 'the root'}); wrap modules that hold both, or none"
            )


def _by_size_1(model: torch.nn.Module, least: int) -> list[str]:
    """``size_based_auto_wrap_policy``: a module is wrapped when what no child took is large enough."""
    found: list[str] = []

    def visit(module: torch.nn.Module, name: str, root: bool) -> int:
        """Elements that ``module`` or a module inside it took."""
        whole = sum(p.numel() for p in module.parameters())
        if whole < least or isinstance(module, torch.nn.MultiheadAttention):
            # Not looked into: FORCE_LEAF_MODULES, or too small.
            return 0
        taken = sum(
            visit(child, f"{name}.{key}".lstrip("."), False) for key, child in module.named_children()
        )
        if root or isinstance(module, CONTAINERS) or whole - taken < least:
            return taken
        found.append(name)
        return whole

    visit(model, "", True)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=order.__getitem__)


def _by_size_2(model: torch.nn.Module, least: int) -> list[str]:
    """accelerate's FSDP2: every module with more parameters, whatever its children took."""
    found = []
    for name, module in model.named_modules():
        if not name or sum(p.numel() for p in module.parameters()) <= least:
            continue
        if isinstance(module, CONTAINERS):
            raise LlmemError(
                f"fully_shard refuses the container {name}, which accelerate's FSDP2 would wrap with "
                f"--fsdp-min-num-params {least}; use --fsdp-transformer-layer-cls-to-wrap, or --strategy "
                "fsdp"
            )
        found.append(name)
    return found


def units_together(model: Any, spec: RunSpec) -> list[Together]:
    """The units that accelerate makes beside the blocks: the embedding, and [final norm, head].

    Read in accelerate 1.15's ``fsdp2_prepare_model``: the embedding is a unit of its own, or, where
    the head has its weight, a part of the last one, which stays gathered after forward.
    """
    if spec.fsdp_units != "accelerate":
        return []
    names = {id(module): name for name, module in model.named_modules()}
    blocks = set(wrapped_names(model, spec))
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    tied = weights[0] is not None and weights[0] is weights[1]

    def named(modules: list[Any]) -> tuple[str, ...]:
        found = {names[id(module)] for module in modules if module is not None} - blocks
        return tuple(name for name in names.values() if name in found)

    norm = [_final_norm(model)]
    first, last = (named([]), named(norm + ends)) if tied else (named(ends[:1]), named(norm + ends[1:]))
    units = [Together(first, takes_ids=True, kept=False), Together(last, takes_ids=tied, kept=True)]
    return [unit for unit in units if unit.modules]


def _final_norm(model: Any) -> Any:
    """The last child of the base model whose class has "Norm" in its name, as accelerate finds it.

    A PeftModel's base is for accelerate the model with the head, where there is none: its norm stays
    in the root.
    """
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, torch.nn.Module) else ()
    norms = [child for child in children if "Norm" in type(child).__name__]
    return norms[-1] if norms else None
