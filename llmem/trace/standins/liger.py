"""Liger's kernels in a transformers model, as ``apply_liger_kernel_to_*`` puts them there.

linkedin/Liger-Kernel 0.8.0, src/liger_kernel/transformers/monkey_patch.py: RMSNorm, RoPE and the
gated MLP are replaced, and the causal LM's forward becomes ``lce_forward``, which makes the loss
from hidden states without logits (transformers/model/loss_utils.py ``LigerForCausalLMLoss``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.trace.standins import liger_ops, replaced

MODEL_TYPES = (
    "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama",
    "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "smollm3",
)  # fmt: skip
"""Text models of ``MODEL_TYPE_TO_APPLY_LIGER_FN`` that are acted out here."""

_NEW_GRADIENT = ("exaone4", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3")
"""Models whose RMSNorm is patched with ``in_place=False``."""


@contextmanager
def kernels(model: torch.nn.Module, device: DeviceProfile) -> Iterator[None]:
    """RMSNorm, RoPE and gated MLPs of ``model`` are Liger's for a while.

    Raises LlmemError if Liger has no patch for this type of model.
    """
    inner: Any = _bare(model)
    kind = _model_type(inner)
    code = sys.modules[type(inner).__module__]
    with ExitStack() as stack:
        if hasattr(code, "apply_rotary_pos_emb"):
            stack.enter_context(replaced(code, "apply_rotary_pos_emb", liger_ops.rope))
        for module in inner.modules():
            forward = _forward_of(module, device.sm_count, in_place=kind not in _NEW_GRADIENT)
            if forward is not None:
                stack.enter_context(replaced(module, "forward", forward))
        yield


@contextmanager
def loss(model: torch.nn.Module) -> Iterator[None]:
    """The causal LM's forward makes the loss by the fused linear cross-entropy, without logits."""
    inner: Any = _bare(model)
    _model_type(inner)
    if not hasattr(inner, "lm_head"):
        raise LlmemError(f"{type(inner).__name__} has no lm_head for Liger's loss; use --loss full")

    def forward(
        input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None, **others: Any
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if labels is None:
            raise LlmemError("Liger's loss needs labels in the batch")
        outputs = inner.base_model(input_ids=input_ids, **others)
        hidden = outputs[0]
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        value = liger_ops.fused_linear_cross_entropy(
            hidden.view(-1, hidden.shape[-1]), inner.lm_head.weight, shifted.view(-1)
        )
        return CausalLMOutputWithPast(loss=value, past_key_values=outputs.past_key_values)

    with replaced(inner, "forward", forward):
        yield


def _forward_of(module: Any, sm_count: int, *, in_place: bool) -> Any:
    """Liger's forward for one module, or None if it has none."""
    if type(module).__name__.endswith("RMSNorm"):
        return lambda x: liger_ops.rms_norm(
            x, module.weight, sm_count=sm_count, in_place=in_place
        )
    if _activation(module) not in ("silu", "swish", "gelu_pytorch_tanh"):
        return None
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        return lambda x: module.down_proj(
            liger_ops.gated(module.gate_proj(x), module.up_proj(x))
        )
    if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Module):
        return lambda x: module.down_proj(
            liger_ops.gated(*module.gate_up_proj(x).chunk(2, dim=-1))
        )
    return None


def _activation(module: Any) -> str:
    config = getattr(module, "config", None)
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return str(name)


def _bare(model: Any) -> Any:
    """The transformers model inside peft's wrapper."""
    getter = getattr(model, "get_base_model", None)
    return getter() if getter is not None else model


def _model_type(model: Any) -> str:
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if kind not in MODEL_TYPES:
        raise LlmemError(
            f"Liger has no kernels for model type '{kind}' here; it has them for "
            f"{', '.join(MODEL_TYPES)}"
        )
    return kind
