"""Optimizer states by hand, and what the update needs besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmem
from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from experiments.real_cpu.optimizers import ON_CPU, ONE_EACH, spec_of, states
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Phase, Trace
from llmem.optim_names import OPTIMIZERS
from llmem.spec import make_spec
from llmem.trace.optimizers import by_step, plan_optimizer

MATRIX, VECTOR = (300, 400), 7
ELEMENTS = 300 * 400 + 7
BLOCKS = 469  # of 256: 120,000 / 256 = 468.75


class Two(torch.nn.Module):
    """One matrix (8-bit, paged), one vector (too small for either)."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.empty(MATRIX, device="meta"))
        self.vector = torch.nn.Parameter(torch.empty(VECTOR, device="meta"))


def stepped(optim: str, dtype: torch.dtype = torch.float32, cuda: bool = True) -> Trace:
    """Two updates of ``Two``, the gradients being there."""
    model = Two().to(dtype)
    optimizer = plan_optimizer(optim, cuda=cuda).build(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return llmem.trace(optimizer.step, model=model, optimizer=optimizer, gpu="a100-80gb")


FACTORED = 300 + 400 + 7
STATES = {
    "sgd": (0, 0),
    "sgd_momentum": (ELEMENTS, 4 * ELEMENTS),
    "adamw_torch": (2 * ELEMENTS + 2, 8 * ELEMENTS + 8),  # a step count each
    "adamw_torch_fused": (2 * ELEMENTS + 2, 8 * ELEMENTS + 8),
    "rmsprop": (ELEMENTS + 2, 4 * ELEMENTS + 8),
    "adagrad": (ELEMENTS + 2, 4 * ELEMENTS + 8),
    "adafactor_torch": (FACTORED + 2, 4 * FACTORED + 8),
    "adafactor": (FACTORED + 4, 4 * FACTORED + 8),  # a count in Python and an RMS each
    "adamw_bnb_8bit": (
        2 * (120_000 + 256 + BLOCKS + 7) + 2,
        2 * (120_000 + 4 * 256 + 4 * BLOCKS + 4 * 7),
    ),
    "lion_8bit": (120_000 + 256 + BLOCKS + 7 + 2, 120_000 + 4 * (256 + BLOCKS + 7)),
    "ademamix_8bit": (
        3 * (120_000 + BLOCKS + 7) + 2 * 256 + 2,
        3 * (120_000 + 4 * BLOCKS + 4 * 7) + 2 * 4 * 256,
    ),
    "lion_32bit": (ELEMENTS + 2, 4 * ELEMENTS),
    "rmsprop_bnb_32bit": (ELEMENTS + 2, 4 * ELEMENTS),
}


@pytest.mark.parametrize("optim", list(STATES))
def test_states_by_hand(optim: str) -> None:
    found = by_step(stepped(optim).optimizer)
    assert (found["state_elements"], found["state_bytes"]) == STATES[optim]
    assert (
        found["first"]
        == found["steady"]
        == dict(zip(("state_elements", "state_bytes"), STATES[optim], strict=True))
    )


def test_a_state_that_grows_is_told_by_step() -> None:
    """A parameter that first gets a gradient in the second step has no state in the first."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model.matrix.grad = torch.empty_like(model.matrix)

    def step() -> None:
        optimizer.step()
        model.vector.grad = torch.empty_like(model.vector)

    trace = llmem.trace(step, model=model, optimizer=optimizer, gpu="a100-80gb")
    found = by_step(trace.optimizer)
    assert found["first"] == {"state_elements": 120_000, "state_bytes": 480_000}
    assert found["steady"] == {"state_elements": ELEMENTS, "state_bytes": 4 * ELEMENTS}


def test_every_other_name_updates_on_meta() -> None:
    for optim in set(OPTIMIZERS) - set(STATES):
        trace = stepped(optim, torch.bfloat16)
        assert Phase.OPTIMIZER in {Phase(int(phase)) for phase in trace.ops.phase}, optim


def test_states_of_half_parameters_follow_each_library() -> None:
    bf16 = torch.bfloat16
    assert stepped("adamw_torch", bf16).optimizer["state_bytes"] == 4 * ELEMENTS + 8
    assert stepped("adafactor_torch", bf16).optimizer["state_bytes"] == 2 * FACTORED + 8
    assert stepped("adafactor", bf16).optimizer["state_bytes"] == 4 * FACTORED + 8
    assert stepped("lion_32bit", bf16).optimizer["state_bytes"] == 4 * ELEMENTS


def temporary(optim: str) -> int:
    """Bytes alive at most during the second update beyond what is there after it."""
    trace = stepped(optim)
    table = trace.lifetimes
    passing = table.take(
        (table.category == Category.OPTIMIZER_TEMPORARY) & (table.birth >= trace.step_ticks[1])
    )
    return max((int(passing.nbytes[passing.alive_at(t)].sum()) for t in passing.birth), default=0)


def test_foreach_adamw_adds_a_copy_of_the_parameters_and_fused_none() -> None:
    assert temporary("adamw_torch") == 4 * ELEMENTS
    assert temporary("adamw_torch_single") == 2 * 4 * 120_000  # root and quotient of the matrix
    assert temporary("adamw_torch_fused") == 0
    assert temporary("adamw_8bit") == temporary("lion_32bit") == 0


def on_gpu(trace: Trace) -> int:
    table = trace.lifetimes
    return int(table.nbytes[table.category == Category.OPTIMIZER_STATE].sum())


def test_paged_states_are_not_on_the_gpu_but_are_told() -> None:
    paged, plain = stepped("paged_adamw_8bit"), stepped("adamw_8bit")
    assert paged.optimizer["state_bytes"] == plain.optimizer["state_bytes"] == on_gpu(plain)
    assert on_gpu(plain) - on_gpu(paged) == 2 * 120_000
    assert on_gpu(stepped("paged_adamw_8bit", cuda=False)) == on_gpu(plain)
    assert on_gpu(stepped("paged_adamw_32bit")) == 2 * 4 * VECTOR


@pytest.mark.parametrize("optim", ON_CPU)
def test_states_are_those_of_bitsandbytes(optim: str) -> None:
    pytest.importorskip("bitsandbytes")
    assert states(optim, "meta") == states(optim, "cpu")


def estimated(**fields: Any) -> Any:
    return llmem.estimate(
        per_device_train_batch_size=1, seq_length=16, gpu="a100-80gb", **fields
    ).to_json()


CLASSIFIER = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForSequenceClassification"],
    "vocab_size": 28_996,
    "num_labels": 2,
}
"""distilbert-base-cased with two labels: 65,783,042 parameters in 104 tensors."""


@pytest.mark.parametrize(
    ("optim", "elements", "mebibytes"),
    [("adamw_torch", 131_566_188, 502), ("adafactor", 178_712, 1)],
)
def test_a_classifier_s_states(optim: str, elements: int, mebibytes: int) -> None:
    """As a course chapter on Adafactor counts them, step counts and RMS included."""
    found = estimated(model=CLASSIFIER, optim=optim)["optimizer"]
    assert found["state_elements"] == elements
    assert round(found["state_bytes"] / 2**20) == mebibytes
    assert found["first"] == found["steady"]


WIDE = {**MODELS["llama"], "hidden_size": 96, "num_hidden_layers": 1}
"""Embedding and head 331 x 96 = 31,776 elements each."""


def test_embeddings_stay_in_32_bits_where_trainer_trains() -> None:
    found = estimated(model=WIDE, optim="adamw_bnb_8bit")["optimizer"]
    tied = estimated(model={**WIDE, "tie_word_embeddings": True}, optim="adamw_bnb_8bit")
    head = 2 * (331 * 96 + 4 * 125)  # 31,776 / 256 = 124.1
    assert found["name"] == "AdamW8bit"
    assert found["state_bytes"] - tied["optimizer"]["state_bytes"] == head


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_engines_take_8_bit_states(strategy: str) -> None:
    common = {"model": WIDE, "gpus": 2, "strategy": strategy, "bf16": True}
    found = estimated(optim="adamw_8bit", **common)["optimizer"]
    whole = estimated(optim="adamw_torch_fused", **common)["optimizer"]
    assert 0 < found["state_bytes"] < whole["state_bytes"] * (0.7 if strategy == "ddp" else 0.3)


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(LlmemError, match="galore_adamw' projects gradients"):
        make_spec(model=WIDE, optim="galore_adamw")
    with pytest.raises(LlmemError, match="did you mean adamw_torch"):
        make_spec(model=WIDE, optim="adamw_troch")
    with pytest.raises(LlmemError, match="cannot update the DTensors of fsdp2"):
        estimated(model=WIDE, optim="adamw_8bit", strategy="fsdp2", gpus=2)
    with pytest.raises(LlmemError, match="leave out --use-orig-params"):
        estimated(model=WIDE, optim="lion_8bit", strategy="fsdp", gpus=2, use_orig_params=True)


def in_backward(**fields: Any) -> Any:
    return llmem.estimate(
        model=WIDE, per_device_train_batch_size=1, seq_length=16, gpu="a100-80gb",
        optimizer_in_backward=True, max_grad_norm=0.0, **fields,
    )  # fmt: skip


def test_gradients_go_as_soon_as_backward_has_used_them() -> None:
    trace = in_backward(optim="adamw_torch_fused").trace
    table = trace.lifetimes
    gradients = table.take(table.category == Category.GRADIENT)
    trained = [p for p in trace.parameters if p.trainable]
    assert len(gradients) == 2 * len(trained)
    alive = [int(gradients.alive_at(tick).sum()) for tick in gradients.birth]
    assert max(alive) == 1
    assert trace.optimizer["name"] == "AdamW"
    parameters = sum(p.numel for p in trained)
    assert trace.optimizer["state_elements"] == 2 * parameters + len(trained)


def test_in_backward_keeps_embeddings_in_32_bits_too() -> None:
    found = in_backward(optim="adamw_8bit").trace.optimizer
    usual = estimated(model=WIDE, optim="adamw_8bit")["optimizer"]
    own_maps = 6 - 1  # q, o, gate, up, down and head: one optimizer each, with its own two maps
    assert found["state_bytes"] - usual["state_bytes"] == own_maps * 2 * 4 * 256


def test_in_backward_refuses_what_needs_all_gradients() -> None:
    for fields, said in (
        ({"max_grad_norm": 1.0}, "add --max-grad-norm 0"),
        ({"gradient_accumulation_steps": 2}, "leave out --gradient-accumulation-steps"),
        ({"fp16": True, "param_dtype": "fp32"}, "GradScaler"),
        ({"strategy": "ddp", "gpus": 2}, "is for one GPU"),
    ):
        with pytest.raises(LlmemError, match=said):
            estimated(model=WIDE, **{"optimizer_in_backward": True, "max_grad_norm": 0.0, **fields})


CASES = (
    "adafactor", "adafactor bf16", "adafactor_torch", "adafactor_torch bf16", "in backward",
    "in backward adafactor_torch",
)  # fmt: skip


@pytest.mark.parametrize(("model", "case"), [each for each in ONE_EACH if each[1] in CASES])
def test_updates_are_those_of_a_real_run(model: str, case: str) -> None:
    found = against_recorder(spec_of(model, case))
    assert found.real == found.predicted
    assert found.difference == ""
