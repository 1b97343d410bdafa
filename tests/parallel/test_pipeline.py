"""Pipelines of a toy: what is held in flight, and every buffer of one rank written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.estimate import estimate, outside_allocator
from llmem.gpu.devices import get_device
from llmem.lifetimes import NEVER, TICK, Category, Lifetimes, Trace
from llmem.parallel import engine
from llmem.parallel.pipeline.action import Action, Kind
from llmem.parallel.pipeline.replay_stages import StageReplay
from llmem.parallel.pipeline.schedule import actions, in_flight
from llmem.parallel.pipeline.stages import stages_of
from llmem.spec import RunSpec, make_spec
from llmem.trace.micro_batch import one_micro_batch

WIDTH, ROWS, FLOAT = 6, 4, 4
HIDDEN = ROWS * WIDTH * FLOAT
WEIGHT = WIDTH * WIDTH * FLOAT
F, B = Kind.FORWARD, Kind.BACKWARD


class Layer(torch.nn.Module):
    """x [4, 6] -> linear [6, 6] -> tanh, which keeps its output for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()  # type: ignore[no-any-return]


class Toy(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def toy_trace(layers: int) -> Trace:
    """Forward and backward of one micro-batch."""
    with torch.device("meta"):
        model, x = Toy(layers), torch.empty(ROWS, WIDTH)
    trace = llmem.trace(lambda: model(x).backward(), model=model, steps=1, gpu="cpu")
    trace.wrapped = [f"layers.{number}" for number in range(layers)]
    return trace


def rank_trace(trace: Trace, pp: int, rank: int, micro_batches: int, schedule: str) -> Trace:
    spec = spec_of(pp, micro_batches, schedule)
    per_rank = 2 if schedule == "interleaved" else 1
    order = actions(schedule, pp, rank, micro_batches, per_rank)
    return StageReplay(stages_of(trace, pp * per_rank), spec, order).trace()


def spec_of(pp: int, micro_batches: int, schedule: str) -> RunSpec:
    return make_spec(
        model="gpt2", gpus=pp, pp=pp, micro_batches=micro_batches, pp_schedule=schedule,
        per_device_train_batch_size=micro_batches,
    )  # fmt: skip


def most_alive(trace: Trace, op: str, module: str = "") -> int:
    """The most outputs of ``op`` (in ``module``) that are alive at once."""
    table = trace.lifetimes
    names = np.array([trace.op_name(int(o)) == op for o in table.birth_op])
    inside = np.array([trace.modules[m].startswith(module) for m in table.module.tolist()])
    mine = table.take(names & inside)
    return max(int(mine.alive_at(tick).sum()) for tick in mine.birth.tolist())


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])],
)
def test_micro_batches_in_flight(schedule: str, held: list[int]) -> None:
    assert [in_flight(actions(schedule, 4, rank, 8)) for rank in range(4)] == held
    trace = toy_trace(8)  # two layers per stage: the first one's output is kept, not sent
    ranks = [rank_trace(trace, 4, rank, 8, schedule) for rank in range(4)]
    assert [most_alive(ranks[r], "tanh", f"layers.{2 * r}") for r in range(4)] == held


def test_what_was_sent_is_held_by_the_handle_of_its_send() -> None:
    """1F1B keeps the last handle of the warm-up until all forwards are done: one output more.

    Rank 0 of 2, four micro-batches: F0 F1 B0 F2 B1 F3 B2 B3. F0's output outlives B0.
    """
    trace = rank_trace(toy_trace(2), 2, 0, 4, "1f1b")
    assert most_alive(trace, "tanh") == 3  # F0's, F1's and F2's; later F0's, F2's and F3's
    assert most_alive(rank_trace(toy_trace(2), 2, 1, 4, "1f1b"), "tanh") == 1  # sends nothing


