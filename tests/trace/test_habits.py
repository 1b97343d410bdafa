"""Habits of training loops and of other versions of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, Category, Phase, Trace
from llmem.spec import make_spec
from llmem.trace.as_transformers import behave_like
from llmem.trace.run import trace_spec

BATCH, TOKENS, WIDTH, LAYERS, HEADS = 2, 32, 64, 3, 4
VOCABULARY = 199


def gpt2(attention: str = "sdpa") -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        attn_implementation=attention,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config).train()


def traced(model: Any = None, **fields: Any) -> Trace:
    spec = make_spec(
        model=model or gpt2(), per_device_train_batch_size=BATCH, seq_length=TOKENS,
        gpu="rtx3060", max_grad_norm=0.0, optim="sgd", **fields,
    )  # fmt: skip
    return trace_spec(spec)


def gradients_alive(trace: Trace, phase: Phase) -> int:
    """Gradients that live when ``phase`` of the second step begins."""
    starts = [tick for tick, found, step in trace.phase_ticks if found is phase and step == 1]
    table = trace.lifetimes
    alive = table.alive_at(starts[0]) & (table.category == Category.GRADIENT)
    return int(alive.sum())


@pytest.mark.parametrize(
    ("zero_grad", "in_forward", "in_backward"),
    [
        ("before_forward", False, False),
        ("before_backward", True, False),
        ("after_step", False, False),
    ],
)
def test_when_gradients_go(zero_grad: str, in_forward: bool, in_backward: bool) -> None:
    trace = traced(zero_grad=zero_grad)
    assert (gradients_alive(trace, Phase.FORWARD) > 0) is in_forward
    assert (gradients_alive(trace, Phase.BACKWARD) > 0) is in_backward
    table = trace.lifetimes
    left = (table.category == Category.GRADIENT) & (table.death == NEVER)
    assert bool(left.any()) is (zero_grad != "after_step")


def test_held_outputs_keep_the_logits_until_the_next_forward_has_made_its_own() -> None:
    logits = BATCH * TOKENS * VOCABULARY * 4
    held, dropped = traced(hold_outputs=True), traced()

    def lives(trace: Trace) -> list[bool]:
        table = trace.lifetimes
        forward = [trace.phase_at(int(tick))[0] is Phase.FORWARD for tick in table.birth]
        made = [i for i, yes in enumerate(forward) if yes and table.nbytes[i] == logits]
        ends = trace.step_ticks[1]
        return [table.birth[i] < ends < table.death[i] for i in made]

    assert sum(lives(held)) == 1
    assert sum(lives(dropped)) == 0


def test_steps_of_the_spec_are_traced() -> None:
    assert len(traced(steps=3).step_ticks) == 4


def test_caches_of_old_transformers_keep_views() -> None:
    """gpt2 splits one projection into q, k, v: the view keeps all of it, a copy only k and v."""
    one = BATCH * TOKENS * WIDTH * 4
    options: dict[str, Any] = {"use_cache": True, "hold_outputs": True, "padding": True}
    new, old = traced(**options), traced(**options, as_transformers="4.51")

    def held(trace: Trace, size: int) -> int:
        table = trace.lifetimes
        tick = trace.step_ticks[1]
        activations = table.category == Category.ACTIVATION
        return int((table.alive_at(tick) & activations & (table.nbytes == size)).sum())

    assert (held(new, one), held(new, 3 * one)) == (2 * LAYERS, 0)
    assert (held(old, one), held(old, 3 * one)) == (0, LAYERS)


def test_old_transformers_share_one_float_mask() -> None:
    mask = BATCH * TOKENS * TOKENS * 4
    options: dict[str, Any] = {"padding": True, "steps": 1}
    new, old = traced(**options), traced(**options, as_transformers="4.52")

    def made(trace: Trace) -> int:
        return int((trace.lifetimes.nbytes == mask).sum())

    assert made(new) == LAYERS + made(old) - 1


def test_versions_are_checked_and_habits_end() -> None:
    from transformers.cache_utils import DynamicLayer

    before = DynamicLayer.update
    said: list[str] = []
    with behave_like("4.55", said.append):
        assert DynamicLayer.update is not before
    assert DynamicLayer.update is before
    assert len(said) == 2
    with behave_like("5.0", said.append):
        assert len(said) == 2
    for version in ("4.30", "old"):
        with pytest.raises(LlmemError), behave_like(version, said.append):
            pass


def test_torch_adafactor_traces_without_values() -> None:
    """Row and column statistics instead of a second moment per element; no branch reads the GPU."""
    layer = torch.nn.Linear(64, 32, bias=False, device="meta")
    optimizer = torch.optim.Adafactor(layer.parameters(), lr=1e-3)

    def step() -> None:
        layer(torch.empty(8, 64, device="meta")).sum().backward()
        optimizer.step()

    trace = llmem.trace(step, model=layer, optimizer=optimizer, gpu="a100-80gb")
    table = trace.lifetimes
    states = table.nbytes[table.category == Category.OPTIMIZER_STATE]
    assert sorted(states.tolist()) == [32 * 4, 64 * 4]


@pytest.mark.parametrize("optim", ["adafactor", "adafactor_torch"])
def test_both_adafactors_train_a_model(optim: str) -> None:
    spec = make_spec(
        model=gpt2(), per_device_train_batch_size=1, seq_length=8, optim=optim, gpu="a100-80gb"
    )
    assert trace_spec(spec).optimizer["state_elements"] > 0
