"""Liger's kernels in a transformers model, where ``liger_families`` says they go.

The causal LM's forward becomes ``lce_forward``, which makes the loss from hidden states without
logits (linkedin/Liger-Kernel, src/liger_kernel/transformers/model/loss_utils.py
``LigerForCausalLMLoss``); only Granite keeps its logits by default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.trace.standins import (
    liger_activations,
    liger_moe,
    liger_ops,
    liger_positions,
    replaced,
)
from llmem.trace.standins.liger_families import FAMILIES, Family

MODEL_TYPES = tuple(sorted(FAMILIES))
"""Families of ``MODEL_TYPE_TO_APPLY_LIGER_FN`` that are acted out here."""

_ROPES: dict[str, Callable[..., Any]] = {
    "apply_rotary_pos_emb": liger_ops.rope,
    "apply_multimodal_rotary_pos_emb": liger_positions.qwen2vl_mrope,
    "apply_rotary_emb": liger_positions.llama4_rope,
}

Forward = Callable[..., Any]


@contextmanager
def kernels(model: torch.nn.Module, device: DeviceProfile) -> Iterator[list[str]]:
    """Norms, RoPE, MLPs and experts of ``model`` are Liger's for a while.

    Yields what is assumed, in words. Raises LlmemError if Liger has no patch for this type of model.
    """
    inner: Any = _bare(model)
    family = FAMILIES[_model_type(inner)]
    code = sys.modules[type(inner).__module__]
    changed: set[str] = set()
    with ExitStack() as stack:
        if family.rope and hasattr(code, family.rope):
            stack.enter_context(replaced(code, family.rope, _ROPES[family.rope]))
        text = getattr(_body(inner), "language_model", _body(inner))
        last = getattr(text, family.last, None) if family.last else None
        for name, module in inner.named_modules():
            forward = _forward_of(name, module, family, device.sm_count, is_last=module is last)
            if forward is not None:
                stack.enter_context(replaced(module, "forward", forward))
                changed.add(name.rsplit(".", 1)[-1])
        yield [liger_moe.BALANCED] if "experts" in changed else []


@contextmanager
def loss(model: torch.nn.Module, *, by_default: bool = False) -> Iterator[str]:
    """The causal LM's forward makes the loss by the fused linear cross-entropy, without logits.

    ``by_default``: unless Liger leaves that out for the family. Yields what is done, in words.
    """
    inner: Any = _bare(model)
    family = FAMILIES[_model_type(inner)]
    if by_default and not family.fused_loss:
        with replaced(F, "cross_entropy", _cross_entropy):
            yield "Liger: cross-entropy over the logits in place"
        return
    if not hasattr(inner, "lm_head"):
        raise LlmemError(f"{type(inner).__name__} has no lm_head for Liger's loss; use --loss full")

    def forward(
        input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None, **others: Any
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if labels is None:
            raise LlmemError("Liger's loss needs labels in the batch")
        outputs = _body(inner)(input_ids=input_ids, **others)
        hidden = outputs[0]
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        value = liger_ops.fused_linear_cross_entropy(
            hidden.view(-1, hidden.shape[-1]), inner.lm_head.weight, shifted.view(-1)
        )
        return CausalLMOutputWithPast(loss=value, past_key_values=outputs.past_key_values)

    with replaced(inner, "forward", forward):
        yield "Liger: fused linear cross-entropy, no logits"


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *others: Any, reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """``liger_cross_entropy``, with the arguments of torch's."""
    return liger_ops.cross_entropy(logits, target, per_row=reduction == "none")


def _forward_of(
    name: str, module: Any, family: Family, sm_count: int, *, is_last: bool
) -> Forward | None:
    """Liger's forward for one module, or None if it keeps its own."""
    *parents, own = name.split(".")
    if is_last:
        return _rms_norm(module, sm_count, in_place=family.new_gradient != "all")
    if "layers" in parents and own in family.norms:
        return _rms_norm(module, sm_count, in_place=not family.new_gradient)
    if "blocks" in parents and own in family.vision_norms:
        return _rms_norm(module, sm_count, in_place=True)
    if "blocks" in parents and own in family.layer_norms:
        return lambda x: liger_ops.layer_norm(x, module.weight, module.bias, sm_count=sm_count)
    if "layers" not in parents:
        return None
    if family.experts and own == "experts" and hasattr(module, "gate_up_proj"):
        return _experts(module)
    if family.squared and own == "act_fn":
        return liger_activations.relu_squared
    return _gated_mlp(module) if own in family.mlps else None


def _rms_norm(module: Any, sm_count: int, *, in_place: bool) -> Forward | None:
    """None for a norm without a weight, which Liger leaves alone."""
    if getattr(module, "weight", None) is None:
        return None
    return lambda x: liger_ops.rms_norm(x, module.weight, sm_count=sm_count, in_place=in_place)


def _gated_mlp(module: Any) -> Forward | None:
    """Separate gate and up projections, or both as one (Phi-3, GLM-4)."""
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        return lambda x: module.down_proj(liger_ops.gated(module.gate_proj(x), module.up_proj(x)))
    if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Module):
        return lambda x: module.down_proj(
            liger_ops.gated(*module.gate_up_proj(x).chunk(2, dim=-1))
        )
    return None


def _experts(module: Any) -> Forward:
    """``LigerExperts``: hidden states [T, H], the router's choices and weights [T, K]."""

    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        each = chosen.view(-1, chosen.shape[-1]).to(torch.int32)
        out = liger_moe.fused_moe(
            rows, module.gate_up_proj, module.down_proj, each, weights.view(each.shape)
        )
        return out.view(x.shape)

    return forward


def _bare(model: Any) -> Any:
    """The transformers model inside peft's wrapper."""
    getter = getattr(model, "get_base_model", None)
    return getter() if getter is not None else model


def _body(model: Any) -> Any:
    """The model under the head; Llama 4's is not where its ``base_model`` looks."""
    return model.model if model.base_model is model else model.base_model


def _model_type(model: Any) -> str:
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if kind not in FAMILIES:
        raise LlmemError(
            f"Liger has no kernels for model type '{kind}' here; it has them for "
            f"{', '.join(MODEL_TYPES)}"
        )
    return kind
