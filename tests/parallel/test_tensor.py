"""Tensor parallelism: toys of which every buffer is written down, then who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import llmem
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, TICK, Trace
from llmem.parallel import engine
from llmem.parallel.tensor import chunk, kinds
from llmem.spec import make_spec
from llmem.trace.split import tensor_parallel
from llmem.trace.split.process_group import make_mesh, rank_of

WIDTH, INNER, ROWS, VOCABULARY = 6, 8, 4, 10
FLOAT = 4


class Pair(torch.nn.Module):
    """x [4, 6] -> first [6, 6], whole -> up [8, 6] by columns -> down [6, 8] by rows -> sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.first(x))).sum()  # type: ignore[no-any-return]


class Head(torch.nn.Module):
    """x [4, 6] -> head [10, 6] by columns, its output gathered -> sum."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).sum()  # type: ignore[no-any-return]


def traced(make: Any, styles: dict[str, str], degree: int, rank: int = 0) -> Trace:
    """One forward and backward of a toy on ``rank`` of ``degree``."""
    plan = {name: style for n, style in styles.items() for name in (f"{n}.weight", n)}
    with rank_of(degree, rank):
        with torch.device("meta"):
            model, x = make(), torch.empty(ROWS, WIDTH)
        tensor_parallel.apply_plan(model, plan, make_mesh((degree,), ("tp",)))
        return llmem.trace(lambda: model(x).backward(), model=model, steps=1, gpu="cpu")


def buffers(trace: Trace) -> list[tuple[int, str, int, int | None]]:
    """(bytes, op, birth, death) of everything, in events counted from 1; None: never freed."""
    table = trace.lifetimes
    return [
        (
            int(table.nbytes[row]),
            trace.op_name(int(table.birth_op[row])),
            int(table.birth[row]) // TICK,
            None if table.death[row] == NEVER else int(table.death[row]) // TICK,
        )
        for row in range(len(table))
    ]


@pytest.mark.parametrize("degree", [2, 4])
def test_every_buffer_of_a_column_and_row_pair(degree: int) -> None:
    trace = traced(Pair, {"up": "colwise", "down": "rowwise"}, degree)
    whole = WIDTH * WIDTH * FLOAT
    shard = INNER // degree * WIDTH * FLOAT
    hidden, inner = ROWS * WIDTH * FLOAT, ROWS * INNER // degree * FLOAT
    assert buffers(trace) == [
        (whole, "", 1, None),
        (shard, "", 2, None),
        (shard, "", 3, None),
        (hidden, "mm", 4, 18),  # first's output, kept for up's weight gradient
        (inner, "mm", 5, 14),  # up's output, kept for down's
        (hidden, "mm", 6, 8),  # down's partial sums: freed once the reduced copy is there
        (hidden, "all_reduce", 7, 10),
        (FLOAT, "sum", 9, 24),
        (FLOAT, "ones_like", 11, 23),
        (shard, "mm", 12, None),  # gradient of down
        (inner, "mm", 13, 17),
        (shard, "mm", 15, None),  # gradient of up
        (hidden, "mm", 16, 20),  # partial gradient of first's output
        (hidden, "all_reduce", 19, 22),
        (whole, "mm", 21, None),  # gradient of first
    ]


def test_every_buffer_of_a_gathered_output() -> None:
    trace = traced(Head, {"head": "colwise_gather_output"}, 2)
    shard = VOCABULARY // 2 * WIDTH * FLOAT
    local, logits = ROWS * VOCABULARY // 2 * FLOAT, ROWS * VOCABULARY * FLOAT
    assert buffers(trace) == [
        (shard, "", 1, None),
        (local, "mm", 2, 6),
        (logits, "all_gather_into_tensor", 3, 5),  # the shards one after the other
        (logits, "cat", 4, 8),  # the shards side by side
        (FLOAT, "sum", 7, 14),
        (FLOAT, "ones_like", 9, 13),
        (local, "clone", 10, 12),  # this rank's columns of the gradient
        (shard, "mm", 11, None),
    ]


def test_an_uneven_output_is_padded_to_the_longest_shard() -> None:
    # ten columns on four ranks: 3, 3, 3 and 1
    first = buffers(traced(Head, {"head": "colwise_gather_output"}, 4, rank=0))
    last = buffers(traced(Head, {"head": "colwise_gather_output"}, 4, rank=3))
    column, padded = ROWS * FLOAT, ROWS * 12 * FLOAT
    sizes = [(nbytes, op) for nbytes, op, *_ in first if op in ("mm", "constant_pad_nd", "cat")]
    assert sizes == [(3 * column, "mm"), (padded, "cat"), (3 * WIDTH * FLOAT, "mm")]
    sizes = [(nbytes, op) for nbytes, op, *_ in last if op in ("mm", "constant_pad_nd", "cat")]
    assert sizes == [
        (column, "mm"),
        (3 * column, "constant_pad_nd"),
        (padded, "cat"),
        (WIDTH * FLOAT, "mm"),
    ]
    for found in (first, last):  # the ten real columns are copied out of the padded ones
        assert (ROWS * VOCABULARY * FLOAT, "clone") in [(n, op) for n, op, *_ in found]


def test_the_process_is_left_as_it_was() -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = ShardingPropagator.propagate_op_sharding_non_cached
    traced(Pair, {"up": "colwise", "down": "rowwise"}, 2)
    assert not dist.is_initialized()
    assert ShardingPropagator.propagate_op_sharding_non_cached is before


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 102,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def test_ranks_of_a_model_hold_their_shards() -> None:
    spec = make_spec(
        model={**TINY, "vocab_size": 101}, per_device_train_batch_size=2, seq_length=8,
        param_dtype="fp32", optim="sgd", gpus=2, tp=2, gpu="cpu", steps=1,
    )  # fmt: skip
    found = estimate(spec)
    assert [rank.table.ranks for rank in found.ranks] == [(0,), (1,)]
    attention, mlp, norms = 32 * (32 + 16 + 16 + 32), 3 * 32 * 48, 3 * 32
    for rank, rows in zip(found.ranks, (51, 50), strict=True):
        whole = 2 * rows * 32 + (attention + mlp) // 2 + norms
        assert rank.breakdown["parameters"] == whole * FLOAT


def test_fsdp2_shards_the_local_parameters() -> None:
    spec = make_spec(
        model=TINY, per_device_train_batch_size=2, seq_length=8, param_dtype="fp32",
        optim="sgd", gpus=4, tp=2, strategy="fsdp2", gpu="cpu", steps=1,
    )  # fmt: skip
    [rank] = [r for r in estimate(spec).ranks if 0 in r.table.ranks]
    halves = 2 * 102 * 32 + 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    # The embeddings' 51 rows go in parts of 26, the norms and the rest divide by two.
    padding = 2 * 32
    assert rank.breakdown["parameters"] == (halves // 4 + padding // 2 + 3 * 32 // 2) * FLOAT


def test_kinds_of_rank() -> None:
    trace = traced(Head, {"head": "colwise_gather_output"}, 4)
    trace.sharded = {0: (0, VOCABULARY)}
    assert [chunk(VOCABULARY, 4, rank) for rank in range(4)] == [3, 3, 3, 1]
    assert kinds(trace, 4) == [(0, 1, 2), (3,)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 4, "gpus": 4, "model": TINY}, "cannot split LlamaForCausalLM's 2 num_key_value"),
        ({"tp": 2, "gpus": 2, "model": "gpt2"}, "no tp_plan for GPT2LMHeadModel"),
        ({"tp": 2, "gpus": 2, "model": TINY, "method": "lora"}, "--method lora is not supported"),
    ],
)
def test_what_cannot_be_split(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(make_spec(per_device_train_batch_size=1, seq_length=8, **fields))


def test_zero_does_not_combine() -> None:
    spec = make_spec(model="gpt2", gpus=4, tp=2, strategy="zero3")
    with pytest.raises(LlmemError, match="--tp with --strategy zero3 is not supported"):
        engine(spec)


def test_not_inside_a_process_group() -> None:
    with rank_of(2, 0):
        with pytest.raises(LlmemError, match="inside a process group"):
            with rank_of(2, 0):
                pass
