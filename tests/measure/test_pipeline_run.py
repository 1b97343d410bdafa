"""A pipeline of two real processes, against the estimate, and what cannot be measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmem.errors import LlmemError
from llmem.measure import measure_all, validate
from llmem.measure.engines import build
from llmem.spec import RunSpec, make_spec

SHAPE = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **SHAPE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 26,
    "intermediate_size": 75, "num_hidden_layers": 5, "num_attention_heads": 13,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    **SHAPE, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 26,
    "n_layer": 5, "n_head": 13, "n_positions": 32,
}  # fmt: skip


def spec(model: dict[str, Any] = LLAMA, **fields: Any) -> RunSpec:
    rest = {"gpus": 2, "pp": 2, "micro_batches": 4, "per_device_train_batch_size": 8}
    return make_spec(model=model, seq_length=19, param_dtype="fp32", **{**rest, **fields})


@pytest.mark.frameworks
def test_measured_memory_of_two_stages_is_what_is_predicted() -> None:
    specs = [
        spec(),
        spec(GPT2, pp_schedule="gpipe", gradient_checkpointing=True),
        spec(pp_schedule="interleaved", method="lora", lora_r=3),
        spec(strategy="fsdp2", pp_schedule="interleaved", reshard_after_forward=True),
        spec(pp_schedule="interleaved-zero-bubble", gradient_checkpointing=True),
        spec(GPT2, pp_schedule="zbv"),
        spec({**LLAMA, "tie_word_embeddings": True}, pp_schedule="dualpipev"),
    ]
    for record in measure_all(specs, timeout_s=240):
        for rank in record["ranks"]:
            assert (rank["foreign_frees"], rank["unseen_frees"], rank["unknown_frees"]) == (0, 0, 0)
        rows = validate(record)
        peaks = [row for row in rows if row.metric in ("peak", "first", "steady")]
        assert [row.rank for row in peaks] == [0, 0, 0, 1, 1, 1]
        assert max(abs(row.error) for row in peaks) < 0.001
        phases = {row.metric for row in rows if row.metric.startswith("steady.")}
        assert {"steady.forward", "steady.backward", "steady.optimizer"} <= phases


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 8, "tp": 2, "strategy": "ddp"}, "--pp with --tp and --strategy ddp cannot be"),
        ({"gpus": 4, "strategy": "zero1"}, "--pp with --strategy zero1 cannot be measured"),
        ({"gpus": 4, "strategy": "ddp", "pp_schedule": "zbv"}, "zbv with --strategy ddp cannot be"),
        (
            {"gpus": 4, "tp": 2, "tp_plan": "torchtitan", "loss_parallel": True, "pp_schedule": "zbv"},
            "zbv with --loss-parallel cannot be measured",
        ),
        ({"hold_outputs": True}, "a pipeline's schedule runs forward and backward itself"),
    ],
)
def test_what_cannot_be_measured(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        build(spec(**fields), "cpu")


def test_pipelines_are_measured_on_the_cpu_alone() -> None:
    with pytest.raises(LlmemError, match="use --device cpu"):
        build(spec(), "cuda")


def test_a_family_whose_parts_are_not_known() -> None:
    from llmem.measure.pipeline_run import _family

    with pytest.raises(LlmemError, match="Linear cannot be cut into stages"):
        _family(torch.nn.Linear(1, 1))
