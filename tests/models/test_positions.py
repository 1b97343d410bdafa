"""Position tables: the stated limit is where a real forward stops working."""

from typing import Any

import pytest
import torch

from llmem.models.build import build, to_hf_config
from llmem.models.positions import max_positions
from llmem.models.presets import list_presets
from llmem.models.source import resolve

LIMIT = 16
GPT = dict(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=LIMIT, n_ctx=LIMIT)
BERT = dict(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=LIMIT,
)
WITH_TABLE: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": GPT | {"rotary_dim": 4},
    "codegen": GPT | {"n_head": 4, "n_embd": 16, "rotary_dim": 4},
    "ctrl": GPT | {"dff": 8},
    "gpt_neo": dict(
        vocab_size=11,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        attention_types=[[["global"], 1]],
        max_position_embeddings=LIMIT,
    ),
    "opt": BERT | {"ffn_dim": 8, "word_embed_proj_dim": 8, "pad_token_id": 1},
    "biogpt": BERT,
    "bert": BERT | {"architectures": ["BertForMaskedLM"], "pad_token_id": 0},
    "roberta": BERT
    | {
        "architectures": ["RobertaForMaskedLM"],
        "max_position_embeddings": LIMIT + 2,
        "pad_token_id": 1,
    },
}


@pytest.mark.parametrize("model_type", WITH_TABLE)
def test_limit_is_where_a_real_forward_fails(model_type: str) -> None:
    model = build(resolve(WITH_TABLE[model_type] | {"model_type": model_type}), device="cpu")
    assert max_positions(model.config) == LIMIT

    def forward(length: int) -> None:
        model(input_ids=torch.full((1, length), 5))

    forward(LIMIT)
    with pytest.raises((IndexError, RuntimeError)):
        forward(LIMIT + 1)


def test_rotary_models_run_past_their_trained_length() -> None:
    tiny = BERT | {"model_type": "llama", "num_key_value_heads": 2}
    model = build(resolve(tiny), device="cpu")
    assert max_positions(model.config) is None
    model(input_ids=torch.full((1, LIMIT + 9), 5))


def test_limits_of_the_presets() -> None:
    limits = {p.name: max_positions(to_hf_config(resolve(p.name))) for p in list_presets()}
    tables = {
        **dict.fromkeys(
            ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "biogpt"], 1024
        ),
        **dict.fromkeys(["opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b"], 2048),
        **dict.fromkeys(["codegen-350m", "codegen-2b", "gpt-j-6b", "cerebras-gpt-111m"], 2048),
        **dict.fromkeys(["gpt-neo-125m", "gpt-neo-1.3b", "gpt-neo-2.7b"], 2048),
        **dict.fromkeys(["biogpt-large", "santacoder"], 2048),
        **dict.fromkeys(["starcoder", "octocoder"], 8192),
        **dict.fromkeys(["distilbert-base-uncased", "distilbert-sst2"], 512),
    }
    assert {name: limit for name, limit in limits.items() if limit is not None} == tables
