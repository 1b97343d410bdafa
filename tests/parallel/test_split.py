"""Context parallelism in its products with tensor and pipeline parallelism, counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.estimate import _communicators, estimate
from llmem.lifetimes import Category, Trace
from llmem.parallel import ranks_of
from llmem.parallel.pipeline.stages import stages_of
from llmem.spec import RunSpec, make_spec
from llmem.trace.run import trace_spec

FLOAT, INT = 4, 8
BATCH, TOKENS, WIDTH, INNER, KEY_HEADS, SIZE, WORDS, LAYERS = 2, 48, 32, 48, 2, 8, 104, 2
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": WORDS,
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": KEY_HEADS, "tie_word_embeddings": False,
}  # fmt: skip
SP = {"tp_plan": "torchtitan", "sp": True}


def llama(**fields: Any) -> RunSpec:
    defaults = {
        "per_device_train_batch_size": BATCH, "seq_length": TOKENS, "gpus": 4, "strategy": "fsdp2",
        "param_dtype": "fp32", "gpu": "cpu", "cp": 2,
    }  # fmt: skip
    return make_spec(**{"model": LLAMA, **defaults, **fields})


def made_by(trace: Trace, op: str) -> list[int]:
    table = trace.lifetimes
    made = (trace.op_name(int(op)) for op in table.birth_op)
    return [int(size) for size, name in zip(table.nbytes, made, strict=True) if name == op]


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_gather_the_keys_of_their_own_heads(tp: int) -> None:
    """Keys and values of all tokens, in forward and again in backward of each layer."""
    trace = trace_spec(llama(tp=tp), steps=1)
    keys = BATCH * KEY_HEADS // tp * TOKENS * SIZE * FLOAT
    logits = [] if tp == 1 else [BATCH * TOKENS // 2 * WORDS * FLOAT]
    gathered = Counter(made_by(trace, "all_gather_into_tensor"))
    assert gathered == Counter([2 * keys] * 2 * LAYERS + logits)


def test_logits_are_cut_by_both() -> None:
    whole = BATCH * TOKENS * WORDS * FLOAT
    for fields, part in (({}, 1), (SP, 1), (SP | {"loss_parallel": True}, 2)):
        trace = trace_spec(llama(tp=2, **fields), steps=1)
        assert whole // 2 // part in trace.lifetimes.nbytes
        assert whole not in trace.lifetimes.nbytes
        if part == 2:
            assert whole // 2 not in trace.lifetimes.nbytes


def test_sp_cuts_what_cp_left() -> None:
    """Norms see 1/(cp x tp) of the tokens: their fp32 squares are as large as that."""
    stream = BATCH * TOKENS * WIDTH * FLOAT
    sizes = [made_by(trace_spec(llama(tp=2, cp=cp, **SP), steps=1), "pow") for cp in (1, 2)]
    assert [max(made) for made in sizes] == [stream // 2, stream // 4]


def test_shards_are_those_of_dp_and_cp_ranks() -> None:
    """Parameters and their state are as without cp: FSDP shards over dp x cp."""
    plain, split = (estimate(llama(gpus=8, tp=2, cp=cp)).worst for cp in (1, 2))
    for kind in ("parameters", "optimizer_states"):
        assert plain.breakdown[kind] == split.breakdown[kind]
    # Each matrix is cut by tp, then its rows by 4 ranks; norms are whole on tensor-parallel ranks.
    cut = 2 * WORDS * WIDTH + LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * INNER * WIDTH)
    norms = (2 * LAYERS + 1) * WIDTH
    states = 2 * FLOAT * (cut // 2 + norms) // 4
    counters = FLOAT * (9 * LAYERS + 3)
    assert split.breakdown["optimizer_states"] == states + counters


def test_ranks_count_tp_then_cp_then_replicas_then_stages() -> None:
    spec = llama(gpus=16, tp=2, pp=2, micro_batches=2, cp_comm="ring")
    tables = ranks_of(trace_spec(spec), spec)
    # All shapes divide, so that tensor-parallel ranks and replicas are alike: two stages x two cp ranks.
    assert [table.ranks for table in tables] == [
        (0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "part"), [({"cp": 1}, 1), ({}, 2), ({"tp": 2}, 2), ({"tp": 2, **SP}, 4)]
)
def test_stages_send_their_part_of_the_sequence(fields: dict[str, Any], part: int) -> None:
    trace = trace_spec(llama(gpus=8, pp=2, micro_batches=2, **fields))
    assert stages_of(trace, 2).hidden == BATCH // 2 * TOKENS // part * WIDTH * FLOAT


def test_a_pipeline_keeps_its_part_of_the_batch_in_whole_storages() -> None:
    """``context_parallel`` cuts five tensors in place, and holds their parts and a copy of the last."""
    spec = llama(pp=2, micro_batches=2, per_device_train_batch_size=8)
    table = ranks_of(trace_spec(spec), spec)[0].lifetimes
    batch = Counter(table.nbytes[table.category == Category.INPUT].tolist())
    whole = 8 * TOKENS * INT
    assert batch == {whole: 2 * 5, whole // 2: 2 * 6}  # of two steps


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # One of FSDP's for dp x cp, however few of these are dp: none for dp alone.
        ({"gpus": 8, "cp": 2}, [8, 2]),
        ({"gpus": 8, "cp": 8}, [8, 8]),
        ({"gpus": 16, "cp": 2, "tp": 4}, [4, 4, 2]),
        ({"gpus": 512, "cp": 4, "tp": 8, "pp": 8}, [8, 8, 4, 8]),
        ({"gpus": 64, "cp": 2, "tp": 4, "dp_replicate_size": 2}, [8, 2, 4, 2]),
        ({"gpus": 8, "cp": 2, "tp": 2, "strategy": "ddp"}, [4, 2, 2]),
    ],
)
def test_communicators(fields: dict[str, Any], expected: list[int]) -> None:
    assert _communicators(llama(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 8, "tp": 2, "pp": 2, "cp": 4}, "does not divide"),
        ({"gpus": 4, "ep": 2, "cp": 2}, "--ep with --cp"),
        ({"gpus": 4, "pp": 2, "strategy": "megatron"}, "--cp with --strategy megatron"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(llama(**fields))
