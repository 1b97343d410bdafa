"""Schedules that part backward: torch's own tables of actions, and every buffer of a toy's rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import get_schedule_class

from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, Category, Phase, Trace
from llmem.parallel.pipeline.replay_stages import StageReplay
from llmem.parallel.pipeline.schedule import actions, in_flight, stages_on
from llmem.parallel.pipeline.stages import staged
from llmem.spec import make_spec
from llmem.trace.recorder import Recorder
from llmem.trace.run import frees_by_reference_count
from llmem.trace.staged_backward import StagedBackward, _Border
from tests.parallel.test_pipeline import HIDDEN, TINY, WEIGHT, Toy, spans

NAMES = {
    "interleaved": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def torch_order(schedule: str, ranks: int, micro_batches: int, per_rank: int) -> Any:
    """``pipeline_order`` of torch's class, or the error with which it refuses."""
    stages = [MagicMock(group_size=ranks, group_rank=0, submod=None) for _ in range(per_rank)]
    for number, stage in enumerate(stages):
        stage.stage_index, stage.num_stages = number, ranks * per_rank
    try:
        made = get_schedule_class(NAMES[schedule])(stages, micro_batches, loss_fn=lambda *_: None)
    except ValueError as error:
        return error
    return made.pipeline_order  # type: ignore[attr-defined]


