"""Context parallelism with tensor and pipeline parallelism in four real processes, against the estimate."""

from __future__ import annotations

from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.measure import measure_all, validate
from llmem.measure.engines import build
from llmem.spec import RunSpec, make_spec

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131,
    "hidden_size": 40, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def spec(**fields: Any) -> RunSpec:
    rest = {"per_device_train_batch_size": 4, "gpus": 4, "strategy": "fsdp2", "cp": 2}
    return make_spec(model=LLAMA, seq_length=24, param_dtype="fp32", **{**rest, **fields})


@pytest.mark.slow
@pytest.mark.frameworks
def test_measured_memory_of_products_is_what_is_predicted() -> None:
    specs = [
        spec(tp=2, tp_plan="torchtitan", sp=True, loss_parallel=True),
        spec(pp=2, micro_batches=2),
    ]
    # Attention's backward on CPU makes a gradient contiguous, which the trace lacks: of 2 sequences, 4 heads.
    contiguous = 2 * 4 * 12 * 10 * 4
    for record in measure_all(specs, timeout_s=240):
        peaks = [row for row in validate(record) if row.metric in ("peak", "first", "steady")]
        assert [row.rank for row in peaks] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        gaps = [row.measured - row.predicted for row in peaks]
        assert all(0 <= gap <= (contiguous if record["spec"].get("pp") else 0) for gap in gaps), gaps


def test_what_cannot_be_measured() -> None:
    with pytest.raises(LlmemError, match="--tp with --strategy ddp cannot be measured"):
        build(spec(tp=2, strategy="ddp"), "cpu")
