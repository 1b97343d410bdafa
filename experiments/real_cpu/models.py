"""Tiny configurations of real transformers classes, with sizes that no rounding hides.

Widths and vocabularies are odd multiples of small numbers, so that two different tensors of a
step seldom have the same number of bytes.
"""

from __future__ import annotations

from typing import Any

_DECODER: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GROUPED = {**_DECODER, "num_key_value_heads": 2}

_GPT2 = {
    "vocab_size": 331,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(
    model_type: str, architecture: str, *parts: dict[str, Any], **more: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    for part in (*parts, more):
        config |= part
    return config


MODELS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", "LlamaForCausalLM", _GROUPED),
    "mistral": _config("mistral", "MistralForCausalLM", _GROUPED, sliding_window=16, head_dim=8),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", _GROUPED, tie_word_embeddings=True),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM", _GROUPED, head_dim=12),
    "gemma2": _config(
        "gemma2", "Gemma2ForCausalLM", _GROUPED, head_dim=12, sliding_window=16,
        tie_word_embeddings=True,
    ),
    "phi3": _config("phi3", "Phi3ForCausalLM", _GROUPED),
    "mixtral": _config(
        "mixtral", "MixtralForCausalLM", _GROUPED, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen3_moe": _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", _GROUPED, head_dim=12, moe_intermediate_size=40,
        num_experts=6, num_experts_per_tok=3,
    ),
    "gpt2": _config("gpt2", "GPT2LMHeadModel", _GPT2),
    "gpt_bigcode": _config("gpt_bigcode", "GPTBigCodeForCausalLM", _GPT2, multi_query=True),
    "codegen": _config(
        "codegen", "CodeGenForCausalLM", _GPT2, n_embd=96, n_head=4, rotary_dim=8, n_ctx=128
    ),
    "gpt_neo": _config(
        "gpt_neo", "GPTNeoForCausalLM", vocab_size=331, hidden_size=48, num_layers=2, num_heads=6,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=128, window_size=16,
        bos_token_id=1, eos_token_id=2,
    ),
    "gpt_neox": _config("gpt_neox", "GPTNeoXForCausalLM", _DECODER, rotary_pct=0.5),
    "opt": _config(
        "opt", "OPTForCausalLM", _DECODER, ffn_dim=104, word_embed_proj_dim=48,
        tie_word_embeddings=True,
    ),
    "biogpt": _config("biogpt", "BioGptForCausalLM", _DECODER, tie_word_embeddings=True),
    "bloom": _config(
        "bloom", "BloomForCausalLM", vocab_size=331, hidden_size=48, n_layer=3, n_head=6,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "t5": _config(
        "t5", "T5ForConditionalGeneration", vocab_size=331, d_model=48, d_kv=8, d_ff=104,
        num_layers=2, num_heads=6, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    ),
    "distilbert": _config(
        "distilbert", "DistilBertForSequenceClassification", vocab_size=331, dim=48,
        hidden_dim=104, n_layers=3, n_heads=6, max_position_embeddings=128, num_labels=3,
    ),
}  # fmt: skip
"""One configuration per family, by ``model_type``."""