class Residual(Layer):
    """x -> x + tanh(linear(x)): backward adds to the gradient that it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_a_gradient_that_arrives_is_not_added_to_in_place() -> None:
    with torch.device("meta"):
        model, x = Toy(3), torch.empty(ROWS, WIDTH)
        model.layers = torch.nn.ModuleList(Residual() for _ in range(3))
    whole = llmem.trace(lambda: model(x).backward(), model=model, steps=1, gpu="cpu")
    whole.wrapped = [f"layers.{number}" for number in range(3)]
    added = []
    for rank in range(3):
        trace = rank_trace(whole, 3, rank, 3, "gpipe")
        table = trace.lifetimes
        first = table.birth < trace.step_ticks[1]
        new = first & (table.category == Category.ACTIVATION_GRADIENT) & (table.birth_op == -1)
        added.append(table.nbytes[new].tolist())
    # The first stage's input needs no gradient, the last one's arrives from nowhere.
    assert added == [[], [HIDDEN] * 3, []]


def test_interleaved_order() -> None:
    # Two ranks, two stages each (rank 0: 0 and 2), four micro-batches in rounds of two.
    order = actions("interleaved", 2, 0, 4, 2)
    text = " ".join(f"{'F' if a.forward else 'B'}{a.stage}.{a.micro}" for a in order)
    assert text == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )
    assert in_flight(order) == 5
    # What was sent is held until the step is done: all eight outputs of two stages.
    assert most_alive(rank_trace(toy_trace(4), 2, 0, 4, "interleaved"), "tanh") == 8


def test_every_schedule_runs_every_micro_batch_once() -> None:
    for schedule, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        for rank in range(4):
            order = actions(schedule, 4, rank, 8, per_rank)
            stages = [rank + 4 * local for local in range(per_rank)]
            both = [Action(k, s, m) for k in (F, B) for s in stages for m in range(8)]
            assert len(order) == len(both) and set(order) == set(both)
            for stage in stages:
                for micro in range(8):
                    ahead = order.index(Action(F, stage, micro))
                    assert ahead < order.index(Action(B, stage, micro))


def spans(table: Lifetimes, trace: Trace) -> list[tuple[int, str, Category, int, int | None]]:
    """(bytes, op, category, birth, death) of the first step's rows; events numbered from 0."""
    events = table.events().tick.tolist()
    place = {tick: number for number, tick in enumerate(dict.fromkeys(events))}
    return [
        (
            int(table.nbytes[row]),
            trace.op_name(int(table.birth_op[row])),
            Category(int(table.category[row])),
            place[int(table.birth[row])],
            None if table.death[row] == NEVER else place[int(table.death[row])],
        )
        for row in range(len(table))
        if table.birth[row] < trace.step_ticks[1]
    ]


def test_every_buffer_of_the_first_of_two_stages() -> None:
    """1F1B of two micro-batches on rank 0: F0 F1 B0 B1."""
    trace = rank_trace(toy_trace(2), 2, 0, 2, "1f1b")
    hidden, weight = HIDDEN, WEIGHT
    assert spans(trace.lifetimes, trace) == [
        (weight, "", Category.PARAMETER, 0, None),
        (hidden, "", Category.COMMUNICATION, 1, None),  # two gradients to be received
        (hidden, "", Category.COMMUNICATION, 2, None),
        (hidden, "mm", Category.ACTIVATION, 3, 5),
        (hidden, "tanh", Category.ACTIVATION, 4, 12),  # sent, held until B0 returns
        (hidden, "mm", Category.ACTIVATION, 6, 8),
        (hidden, "tanh", Category.ACTIVATION, 7, 17),  # until B1 returns
        (hidden, "tanh_backward", Category.ACTIVATION_GRADIENT, 9, 11),
        (weight, "mm", Category.GRADIENT, 10, 18),  # until the next step drops it
        (hidden, "tanh_backward", Category.ACTIVATION_GRADIENT, 13, 15),
        (weight, "mm", Category.GRADIENT, 14, 16),  # added to the first one
    ]


def test_the_last_stage_receives_and_sends_gradients() -> None:
    trace = rank_trace(toy_trace(2), 2, 1, 2, "1f1b")
    table = trace.lifetimes
    kinds = table.category[table.birth < trace.step_ticks[1]].tolist()
    assert kinds.count(Category.PARAMETER) == 1
    assert kinds.count(Category.COMMUNICATION) == 2  # inputs to be received
    # The gradient of the input, sent to the first stage, is held until the next backward is done.
    sent = [
        row for row in range(len(table))
        if trace.op_name(int(table.birth_op[row])) == "mm"
        and table.category[row] == Category.ACTIVATION_GRADIENT
        and table.birth[row] < trace.step_ticks[1]
    ]  # fmt: skip
    assert [int(table.nbytes[row]) for row in sent] == [HIDDEN, HIDDEN]
    assert table.death[sent[0]] > table.birth[sent[1]]


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 102,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
BLOCK, EMBEDDING, NORM = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32, 102 * 32, 32


