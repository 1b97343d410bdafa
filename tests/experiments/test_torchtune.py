"""torchtune's own model against the figures that its authors printed, and against torch's FSDP2."""

from __future__ import annotations

import pytest

from experiments.public_runs import torchtune_model
from experiments.public_runs.torchtune import UNITS, lines, name_of, predict
from experiments.public_runs.torchtune_model import Options, Size, builder
from experiments.real_runs.fake_fsdp2 import compare
from llmem.spec import make_spec

TINY = Size(8192, 256, 2, 4, 2, 512, tied=False)


def test_the_rows_that_are_expressed() -> None:
    found = list(lines())
    assert [line["measured_as_printed"] for line in found] == [
        f"{gib} GiB" for gib in (60.0, 51.0, 42.9, 24.9, 23.1, 21.8, 13.9)
    ]
    assert sum(line["compile"] == "True" for line in found) == 6


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_head_in_chunks_under_fsdp2(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called 8 times and prefetches itself: the peak is that of torch's engine code."""
    monkeypatch.setitem(torchtune_model.SIZES, "tiny", TINY)
    spec = make_spec(
        model=builder("tiny", Options(chunked=True, checkpointed=checkpointed)), gpu="cpu", gpus=8,
        per_device_train_batch_size=2, seq_length=64, optim="adamw_torch_fused", strategy="fsdp2",
        fsdp_transformer_layer_cls_to_wrap=UNITS if checkpointed else ("Layer", *UNITS[1:]),
        max_grad_norm=0.0, zero_grad="after_step",
    )  # fmt: skip
    found = compare(spec)
    assert found.predicted.peak.requested == pytest.approx(found.engine.peak, abs=100)


@pytest.mark.slow
def test_a_compiled_row_is_predicted_within_what_was_printed() -> None:
    """Layers and the chunks' cross-entropy by Inductor, the optimizer in backward."""
    line = next(line for line in lines() if line["measured_as_printed"] == "23.1 GiB")
    assert "compiled, loss in chunks, checkpoints, optimizer in backward" in name_of(line)
    result = predict(line)
    assert result.worst.peak.allocated == pytest.approx(int(line["measured_bytes"]), rel=0.005)
    assert any("7 graphs" in note for note in result.assumptions)
