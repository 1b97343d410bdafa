"""torch's DTensor and FSDP2 over it on meta tensors: that the estimate agrees with both."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.real_runs.fake_tensor_parallel import compare, configurations

SMALL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 16, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES = dict(configurations(SMALL, 16))


@pytest.mark.parametrize("name", ["tp8-transformers", "fsdp2-8x8-transformers", "fsdp2-8x8-titan-sp"])
def test_the_peak_is_that_of_torch(name: str) -> None:
    done = compare(CASES[name])
    assert done.predicted.peak.requested == done.engine
    assert done.error == 0


@pytest.mark.parametrize("name", ["fsdp2-8x8-transformers", "fsdp2-8x8-titan-sp"])
def test_an_embedding_s_gradient_of_the_whole_vocabulary(name: str) -> None:
    """Of which FSDP2 copies the rank's part before it reduces; here that is the peak."""
    done = compare(dict(configurations({**SMALL, "vocab_size": 4096}, 16))[name])
    assert abs(done.predicted.peak.requested - done.engine) <= 8