def flat(order: list[schedules._Action | None]) -> list[str]:
    """Without bubbles; of an overlapped pair both, as the runtime runs them."""
    return [
        f"{part.stage_index}{part.computation_type.value}{part.microbatch_index}"
        for action in order
        if action is not None
        for part in action.sub_actions or (action,)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("schedule", NAMES)
def test_the_order_is_that_of_torch(schedule: str, ranks: int) -> None:
    for per_rank in (2, 3) if schedule.startswith("interleaved") else (2,):
        for micro_batches in range(1, 14):
            theirs = torch_order(schedule, ranks, micro_batches, per_rank)
            if isinstance(theirs, ValueError):
                with pytest.raises(LlmemError, match=f"--pp-schedule {schedule}"):
                    actions(schedule, ranks, 0, micro_batches, per_rank)
                continue
            for rank in range(ranks):
                mine = [str(a) for a in actions(schedule, ranks, rank, micro_batches, per_rank)]
                assert mine == flat(theirs[rank])


def test_stages_lie_in_a_v() -> None:
    assert [stages_on("zbv", 3, rank, 2) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_a_micro_batch_is_in_flight_until_its_weights_have_gradients() -> None:
    # 1F0 1F1 1I0 1F2 1I1 1W0 ... : a rank of ZB1P holds one graph more for each W that is put off.
    assert in_flight(actions("interleaved", 2, 1, 4, 2)) == 3
    assert in_flight(actions("interleaved-zero-bubble", 2, 1, 4, 2)) == 4


def spec_fields(schedule: str, **fields: Any) -> dict[str, Any]:
    return {
        "gpus": 2, "pp": 2, "micro_batches": 4, "per_device_train_batch_size": 4, "seq_length": 8,
        "param_dtype": "fp32", "gpu": "cpu", "pp_schedule": schedule, **fields,
    }  # fmt: skip


def parted_trace(layers: int) -> Trace:
    """A micro-batch of the toy, a stage for each layer: forward, then dI and dW from the last one."""
    with torch.device("meta"):
        model, x = Toy(layers), torch.empty(4, 6)
    names = [f"layers.{number}" for number in range(layers)]
    backward = StagedBackward(model, names, layers)
    recorder = Recorder()
    recorder.add_model(model)
    for gradient in backward.earlier:
        recorder.add_existing(gradient, Category.GRADIENT)
    with (
        backward.cut(),
        recorder.watch_modules(model, set()),
        recorder.watch_gradients(),
        frees_by_reference_count(),
        recorder,
    ):
        recorder.start_step(0)
        with recorder.in_phase(Phase.FORWARD):
            loss = model(x)
        with recorder.in_phase(Phase.BACKWARD):
            backward(loss, recorder)
        del loss
    trace = recorder.finish()
    trace.wrapped = names
    return trace


def test_every_buffer_of_the_bottom_of_the_v() -> None:
    """ZB-V of one micro-batch on rank 1 of 2, which has the stages 1 and 2 of four."""
    order = actions("zbv", 2, 1, 1)
    assert str(order) == "[1F0, 2F0, 2I0, 2W0, 1I0, 1W0]"
    spec = make_spec(model="m", gpus=2, pp=2, micro_batches=1, pp_schedule="zbv")
    trace = StageReplay(staged(parted_trace(4), 4), spec, order).trace()
    hidden, weight = HIDDEN, WEIGHT
    assert spans(trace.lifetimes, trace) == [
        (weight, "", Category.PARAMETER, 0, None),
        (weight, "", Category.PARAMETER, 1, None),
        (hidden, "", Category.COMMUNICATION, 2, None),  # stage 1's input, from rank 0
        (hidden, "", Category.COMMUNICATION, 3, 15),  # its gradient, until 2I0's takes its place
        (hidden, "", Category.COMMUNICATION, 4, 9),  # stage 2's input, until 1F0's takes its place
        (hidden, "", Category.COMMUNICATION, 5, None),  # its gradient, from rank 0
        (hidden, "mm", Category.ACTIVATION, 6, 8),
        (hidden, "tanh", Category.ACTIVATION, 7, 28),  # stage 2's input until the next step's 1F0
        (hidden, "mm", Category.ACTIVATION, 10, 12),
        (hidden, "tanh", Category.ACTIVATION, 11, 22),  # sent: until the step is done
        (hidden, "tanh_backward", Category.ACTIVATION_GRADIENT, 13, 17),  # 2I0 keeps it for 2W0
        (hidden, "mm", Category.ACTIVATION_GRADIENT, 14, 34),  # until the next step's 2I0
        (weight, "mm", Category.GRADIENT, 16, 23),  # until the next step drops it
        (hidden, "tanh_backward", Category.ACTIVATION_GRADIENT, 18, 21),
        (hidden, "mm", Category.ACTIVATION_GRADIENT, 19, 24),  # sent, and .grad until the next step
        (weight, "mm", Category.GRADIENT, 20, 23),
    ]


@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv", "dualpipev"])
def test_every_parameter_ends_with_one_gradient(schedule: str) -> None:
    """Tied embeddings are on both ranks, or once on rank 0, which has both ends of a V."""
    model = {**TINY, "num_hidden_layers": 4, "tie_word_embeddings": True}
    found = estimate(model=model, **spec_fields(schedule))
    for rank in found.ranks:
        table = rank.table.lifetimes
        gradients = table.take((table.category == Category.GRADIENT) & (table.death == NEVER))
        weights = table.take(table.category == Category.PARAMETER)
        assert sorted(gradients.key.tolist()) == sorted(weights.key.tolist())
        assert gradients.nbytes.sum() == weights.nbytes.sum()


@pytest.mark.parametrize(
    ("schedule", "fields", "said"),
    [
        ("interleaved-zero-bubble", {"micro_batches": 5, "per_device_train_batch_size": 5},
         "interleaved-zero-bubble cuts 5 micro-batches into 2 rounds"),
        ("dualpipev", {"micro_batches": 2}, "needs at least 4 micro-batches for 4 stages"),
        ("zbv", {"model": {**TINY, "num_hidden_layers": 3}}, "4 pipeline stages need as many layers"),
        ("zbv", {"gpus": 4, "strategy": "ddp"}, "zbv with --strategy ddp is not modelled"),
        ("zbv", {"gradient_checkpointing": True, "use_reentrant": True}, "add --no-use-reentrant"),
    ],
)  # fmt: skip
def test_what_no_zero_bubble_can_do(schedule: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(**spec_fields(schedule, **{"model": {**TINY, "num_hidden_layers": 4}, **fields}))


def test_a_stage_that_makes_a_view_has_no_parted_backward() -> None:
    border, layer = _Border(), torch.nn.Identity()
    with border.before(layer), pytest.raises(LlmemError, match="makes a view"):
        layer(torch.ones(4, 6, requires_grad=True).view(2, 12))


@pytest.mark.parametrize("handed", [0, 2])
def test_a_border_is_of_one_tensor(handed: int) -> None:
    border, layer = _Border(), torch.nn.Bilinear(2, 2, 2)
    given = [torch.ones(1, 2) * torch.ones(1, requires_grad=number < handed) for number in range(2)]
    with border.before(layer), pytest.raises(LlmemError, match=f"given {handed} tensors"):
        layer(*given)
