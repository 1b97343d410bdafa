"""The batch that a model is trained on."""

from __future__ import annotations

import pytest
import torch

from experiments.real_cpu.models import MODELS
from llmem import models
from llmem.errors import LlmemError
from llmem.spec import make_spec
from llmem.trace.batch import batch_maker
from llmem.trace.build import prepare


def shapes(name: str, device: str = "meta", **fields: object) -> dict[str, tuple[int, ...]]:
    spec = make_spec(
        model=MODELS[name], per_device_train_batch_size=2, seq_length=9, gpu="cpu", **fields
    )
    batch = prepare(spec, device=device, cuda=False).step.make_batch()
    assert {(t.device.type, t.dtype) for t in batch.values()} == {(device, torch.int64)}
    return {key: tuple(tensor.shape) for key, tensor in batch.items()}


def test_language_model() -> None:
    whole = {"input_ids": (2, 9), "attention_mask": (2, 9), "labels": (2, 9)}
    assert shapes("llama") == shapes("llama", device="cpu") == whole


def test_classifier_also_inside_peft() -> None:
    whole = {"input_ids": (2, 9), "attention_mask": (2, 9), "labels": (2,)}
    assert shapes("distilbert") == whole
    assert shapes("distilbert", method="lora", lora_target_modules="all-linear") == whole


def test_every_call_makes_tensors_of_its_own() -> None:
    spec = make_spec(model=MODELS["llama"], seq_length=9, gpu="cpu")
    make = prepare(spec, device="cpu", cuda=False).step.make_batch
    first, second = make(), make()
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert first["input_ids"].data_ptr() != second["input_ids"].data_ptr()


@pytest.mark.parametrize(("model", "named"), [("gpt2", "gpt2"), (MODELS["opt"], "opt")])
def test_too_long_for_learned_positions(model: object, named: str) -> None:
    spec = make_spec(model=model, seq_length=5000)
    built = models.build(models.resolve(model), device="meta")  # type: ignore[arg-type]
    with pytest.raises(LlmemError, match=rf"^5000 tokens are more than the \d+ .* that {named} has"):
        batch_maker(built, spec, "meta")


def test_module_without_config() -> None:
    with pytest.raises(LlmemError, match="Linear has no config"):
        batch_maker(torch.nn.Linear(2, 2), make_spec(model=torch.nn.Linear(2, 2)), "meta")
