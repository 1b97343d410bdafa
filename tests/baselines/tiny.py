"""A Llama small enough to add up by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def tiny_llama(**changes: Any) -> tuple[nn.Module, Any]:
    """A two-layer Llama on meta: hidden 8, 2 heads, 1 kv head, MLP 16, vocabulary 32, untied.

    Parameters: embedding 256, head 256, final norm 8; per layer q 64, k 32, v 32, o 64,
    MLP 3 x 128, norms 16, together 592. In all 1,704.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False, **changes,
    }
    config = LlamaConfig(**sizes)
    with torch.device("meta"):
        return LlamaForCausalLM(config), config
