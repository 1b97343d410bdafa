"""Experts under a data-parallel engine: their own mesh of shards, their own buckets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.estimate import Rank, estimate
from llmem.lifetimes import Category
from llmem.plan import default_strategies
from llmem.spec import RunSpec, make_spec

HIDDEN, INNER, EXPERTS, LAYERS = 32, 20, 8, 2
FLOAT = 4
EXPERT = 3 * HIDDEN * INNER * FLOAT  # gate and up beside each other, then down
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 101,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
NORM, ATTENTION, ROUTER = HIDDEN, 2 * 32 * 32 + 2 * 32 * 16, EXPERTS * HIDDEN
BLOCK = (2 * NORM + ATTENTION + ROUTER) * FLOAT
ROOT = (2 * 101 * HIDDEN + NORM) * FLOAT


def spec(**fields: Any) -> RunSpec:
    shape = {"per_device_train_batch_size": 3, "seq_length": 16, "gpu": "cpu", "param_dtype": "fp32"}
    return make_spec(**{"model": MIXTRAL, "ep": 2, "ep_plan": "alltoall", **shape, **fields})


@cache
def first_rank(**fields: Any) -> Rank:
    return estimate(spec(**fields)).ranks[0]


def made_by(rank: Rank, op: str, step: int = 1) -> list[tuple[str, int]]:
    """Module (its last two names) and bytes of what ``op`` allocates in ``step``, in order."""
    table, trace = rank.table.lifetimes, rank.table.trace
    found = []
    for row in table.birth.argsort(kind="stable").tolist():
        index = int(table.birth_op[row])
        if index >= 0 and trace.op_name(index) == op and trace.ops.step[index] == step:
            name = trace.modules[int(table.module[row])]
            found.append((name.removeprefix("model.layers."), int(table.nbytes[row])))
    return found


def test_experts_are_gathered_by_those_who_share_them() -> None:
    """Experts over 4 / 2 ranks, the rest over 4; backward prefetches what ran before in forward."""
    rank = first_rank(gpus=4, strategy="fsdp2")
    experts = EXPERTS // 2 * EXPERT
    head = 4 * 26 * HIDDEN * FLOAT * 2 + NORM * FLOAT  # 101 rows over 4 ranks: 26 each
    forward = [
        ("", head), ("0", BLOCK), ("0.mlp.experts", experts), ("1", BLOCK), ("1.mlp.experts", experts),
    ]  # fmt: skip
    backward = [forward[3], forward[4], forward[1], forward[2]]
    assert made_by(rank, "all_gather") == forward + backward
    reduced = dict(made_by(rank, "reduce_scatter")[::-1])  # the first of each is its input
    assert reduced["0.mlp.experts"] == experts
    outputs = [n for name, n in made_by(rank, "reduce_scatter") if name == "0.mlp.experts"]
    assert outputs == [experts, experts // 2]


def test_shards_of_a_rank() -> None:
    rank = first_rank(gpus=4, strategy="fsdp2")
    root = (2 * 26 * HIDDEN + NORM // 4) * FLOAT
    shards = root + LAYERS * (BLOCK // 4 + EXPERTS // 4 * EXPERT)
    assert rank.breakdown["parameters"] == shards
    table = rank.table.lifetimes
    kept = table.category == Category.OPTIMIZER_STATE
    assert int(table.nbytes[kept & (table.nbytes > FLOAT)].sum()) == 2 * shards


def test_a_rank_alone_with_its_experts_copies_them() -> None:
    """Nobody to gather from: a copy per parameter in forward and backward, and a divided gradient."""
    rank = first_rank(gpus=2, strategy="fsdp2")
    assert not [name for name, _ in made_by(rank, "all_gather") if "experts" in name]
    table, trace = rank.table.lifetimes, rank.table.trace
    starts = trace.step_ticks
    inside = trace.modules.index("model.layers.0.mlp.experts")
    mine = (table.module == inside) & (table.birth > starts[1]) & (table.birth < starts[2])
    copies = mine & (table.key >= 0) & (table.category == Category.COMMUNICATION)
    local = EXPERTS // 2 * EXPERT
    assert sorted(table.nbytes[copies].tolist()) == sorted([local * 2 // 3, local // 3] * 2)
    # The input, the output, and the input divided by the number of batches.
    reduced = [n for name, n in made_by(rank, "reduce_scatter") if name == "0.mlp.experts"]
    assert reduced == [local] * 3


def test_ranks_that_share_a_batch_shard_all_alike() -> None:
    rank = first_rank(gpus=4, strategy="fsdp2", ep_plan="transformers")
    gathered = dict(made_by(rank, "all_gather"))
    assert gathered["0.mlp.experts"] == EXPERTS // 2 * EXPERT
    assert gathered["0"] == BLOCK
    root = (2 * 51 * HIDDEN + NORM // 2) * FLOAT
    assert rank.breakdown["parameters"] == root + LAYERS * (BLOCK // 2 + EXPERTS // 4 * EXPERT)


def test_ddp_has_a_bucket_for_the_experts_of_each_layer() -> None:
    def buckets(gpus: int) -> list[int]:
        rank = first_rank(gpus=gpus, strategy="ddp", bucket_cap_mb=25)
        table, trace = rank.table.lifetimes, rank.table.trace
        kept = (table.category == Category.COMMUNICATION) & (table.death > trace.step_ticks[-1])
        return sorted(table.nbytes[kept].tolist())

    experts = EXPERTS // 2 * EXPERT
    rest = ROOT + LAYERS * BLOCK
    assert buckets(4) == sorted([experts] * LAYERS + [rest])
    assert buckets(2) == [rest]  # nobody else has them: nothing to reduce


def test_what_may_be_planned() -> None:
    """Where each rank has a batch, they share the rest although nobody shares experts."""
    assert {"none", "ddp", "fsdp2"} <= set(default_strategies(spec(gpus=2)))
    assert "none" not in default_strategies(spec(gpus=4, strategy="ddp"))


def test_frozen_experts_are_gathered_and_not_reduced() -> None:
    lora = {"method": "lora", "lora_target_modules": ("q_proj",), "lora_r": 4}
    rank = first_rank(gpus=4, strategy="fsdp2", **lora)
    inside = "base_model.model.model.layers.0.mlp.experts"
    assert made_by(rank, "all_gather").count((inside, EXPERTS // 2 * EXPERT)) == 2
    assert inside not in dict(made_by(rank, "reduce_scatter"))
    # Of DDP too: its buckets hold the adapters alone.
    adapters = LAYERS * 4 * (HIDDEN + HIDDEN) * FLOAT
    table, trace = (rank := first_rank(gpus=4, strategy="ddp", **lora)).table.lifetimes, rank.table.trace
    kept = (table.category == Category.COMMUNICATION) & (table.death > trace.step_ticks[-1])
    assert table.nbytes[kept].tolist() == [adapters]


def test_adapters_on_experts_are_refused() -> None:
    config = {"peft_type": "LORA", "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    with pytest.raises(LlmemError, match="leave target_parameters out"):
        estimate(spec(gpus=2, strategy="fsdp2", method="lora", peft_config=config))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 4, "strategy": "fsdp2", "hybrid_shard": 2, "ep": 4}, "does not divide the 2 ranks"),
        ({"gpus": 4, "strategy": "fsdp2", "reshard_after_forward": 4}, "does not divide the 2 ranks"),
        ({"gpus": 4, "strategy": "ddp", "tp": 2}, "--ep-plan alltoall with --tp"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(spec(**fields))
