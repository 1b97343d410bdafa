"""The xMem-like baseline: the replay by hand, and a real CPU step of a tiny model."""

from __future__ import annotations

import pytest

from llmem.baselines import BaselineInput, run
from llmem.baselines.xmem import replay

from .reference_models import build
from .tiny import tiny_llama

MIB = 1024**2


def test_replay_by_hand() -> None:
    pytest.importorskip("llmem.gpu.replay")
    # A 12 MiB parameter, then a 3 MiB tensor twice at one address, and a free of something older.
    events = [(7, 3 * MIB), (7, -3 * MIB), (99, -64), (7, 3 * MIB), (8, 100)]
    requested, allocated, reserved = replay([12 * MIB, 0], events)
    assert requested == 15 * MIB + 100
    assert allocated == 15 * MIB + 512
    # 12 MiB by itself, a 20 MiB segment for the 3 MiB, a 2 MiB one for the small tensor.
    assert reserved == (12 + 20 + 2) * MIB


def test_a_real_step() -> None:
    pytest.importorskip("llmem.gpu.replay")
    model, config = tiny_llama(hidden_size=64, intermediate_size=128, vocab_size=1000)
    size = sum(p.numel() for p in model.parameters()) * 4
    logits = 2 * 8 * 1000 * 4
    peaks = {}
    for optim in ("sgd", "adamw_torch"):
        answer = run("xmem", BaselineInput(model, config, "tiny", 2, 8, optim=optim))
        assert answer.why_not is None
        peaks[optim] = answer.parts["requested"]
        assert answer.bytes == answer.parts["reserved"] >= answer.parts["allocated"]
    assert 2 * size < peaks["sgd"] < 2 * size + 40 * logits
    # In the second step Adam's moments lie beside weights, gradients and activations.
    assert peaks["adamw_torch"] >= peaks["sgd"] + 2 * size - logits


def test_base_is_added_only_where_measured() -> None:
    pytest.importorskip("llmem.gpu.replay")
    model, config = tiny_llama()
    answer = run("xmem", BaselineInput(model, config, "tiny", 1, 4, base_bytes=5 * MIB))
    assert answer.bytes == answer.parts["reserved"] + 5 * MIB


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpus": 2}, "one GPU"),
        ({"mixed": True}, "fp32"),
        ({"optim": "lion_8bit"}, "lion_8bit"),
        ({"batch": 4096, "seq": 100_000_000}, "minutes"),
    ],
)
def test_refusals(options: dict, why: str) -> None:
    model, config = tiny_llama()
    answer = run("xmem", BaselineInput(model, config, "tiny", **{"batch": 1, "seq": 4, **options}))
    assert answer.bytes is None
    assert why in str(answer.why_not)


def test_a_large_model_is_refused() -> None:
    model, config = build("OPT-1.3b")
    answer = run("xmem", BaselineInput(model, config, "opt-1.3b", 1, 8))
    assert answer.bytes is None
    assert "too many" in str(answer.why_not)
