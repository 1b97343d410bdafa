"""Every preset can be traced (``experiments.speed.presets`` says how soon)."""

from __future__ import annotations

import pytest

from llmem.lifetimes import Category, Phase, Trace
from llmem.models import list_presets
from llmem.spec import make_spec
from llmem.timeline import replay
from llmem.trace.run import trace_spec

PRESETS = [preset.name for preset in list_presets()]
UNUSED = ("vision_tower", "multi_modal_projector")
"""Parameters of gemma-3 that a batch of text alone gives no gradient."""


def traced(name: str, *, checkpointing: bool, steps: int) -> Trace:
    spec = make_spec(
        model=name,
        per_device_train_batch_size=1,
        seq_length=512,
        gradient_checkpointing=checkpointing,
    )
    return trace_spec(spec, steps=steps)


def check_step(trace: Trace) -> None:
    """A whole step: parameters have their bytes, each gets a gradient as large as itself."""
    table = trace.lifetimes
    for parameter in trace.parameters:
        assert table.nbytes[parameter.row] >= parameter.nbytes
    used = {p.key: p for p in trace.parameters if not any(u in p.name for u in UNUSED)}
    ready = {key for _, key in trace.gradient_ready}
    assert ready == set(used)
    gradients = table.take((table.category == Category.GRADIENT) & (table.key >= 0))
    assert set(gradients.key.tolist()) == set(used)
    assert all(n == used[k].nbytes for k, n in zip(gradients.key, gradients.nbytes, strict=True))
    phases = {Phase(int(p)) for p in trace.ops.phase}
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER} <= phases


@pytest.mark.parametrize("name", PRESETS)
def test_one_step_can_be_traced(name: str) -> None:
    """With checkpointing for every second preset; the slow test below does both for each."""
    checkpointing = PRESETS.index(name) % 2 == 0
    trace = traced(name, checkpointing=checkpointing, steps=1)
    check_step(trace)
    assert trace.ops.recompute.any() == checkpointing


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_checkpointing_keeps_fewer_activations(name: str) -> None:
    kept = traced(name, checkpointing=False, steps=2)
    check_step(kept)
    recomputed = traced(name, checkpointing=True, steps=2)
    check_step(recomputed)
    assert activations(recomputed) < activations(kept)


def activations(trace: Trace) -> int:
    """The most bytes of activations alive at once."""
    table = trace.lifetimes
    kept = table.take(table.category == Category.ACTIVATION)
    return int(replay(kept, exact=True).requested.max())
