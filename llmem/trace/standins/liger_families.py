"""What Liger replaces in a model of each family, as transformers' Trainer has it patch one.

linkedin/Liger-Kernel 0.8.2, src/liger_kernel/transformers/monkey_patch.py: the part of each
``apply_liger_kernel_to_*`` under ``if model is not None``, with the defaults of its arguments
(``_apply_liger_kernel_to_instance``, which ``use_liger_kernel`` calls, transformers 5.24
integrations/liger.py). Patching the classes before a model is made reaches a little more: the
norms of queries and keys in qwen3, qwen3_moe and the like. No family gets the fused residual and
norm, group norm or DyT: those are layers for models that are written with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ROPE = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class Family:
    """Names of what is replaced: functions of the model's code, modules inside its layers."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """RMSNorms of a layer."""
    last: str = "norm"
    """The RMSNorm after the layers; empty if it is left alone."""
    new_gradient: Literal["", "layers", "all"] = ""
    """Norms whose gradient is another tensor (``in_place=False``)."""
    rope: str = ROPE
    """Function of the model's code; empty if it is left alone."""
    mlps: tuple[str, ...] = ("mlp",)
    """Gated MLPs: SwiGLU and GEGLU allocate the same."""
    experts: bool = False
    """Whether experts [E, ...] run as one fused kernel."""
    squared: bool = False
    """Whether the MLP's activation is ReLU squared."""
    layer_norms: tuple[str, ...] = ()
    """LayerNorms of the vision tower's blocks."""
    vision_norms: tuple[str, ...] = ()
    """RMSNorms of the vision tower's blocks."""
    fused_loss: bool = True
    """Whether the loss is made from hidden states; else Liger's cross-entropy replaces torch's."""


_LLAMA = Family()
_AROUND = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEADS = ("q_norm", "k_norm")
_GEMMA2 = Family(norms=(*_LLAMA.norms, *_AROUND), new_gradient="all")
_OLMO2 = Family(
    norms=("post_attention_layernorm", "post_feedforward_layernorm"), new_gradient="layers"
)
_QWEN_NEXT = Family(new_gradient="all", rope="", mlps=("mlp", "shared_expert"), experts=True)
_MULTIMODAL_ROPE = "apply_multimodal_rotary_pos_emb"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("gemma", "hunyuan_v1_dense", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3",
         "smollm3"), _LLAMA,
    ),
    **dict.fromkeys(
        ("hunyuan_v1_moe", "mixtral", "qwen3_moe"), Family(mlps=(), experts=True)
    ),
    "deepseek_v4": Family(rope="", mlps=()),
    "exaone4": replace(
        _OLMO2, norms=(*_OLMO2.norms, *_HEADS), new_gradient="all"
    ),
    "falcon_h1": Family(
        norms=("input_layernorm", "pre_ff_layernorm"), last="final_layernorm",
        mlps=("feed_forward",),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, norms=(*_GEMMA2.norms, *_HEADS)),
    "gemma4_text": replace(_GEMMA2, norms=(*_GEMMA2.norms, *_HEADS, "v_norm"), rope=""),
    "glm4": Family(
        norms=(*_LLAMA.norms, "post_self_attn_layernorm", "post_mlp_layernorm"),
        new_gradient="all", rope="",
    ),
    "gpt_oss": Family(mlps=()),
    "granite": Family(fused_loss=False),
    "llama4_text": Family(rope="apply_rotary_emb", mlps=("feed_forward", "shared_expert")),
    "nemotron": Family(norms=(), last="", rope="", mlps=(), squared=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "qwen2_vl": Family(rope=_MULTIMODAL_ROPE, layer_norms=("norm1", "norm2")),
    "qwen2_5_vl": Family(rope=_MULTIMODAL_ROPE, vision_norms=("norm1", "norm2")),
    "qwen3_5_moe_text": replace(_QWEN_NEXT, mlps=("shared_expert",)),
    "qwen3_5_text": Family(new_gradient="all", rope=""),
    "qwen3_next": _QWEN_NEXT,
}  # fmt: skip
"""``model_type`` -> what is replaced: the families that are acted out here."""
