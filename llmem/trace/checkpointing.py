"""Gradient checkpointing in its forms: which layers, which ops, reentrant or not, kept where.

Layers are checkpointed as transformers does it (``activation_checkpointing_enable`` of
transformers/modeling_utils.py; every n-th layer there counts from the first). Selective
checkpointing by op is torch's ``create_selective_checkpoint_contexts`` with torchtitan's policy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.spec import RunSpec, checkpoints_reentrantly

aten = torch.ops.aten

MATMULS = (aten.mm.default, aten.addmm.default)
"""Of these, in the order of a layer's calls, every second one is computed again.

torchtitan/distributed/activation_checkpoint.py (2025) counts ``mm`` alone, its layers having no
biases; ``addmm`` is the same product with a bias.
"""

KEPT = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.max.default,
)
"""Ops whose outputs are always kept: torchtitan's ``_op_sac_save_list``, and SDPA on a CPU."""


def check_checkpointing(spec: RunSpec) -> None:
    """Raises LlmemError if the options of checkpointing contradict each other or the run."""
    asked = [
        option
        for option, given in (
            ("--checkpoint-every", spec.checkpoint_every > 1),
            ("--checkpoint-policy op", spec.checkpoint_policy == "op"),
            ("--use-reentrant", spec.use_reentrant is not None),
            ("--activation-offload", spec.activation_offload),
        )
        if given
    ]
    if asked and not spec.gradient_checkpointing:
        raise LlmemError(f"{asked[0]} says how to checkpoint; add --gradient-checkpointing")
    if spec.checkpoint_policy == "op" and is_reentrant(spec):
        raise LlmemError(
            "--checkpoint-policy op needs checkpoints that are not reentrant (torch has no "
            "context_fn for those); add --no-use-reentrant"
        )
    by_version = checkpoints_reentrantly(spec.as_transformers)
    if spec.strategy == "fsdp" and is_reentrant(spec) != by_version:
        raise LlmemError(
            "--strategy fsdp takes checkpoints as reentrant as that version of transformers has "
            "them; leave out --use-reentrant, or set --as-transformers"
        )
    if spec.activation_offload and spec.gpu == "cpu":
        raise LlmemError(
            "--activation-offload moves tensors from a GPU to the host; leave it out with --gpu cpu"
        )


def is_reentrant(spec: RunSpec) -> bool:
    """Whether checkpoints are reentrant: as asked, else as that version of transformers has them."""
    if spec.use_reentrant is not None:
        return spec.use_reentrant
    return checkpoints_reentrantly(spec.as_transformers)


def checkpoint_layers(
    model: torch.nn.Module, spec: RunSpec, notes: list[str], *, device: str
) -> None:
    """Let the layers of ``model`` be checkpointed as ``spec`` says.

    Raises LlmemError if the model's class does not support it.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise LlmemError(
            f"{type(model).__name__} does not support gradient checkpointing; "
            "leave --gradient-checkpointing out"
        )
    reentrant = is_reentrant(spec)
    # The RNG state is kept on the host; keeping it fails for meta tensors.
    options: dict[str, Any] = {"use_reentrant": reentrant, "preserve_rng_state": False}
    if spec.checkpoint_policy == "op":
        options["context_fn"] = selective_contexts
    enable(gradient_checkpointing_kwargs=options)
    if reentrant and spec.method != "full":  # as peft's and TRL's preparations do
        model.enable_input_require_grads()  # type: ignore[operator]
    which = "every layer"
    if spec.checkpoint_every > 1:
        _only_every(model, spec.checkpoint_every)
        which = f"one layer in {spec.checkpoint_every}, the first included"
    if spec.activation_offload:
        _keep_inputs_on_host(model, device)
    why = "transformers' default" if spec.use_reentrant is None else "as asked"
    notes.append(f"gradient checkpointing: {which}, use_reentrant {reentrant} ({why})")
    if spec.checkpoint_policy == "op":
        notes.append(
            "gradient checkpointing: outputs of SDPA and of every second matmul are kept "
            "(torchtitan's policy)"
        )
    if spec.activation_offload:
        notes.append(
            "activation offload: inputs of checkpointed layers wait in pinned host memory, copied "
            "on the compute stream"
        )


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """``context_fn`` of one checkpointed call: those of its forward and of its recomputation."""
    seen = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        keep = op in KEPT
        if op in MATMULS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return]


def _only_every(model: torch.nn.Module, step: int) -> None:
    """Checkpoint layers 0, ``step``, 2 ``step``, … of those that can be."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        raise LlmemError(
            "--checkpoint-every needs transformers 4.53 or later, whose layers checkpoint themselves; "
            f"{installed('transformers')} is installed"
        ) from None

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise LlmemError(
            f"{type(model).__name__} checkpoints no layers one by one; leave out --checkpoint-every"
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % step == 0


def _keep_inputs_on_host(model: torch.nn.Module, device: str) -> None:
    """What a checkpoint saves, its tensor arguments, goes through hooks (``offload=True`` there)."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            kept: Any = partial(_through_host, checkpoint, device)
            module._gradient_checkpointing_func = kept


def _through_host(checkpoint: Callable[..., Any], device: str, *args: Any, **kwargs: Any) -> Any:
    hooks: AbstractContextManager[Any] = (
        HostMemory() if device == "meta" else torch.autograd.graph.save_on_cpu(pin_memory=True)
    )
    with hooks:
        return checkpoint(*args, **kwargs)


class HostMemory(torch.autograd.graph.saved_tensors_hooks):
    """``torch.autograd.graph.save_on_cpu`` for meta tensors.

    A saved tensor is let go of when it is saved, and when backward asks for it a contiguous copy
    takes its place on the device.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _from_host(kept: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
    shape, dtype, device = kept
    return torch.empty(shape, dtype=dtype, device=device)
