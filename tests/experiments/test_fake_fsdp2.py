"""torch's own FSDP2 on meta tensors: what its recorder sees, and that the pass agrees with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.real_runs.fake_fsdp2 import (
    ResizeRecorder,
    compare,
    predicted_unit_events,
    record_fake_fsdp2,
)
from experiments.real_runs.matrix import FAMILIES
from llmem.lifetimes import NEVER
from llmem.spec import RunSpec, make_spec
from llmem.timeline import replay

LAYERS = 2


def spec_of(**fields: Any) -> RunSpec:
    return make_spec(
        model={**FAMILIES["llama"], "num_hidden_layers": LAYERS},
        per_device_train_batch_size=2,
        seq_length=17,
        strategy="fsdp2",
        gpu="cpu",
        **{"param_dtype": "fp32", "gpus": 5, **fields},
    )


def test_a_resized_storage_dies_and_is_born_again() -> None:
    recorder = ResizeRecorder()
    with recorder.watch_resizes(), recorder:
        tensor = torch.empty(100, dtype=torch.uint8, device="meta")
        storage = tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(0)
        other = torch.empty(7, dtype=torch.uint8, device="meta")
        storage.resize_(100)
        del other
        storage.resize_(0)
        del tensor, storage
    trace = recorder.finish()
    assert sorted(trace.lifetimes.nbytes.tolist()) == [7, 100, 100]
    assert NEVER not in trace.lifetimes.death
    assert replay(trace.lifetimes, exact=True).requested.tolist() == [100, 0, 7, 107, 100, 0]


def test_a_storage_that_dies_full_is_freed_once() -> None:
    recorder = ResizeRecorder()
    with recorder.watch_resizes(), recorder:
        tensor = torch.empty(10, dtype=torch.uint8, device="meta")
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(20)
        del tensor
    assert replay(recorder.finish().lifetimes, exact=True).requested.tolist() == [10, 0, 20, 0]


def test_units_are_gathered_and_freed_in_the_documented_order() -> None:
    events = record_fake_fsdp2(spec_of(steps=1), 5).unit_events
    first, second = "model.layers.0", "model.layers.1"
    assert events == [
        ("gather", ""),
        ("gather", first), ("free", first),
        ("gather", second), ("free", second),
        ("gather", second), ("gather", first),  # the second's own, then the prefetched one
        ("free", second), ("reduce", second),
        ("free", first), ("reduce", first),
        ("free", ""), ("reduce", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"bf16": True},
        {"bf16": True, "gradient_checkpointing": True},
        {"bf16": True, "reshard_after_forward": False},
        {"gradient_checkpointing": True, "reshard_after_forward": False},
        {"bf16": True, "gradient_accumulation_steps": 2},
        {"method": "lora", "bf16": True},
        {"method": "lora", "bf16": True, "param_dtype": "bf16", "offload": "all"},
        {"bf16": True, "gpus": 4, "reshard_after_forward": 2, "offload": "all"},
        {"bf16": True, "gradient_accumulation_steps": 2, "offload": "all"},
        {"fsdp_units": "accelerate", "reshard_after_forward": False},
        {"fsdp_units": "accelerate", "method": "lora", "bf16": True, "param_dtype": "bf16"},
        {
            "fsdp_units": "accelerate", "method": "lora", "gradient_checkpointing": True,
            "use_reentrant": True,
        },
    ],
    ids=lambda fields: "-".join(fields),
)
def test_the_pass_agrees_with_torch_to_the_byte(fields: dict[str, Any]) -> None:
    done = compare(spec_of(**fields))
    assert done.predicted.peak.requested == done.engine.peak
    assert predicted_unit_events(done.predicted) == done.engine.unit_events
    assert abs(done.phase_error) < 0.002


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_accelerates_units_differ_by_the_cast_of_the_loss(family: str) -> None:
    """bf16: its ``output_dtype`` has the root cast the loss, which the pass leaves in fp32."""
    model = {**FAMILIES[family], "num_hidden_layers": LAYERS, "n_layer": LAYERS}
    fields: dict[str, Any] = {"model": model, "bf16": True, "fsdp_units": "accelerate"}
    done = compare(spec_of().model_copy(update={**fields, "reduce_dtype": "bf16"}))
    assert 0 <= done.predicted.peak.requested - done.engine.peak <= 4
    assert done.same_order