@pytest.mark.parametrize("tied", [False, True])
def test_who_holds_which_parameters(tied: bool) -> None:
    found = estimate(
        model={**TINY, "tie_word_embeddings": tied}, gpus=2, pp=2, micro_batches=4,
        per_device_train_batch_size=4, seq_length=8, param_dtype="fp32", gpu="cpu",
    )  # fmt: skip
    assert [rank.table.ranks for rank in found.ranks] == [(0,), (1,)]
    first, last = (rank.breakdown["parameters"] for rank in found.ranks)
    assert first == (2 * BLOCK + EMBEDDING) * FLOAT  # three layers: two and one
    assert last == (BLOCK + NORM + EMBEDDING) * FLOAT  # the head, or the tied embedding's copy
    for rank in found.ranks:  # one gradient per parameter when the step ends
        table = rank.table.lifetimes
        gradients = (table.category == Category.GRADIENT) & (table.death == NEVER)
        weights = table.category == Category.PARAMETER
        assert table.nbytes[gradients].sum() == table.nbytes[weights].sum()


@pytest.mark.parametrize("sp", [False, True])
def test_tied_embeddings_of_tensor_parallel_stages(sp: bool) -> None:
    """DTensor's gradient of an embedding is a view of one of all 102 tokens, on the first stage."""
    found = estimate(
        model={**TINY, "tie_word_embeddings": True}, gpus=4, tp=2, pp=2, micro_batches=2,
        per_device_train_batch_size=2, seq_length=8, param_dtype="fp32", gpu="cpu",
        tp_plan="torchtitan", sp=sp,
    )  # fmt: skip
    half = EMBEDDING // 2 * FLOAT
    for rank, expected in zip(found.ranks, (2 * half, half), strict=True):
        table = rank.table.lifetimes
        gradients = (table.category == Category.GRADIENT) & (table.death == NEVER) & (table.key == 0)
        assert table.nbytes[gradients].tolist() == [expected]
        received = table.nbytes[table.category == Category.COMMUNICATION][:2]
        assert set(received.tolist()) == {8 * 32 * FLOAT // (2 if sp else 1)}


def test_one_communicator_per_mesh_dimension() -> None:
    device = get_device("h100-80gb")
    spec = make_spec(model="gpt2", gpus=64, tp=8, pp=4, strategy="ddp", gpu="h100-80gb")
    expected = sum(device.nccl(ranks).value for ranks in (2, 8, 4))
    assert outside_allocator(device, spec)["nccl"] == expected


def test_tensor_parallel_pipeline_with_replicas() -> None:
    found = estimate(
        model=TINY, gpus=8, tp=2, pp=2, strategy="ddp", micro_batches=2,
        per_device_train_batch_size=2, seq_length=8, param_dtype="fp32", gpu="cpu",
    )  # fmt: skip
    # (pp, replica, tp): both tensor-parallel ranks of both replicas are alike
    assert [rank.table.ranks for rank in found.ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: actions("1f1b", 4, 0, 3), "at least 4 micro-batches for 4 stages"),
        (lambda: actions("interleaved", 4, 0, 9, 2), "use a multiple of 4"),
        (lambda: stages_of(toy_trace(2), 3), "3 pipeline stages need as many layers"),
        (
            lambda: one_micro_batch(make_spec(model="gpt2", gpus=2, pp=2, micro_batches=3)),
            "8 sequences cannot be cut into 3",
        ),
        (
            lambda: one_micro_batch(
                make_spec(model="gpt2", gpus=2, pp=2, gradient_accumulation_steps=2)
            ),
            "use --micro-batches",
        ),
        (
            lambda: engine(make_spec(model="gpt2", gpus=4, pp=2, strategy="zero3")),
            "--pp with --strategy zero3 is not supported",
        ),
    ],
)
def test_what_has_no_pipeline(call: Any, said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        call()


def test_ticks_keep_their_distance() -> None:
    trace = rank_trace(toy_trace(4), 4, 2, 4, "1f1b")
    births = np.sort(trace.lifetimes.birth)
    assert len(np.unique(births)) == len(births)
    assert (np.diff(births) >= TICK).all()


def test_an_optimizer_copies_its_part_of_a_gradient_of_the_whole_vocabulary() -> None:
    """DTensor's redistribution in AdamW: the embedding's gradient is of 102 tokens, the rank's of 51."""
    found = estimate(
        model={**TINY, "tie_word_embeddings": False}, gpus=4, tp=2, pp=2, micro_batches=2,
        per_device_train_batch_size=2, seq_length=8, param_dtype="fp32", gpu="cpu",
        tp_plan="torchtitan", max_grad_norm=0.0,
    )  # fmt: skip
    copies = []
    for rank in found.ranks:
        table, trace = rank.table.lifetimes, rank.table.trace
        cloned = np.array([trace.op_name(int(op)) == "clone" for op in table.birth_op])
        mine = cloned & (table.category == Category.OPTIMIZER_TEMPORARY)
        copies.append(table.nbytes[mine].tolist())
    assert copies == [[EMBEDDING // 2 * FLOAT] * 2, []]  # in each step of the first stage
