"""DDP and FSDP2 in two real processes each, against the estimate."""

from __future__ import annotations

from typing import Any

import pytest

from llmem.measure import measure, measure_all, validate
from llmem.spec import RunSpec, make_spec

pytestmark = pytest.mark.frameworks

# 2 ranks cut 13 heads' width 26 and the odd vocabulary unevenly or evenly, both occur.
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131,
    "hidden_size": 26, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 13,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def spec(**fields: Any) -> RunSpec:
    shape = {"per_device_train_batch_size": 2, "seq_length": 19, "param_dtype": "fp32"}
    return make_spec(model=LLAMA, **shape, **fields)


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    specs = {name: spec(gpus=2, strategy=name) for name in ("ddp", "fsdp2")}
    return dict(zip(specs, measure_all(list(specs.values()), timeout_s=240), strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_measured_memory_is_what_is_predicted(
    records: dict[str, dict[str, Any]], strategy: str
) -> None:
    rows = validate(records[strategy], boundaries=True)
    assert {row.rank for row in rows} == {0, 1}
    peaks = [row for row in rows if row.metric in ("peak", "first", "steady")]
    assert len(peaks) == 6
    assert max(abs(row.error) for row in peaks) < 0.001
    boundaries = [row for row in rows if row.metric.startswith("boundary")]
    # 2 ranks x first and last step x 2 blocks x (forward enter, exit, backward enter)
    assert len(boundaries) == 24
    assert max(abs(row.error) for row in boundaries) < 0.03


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_recording_missed_nothing(records: dict[str, dict[str, Any]], strategy: str) -> None:
    for rank in records[strategy]["ranks"]:
        assert (rank["foreign_frees"], rank["unseen_frees"], rank["unknown_frees"]) == (0, 0, 0)
        assert rank["end"] <= rank["reachable_at_end"] <= rank["end"] + rank["left_out"]["gloo"]


def test_shards_and_replicas_by_hand(records: dict[str, dict[str, Any]]) -> None:
    # Elements: embedding and head 131*26 each; per layer q and o 26*26, k and v 2*26,
    # gate, up and down 75*26, two norms of 26; one norm. Buffers: two inv_freq of 1.
    layer = 2 * 26 * 26 + 2 * 2 * 26 + 3 * 75 * 26 + 2 * 26
    whole = 4 * (2 * 131 * 26 + 2 * layer + 26) + 2 * 4
    # FSDP2 pads dim 0 to a multiple of 2: 131 -> 132 rows, 75 -> 76 rows of gate and up.
    padded = 4 * (2 * 132 * 26 + 2 * (layer + 2 * 26) + 26)
    ddp, fsdp2 = (records[name]["ranks"][0]["before_steps"] for name in ("ddp", "fsdp2"))
    assert ddp == whole + (whole - 2 * 4)  # parameters and one bucket with room for each gradient
    assert fsdp2 == padded // 2 + 2 * 4


def test_one_process_sees_itself_as_rank_0_of_8() -> None:
    record = measure(spec(strategy="fsdp2", gpus=8), fake_world=8, timeout_s=240)
    [rank] = record["ranks"]
    rows = validate(record)
    assert rank["rank"] == 0 and record["spec"]["gpus"] == 8
    assert max(abs(row.error) for row in rows if row.metric in ("peak", "first", "steady")) < 0.001
