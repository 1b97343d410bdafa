"""Expert parallelism: the buffers of one layer of experts, counted by hand, and whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import Trace
from llmem.spec import RunSpec, make_spec
from llmem.trace.build import build_model
from llmem.trace.run import trace_spec
from llmem.trace.split.expert_parallel import shard_experts, split_sizes
from llmem.trace.split.process_group import rank_of

HIDDEN, INNER, EXPERTS, PICKED = 32, 20, 8, 2
TOKENS = 3 * 16
FLOAT = 4
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 101,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS,
    "num_experts_per_tok": PICKED, "tie_word_embeddings": False,
}  # fmt: skip


def mixtral(**fields: Any) -> RunSpec:
    defaults = {
        "per_device_train_batch_size": 3, "seq_length": 16, "gpus": 2, "ep": 2, "gpu": "cpu",
        "param_dtype": "fp32",
    }  # fmt: skip
    return make_spec(**{"model": MIXTRAL, **defaults, **fields})


def layer(spec: RunSpec) -> Trace:
    """Forward and backward of the experts of one Mixtral layer on 48 tokens of this rank."""
    with rank_of(spec.ep, 0):
        model: Any = build_model(spec, "meta", [])
        with torch.device("meta"):
            hidden = torch.empty(TOKENS, HIDDEN, requires_grad=True)
            picked = torch.empty(TOKENS, PICKED, dtype=torch.int64)
            weights = torch.empty(TOKENS, PICKED, requires_grad=True)
        shard_experts(model, spec, [])
        experts = model.model.layers[0].mlp.experts

        def step() -> None:
            experts(hidden, picked, weights).sum().backward()

        return llmem.trace(step, model=model, steps=1, gpu="cpu")


def made_by(trace: Trace, op: str) -> list[int]:
    table = trace.lifetimes
    return [
        int(table.nbytes[row])
        for row in range(len(table))
        if trace.op_name(int(table.birth_op[row])) == op
    ]


@pytest.mark.parametrize(("degree", "balance"), [(2, 1.0), (4, 1.0), (4, 0.5)])
def test_every_exchange_of_a_layer(degree: int, balance: float) -> None:
    """Each rank sends its 96 pairs; the busiest receives 1/balance times as many."""
    trace = layer(mixtral(ep=degree, gpus=degree, ep_plan="alltoall", routing_balance=balance))
    pairs, row = TOKENS * PICKED, HIDDEN * FLOAT
    received = round(pairs / balance)
    # To the experts and back, then the gradients of what came back and of what was sent.
    assert made_by(trace, "all_to_all_single") == [
        n * row for n in (received, pairs, received, pairs)
    ]
    assert pairs * row in made_by(trace, "index")  # send_tokens, in the experts' order
    # Two grouped matmuls of the rows that were received: gate and up beside each other, then down.
    widths = {n // (received * FLOAT) for n in made_by(trace, "_grouped_mm")[:2]}
    assert widths == {2 * INNER, HIDDEN}


def test_ranks_that_share_a_batch_send_a_slice_of_it() -> None:
    trace = layer(mixtral(ep=2))
    pairs, row = TOKENS // 2 * PICKED, HIDDEN * FLOAT
    assert made_by(trace, "all_to_all_single") == [pairs * row] * 4
    # The slices' outputs are gathered, and in backward the gradients of the slices of the input
    # and of the routing weights.
    gathered = made_by(trace, "all_gather_into_tensor")
    assert sorted(gathered) == sorted([TOKENS * row, TOKENS * row, TOKENS * PICKED * FLOAT])


def test_each_rank_has_its_experts_and_all_of_the_rest() -> None:
    experts = 2 * EXPERTS * 3 * HIDDEN * INNER * FLOAT  # two layers of gate, up and down
    whole, half = (estimate(mixtral(ep=ep, gpus=ep)).worst.breakdown for ep in (1, 2))
    assert whole["parameters"] - half["parameters"] == experts // 2
    assert whole["optimizer_states"] - half["optimizer_states"] == 2 * (experts // 2)


def test_tensor_parallel_rest_and_replicas() -> None:
    alone = estimate(mixtral())
    both = estimate(mixtral(tp=2))
    assert both.worst.breakdown["parameters"] < alone.worst.breakdown["parameters"]
    sharded = estimate(mixtral(gpus=4, strategy="fsdp2"))
    assert sharded.worst.breakdown["optimizer_states"] < alone.worst.breakdown["optimizer_states"]
    assert sorted(r for rank in sharded.ranks for r in rank.table.ranks) == [0, 1, 2, 3]
    assert any("routing:" in note for note in sharded.assumptions)


def test_an_uneven_router_costs_memory() -> None:
    even, uneven = (
        estimate(mixtral(ep_plan="alltoall", routing_balance=balance)) for balance in (1.0, 0.5)
    )
    assert uneven.worst.peak.requested > even.worst.peak.requested
    assert any("2 times the tokens" in note for note in uneven.assumptions)


def test_split_sizes_account_for_every_pair() -> None:
    for pairs, ranks, balance in ((96, 4, 1.0), (97, 4, 0.7), (5, 3, 0.4)):
        sent, received = split_sizes(pairs, ranks, balance)
        assert sum(sent) == pairs and len(received) == ranks
        assert max(received) <= pairs


def test_nothing_is_left_changed() -> None:
    before = torch.Tensor.tolist
    trace_spec(mixtral(), steps=1)
    assert torch.Tensor.tolist is before
    assert torch.tensor([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ep": 3, "gpus": 4}, "groups of ep 3"),
        ({"ep": 3, "gpus": 3}, "refuses --ep 3"),
        ({"tp": 4, "gpus": 4}, "--tp of another degree"),
        ({"ep": 1, "gpus": 1, "routing_balance": 0.5}, "add --ep"),
        ({"ep_plan": "alltoall", "gpus": 4}, "need a strategy"),
        ({"routing_balance": 0.3}, "at least 0.5"),
        ({"strategy": "zero3"}, "none, ddp, fsdp2"),
        ({"model": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}}, "no ep_plan"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(mixtral(**fields))
