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


def traced(name: str, *, checkpointing: bool) -> Trace:
    spec = make_spec(
        model=name,
        per_device_train_batch_size=1,
        seq_length=512,
        gradient_checkpointing=checkpointing,
    )
    return trace_spec(spec, steps=1)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_one_step_can_be_traced_with_and_without_checkpointing(name: str) -> None:
    kept = traced(name, checkpointing=False)
    check_step(kept)
    assert not kept.ops.recompute.any()
    recomputed = traced(name, checkpointing=True)
    check_step(recomputed)
    assert recomputed.ops.recompute.any()
    assert activations(recomputed) < activations(kept)


def activations(trace: Trace) -> int:
    """The most bytes of activations alive at once."""
    table = trace.lifetimes
    kept = table.take(table.category == Category.ACTIVATION)
    return int(replay(kept, exact=True).requested.max())
