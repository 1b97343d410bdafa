"""fms-acceleration's fused ops and kernels in a transformers model.

foundation-model-stack/fms-acceleration 733992a and 24bdadb, plugins/fused-ops-and-kernels/src/
fms_acceleration_foak: framework_plugin_fast_kernels.py and models/*.py say what is patched,
configs and sample-configurations/*foak* with which settings; the kernels are in ``foak_ops`` and
``foak_lora``.

``foak``: cross-entropy whose gradient is written over the logits, RMSNorm, RoPE. ``foak-liger``:
Liger's fused linear cross-entropy (as of 0.4) instead of the first. With 4-bit weights both fuse
LoRA's products on q, k, v and o, and FSDP leaves the adapters alone: each rank has all of them, whose
gradients hooks average (utils.py, ``lora_adapters_switch_ddp_from_fsdp``). All switches are taken as
on; the shipped configuration for 4-bit weights and Liger's loss misspells ``fast_rms_layernorm``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.trace.standins import foak_lora, foak_ops, liger_ops, replaced

MODEL_TYPES = ("granite", "granitemoe", "llama", "mistral", "mixtral")
"""Models with rules in ``fms_acceleration_foak/models`` that are acted out here."""


@contextmanager
def kernels(
    model: torch.nn.Module, kind: str, *, adapters: bool, note: Callable[[str], None]
) -> Iterator[None]:
    """``model`` has the kernels of ``kind`` (``foak`` or ``foak-liger``) for a while.

    ``adapters``: LoRA's products on 4-bit weights are fused too.

    Raises LlmemError if the library has no rules for this type of model.
    """
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    name = str(getattr(getattr(inner, "config", None), "model_type", type(inner).__name__))
    if name not in MODEL_TYPES:
        raise LlmemError(
            f"fms-acceleration has no kernels for model type '{name}' here; it has them for "
            f"{', '.join(MODEL_TYPES)}"
        )
    code = sys.modules[type(inner).__module__]
    said = ["RMSNorm, RoPE"]
    with ExitStack() as stack:
        stack.enter_context(replaced(code, "apply_rotary_pos_emb", foak_ops.rope))
        if kind == "foak":
            stack.enter_context(_fast_loss())
            said.append("cross-entropy in place")
        else:
            stack.enter_context(replaced(inner, "forward", _lce_forward(inner)))
            said.append("fused linear cross-entropy, no logits")
        _fuse_norms(inner, stack)
        if adapters and _fuse_adapters(inner, stack):
            said.append("LoRA's products on 4-bit weights")
        note(f"fms-acceleration's kernels: {', '.join(said)} (as of December 2024)")
        yield


def _fuse_norms(model: torch.nn.Module, stack: ExitStack) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            stack.enter_context(replaced(module, "forward", _norm(module)))


def _norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: foak_ops.rms_norm(x, module.weight)


# -- losses ------------------------------------------------------------------------------------------


@contextmanager
def _fast_loss() -> Iterator[None]:
    """``FastForCausalLMLoss``; where logits were shifted before it, they still are once."""
    from transformers.loss import loss_utils

    def of_rows(
        source: torch.Tensor, target: torch.Tensor, num_items_in_batch: Any = None,
        ignore_index: int = -100, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        return foak_ops.cross_entropy(source, target, num_items_in_batch)

    def loss(
        logits: torch.Tensor, labels: torch.Tensor, vocab_size: int,
        num_items_in_batch: Any = None, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        logits = logits.float()
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return of_rows(shift_logits.view(-1, vocab_size), shift_labels.view(-1), num_items_in_batch)

    installed = loss_utils.LOSS_MAPPING["ForCausalLM"]
    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    try:
        with replaced(loss_utils, "fixed_cross_entropy", of_rows):
            yield
    finally:
        loss_utils.LOSS_MAPPING["ForCausalLM"] = installed


def _lce_forward(model: Any) -> Callable[..., Any]:
    """``lce_forward``: hidden states without the last token's are copied and go into the loss."""

    def forward(labels: torch.Tensor | None = None, **others: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if labels is None:
            raise LlmemError("the fused linear cross-entropy needs labels in the batch")
        outputs = model.base_model(**others)
        hidden = outputs[0][..., :-1, :].contiguous()
        shifted = labels[..., 1:].contiguous()
        value = liger_ops.fused_linear_cross_entropy(
            hidden.view(-1, hidden.shape[-1]), model.lm_head.weight, shifted.view(-1), upcast=True
        )
        return CausalLMOutputWithPast(
            loss=value, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    return forward


# -- fused LoRA --------------------------------------------------------------------------------------


def _fuse_adapters(model: torch.nn.Module, stack: ExitStack) -> bool:
    """Fuse q, k and v where all three have adapters, and o where it has one."""
    any_fused = False
    for module in model.modules():
        for names, patches in (
            (("q_proj", "k_proj", "v_proj"), _fused_qkv), (("o_proj",), _fused_one),
        ):  # fmt: skip
            layers = [getattr(module, name, None) for name in names]
            if all(_has_adapter(layer) for layer in layers):
                for owner, forward in patches(layers):
                    stack.enter_context(replaced(owner, "forward", forward))
                any_fused = True
    return any_fused


def _has_adapter(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("lora_A", "lora_B", "base_layer"))


def _fused_qkv(layers: list[Any]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """The first of the three that is called computes all; each hands out its own."""
    waiting: dict[int, torch.Tensor] = {}

    def forward_of(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not waiting:
                outs = foak_lora.products(x, [foak_lora.layer_of(layer) for layer in layers])
                waiting.update(enumerate(outs))
                del outs
            return waiting.pop(number)

        return forward

    for number, layer in enumerate(layers):
        yield layer, forward_of(number)


def _fused_one(layers: list[Any]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    (layer,) = layers
    yield layer, lambda x: foak_lora.products(x, [foak_lora.layer_of(layer)])[0]

