"""The handful of numbers by which formula-based estimators know a transformer.

Configs name them differently (`n_embd`, `d_model`, `ffn_dim`, …); here they get one name each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "decoder_ffn_dim")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
GATED_WEIGHTS = ("gate_proj", "gate_up_proj")


@dataclass(frozen=True)
class TransformerDims:
    """Sizes of a decoder: widths in elements, counts of layers, heads and experts.

    ``ffn`` is the width inside one MLP (one expert); ``gated`` says that an MLP has three matrices
    (SwiGLU) instead of two; ``experts`` is 1 for a dense model; ``tied`` says that the output
    projection is the embedding.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool
    experts: int
    tied: bool


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((int(v) for v in values if isinstance(v, int | float)), None)


def _need(config: Any, names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if value is None:
        raise ValueError(f"the config has none of {', '.join(names)}")
    return value


def dims_of(model: nn.Module, config: Any) -> TransformerDims:
    """Read the sizes of ``model`` from its config, and from its weights what configs do not say.

    Raises ValueError where the config names no hidden size, layers or heads.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, heads = _need(text, HIDDEN), _need(text, HEADS)
    # Falcon's new architecture keeps `multi_query` set but groups its heads.
    single = getattr(text, "multi_query", False) and not getattr(
        text, "new_decoder_architecture", False
    )
    kv_heads = 1 if single else _first(text, KV_HEADS) or heads
    experts = _first(text, EXPERTS) or 1
    expert_ffn = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
    names = {part for name, _ in model.named_parameters() for part in name.split(".")}
    return TransformerDims(
        hidden=hidden,
        layers=_need(text, LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_first(text, ("head_dim",)) or hidden // heads,
        ffn=int(expert_ffn or _first(text, FFN) or 4 * hidden),
        vocab=_need(text, ("vocab_size",)),
        gated=not names.isdisjoint(GATED_WEIGHTS),
        experts=experts,
        tied=head_is_tied(model),
    )


def head_is_tied(model: Any) -> bool:
    """Whether the output projection and the input embedding are the same parameter."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def layer_stack(model: nn.Module) -> list[nn.Module]:
    """The transformer layers: the children of the model's longest ``ModuleList``, in order."""
    from torch import nn

    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])
