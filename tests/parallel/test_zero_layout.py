"""Flat buffers and partitions, by hand."""

from __future__ import annotations

from llmem.lifetimes import Parameter
from llmem.parallel.zero.layout import flat_group, in_model_order, owners_of
from llmem.spec import make_spec
from llmem.trace.run import trace_spec
from tests.parallel.toy import toy_trace


def parameters(*sizes: int) -> list[Parameter]:
    return [Parameter(i, f"p{i}", (n,), "float32", 4, True, i) for i, n in enumerate(sizes)]


def test_padded_to_twice_the_world() -> None:
    group = flat_group(parameters(7, 4), 3, 4)
    assert (group.numel, group.partition) == (12, 4)
    assert [(p.parameter.key, p.start, p.count) for p in group.pieces(0)] == [(0, 0, 4)]
    assert [(p.parameter.key, p.start, p.count) for p in group.pieces(1)] == [(0, 4, 3), (1, 0, 1)]
    assert [(p.parameter.key, p.start, p.count) for p in group.pieces(2)] == [(1, 1, 3)]
    assert [group.gaps(rank) for rank in range(3)] == [[], [], [1]]


def test_slices_of_one_parameter_by_rank() -> None:
    group = flat_group(parameters(7, 4), 3, 4)
    assert group.ranks_of(group.parameters[0]) == [(0, 4), (1, 3)]
    assert group.ranks_of(group.parameters[1]) == [(1, 1), (2, 3)]


def test_partition_without_parameters() -> None:
    group = flat_group(parameters(1), 2, 4)
    assert group.partition == 2
    assert group.pieces(1) == []


def test_round_robin_deals_parameters_out() -> None:
    group = flat_group(parameters(1, 1, 1, 1, 1), 2, 4, round_robin=True)
    assert [p.key for p in group.parameters] == [0, 2, 4, 1, 3]


def test_parameter_alignment_to_16_bytes() -> None:
    group = flat_group(parameters(5, 3), 2, 4, aligned=True)
    assert group.offsets == [0, 8]
    assert group.gaps(0) == [1]
    assert flat_group(parameters(5, 3), 2, 2, aligned=True).offsets == [0, 8]


def test_model_order_is_parents_first() -> None:
    assert [p.name for p in in_model_order(toy_trace())] == [
        "embed.weight",
        "blocks.0.linear.weight",
        "blocks.1.linear.weight",
    ]


def test_tied_embedding_has_two_owners() -> None:
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 19, "n_embd": 8,
        "n_layer": 1, "n_head": 2, "n_positions": 16,
    }  # fmt: skip
    trace = trace_spec(make_spec(model=config, per_device_train_batch_size=1, seq_length=4))
    first = in_model_order(trace)[0]
    assert owners_of(trace, first) == ["transformer.wte", "lm_head"]
