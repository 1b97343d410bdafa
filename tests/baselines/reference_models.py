"""Models of LLMem's tables, on meta, from their public configs (sizes as on the Hugging Face
Hub)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn


def _opt(hidden: int, layers: int, heads: int, **extra: Any) -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=50272, hidden_size=hidden, num_hidden_layers=layers, ffn_dim=4 * hidden,
        num_attention_heads=heads, max_position_embeddings=2048,
        **{"word_embed_proj_dim": hidden, **extra},
    )


def _bloom(hidden: int, layers: int, heads: int) -> Any:
    from transformers import BloomConfig

    return BloomConfig(vocab_size=250880, hidden_size=hidden, n_layer=layers, n_head=heads)


def _codegen(hidden: int, layers: int, heads: int, rotary: int) -> Any:
    from transformers import CodeGenConfig

    return CodeGenConfig(
        vocab_size=51200, n_embd=hidden, n_layer=layers, n_head=heads, rotary_dim=rotary,
        tie_word_embeddings=False,
    )


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config()


def _llama_7b() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig()


CONFIGS: dict[str, Callable[[], Any]] = {
    "OPT-125m": lambda: _opt(768, 12, 12),
    "OPT-350m": lambda: _opt(
        1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False
    ),
    "OPT-1.3b": lambda: _opt(2048, 24, 32),
    "OPT-2.7b": lambda: _opt(2560, 32, 32),
    "bloom-560m": lambda: _bloom(1024, 24, 16),
    "bloom-1b1": lambda: _bloom(1536, 24, 16),
    "bloom-3b": lambda: _bloom(2560, 30, 32),
    "codegen-350M": lambda: _codegen(1024, 20, 16, 32),
    "codegen-2B": lambda: _codegen(2560, 32, 32, 64),
    "gpt2": _gpt2,
    "llama-7b": _llama_7b,
}


@cache
def build(name: str) -> tuple[nn.Module, Any]:
    """The causal LM called ``name`` on meta, and its config."""
    from transformers import AutoModelForCausalLM

    config = CONFIGS[name]()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config), config
