"""The batch that a model is trained on."""

from __future__ import annotations

import pytest
import torch

from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.generate import spec_of
from experiments.real_cpu.models import MODELS
from llmem import models
from llmem.errors import LlmemError
from llmem.spec import make_spec
from llmem.trace.batch import batch_maker
from llmem.trace.build import prepare
from llmem.trace.run import trace_spec


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
    assert shapes("distilbert", method="lora", lora_target_modules=("q_lin",)) == whole


TINY = {
    "bert": {"model_type": "bert", "vocab_size": 331, "hidden_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 6, "intermediate_size": 104, "num_labels": 3},
    "t5": MODELS["t5"],
}  # fmt: skip
BOTH = {"input_ids": (2, 9), "attention_mask": (2, 9)}
HEADS = [
    ("bert", "BertForSequenceClassification", {}, {"labels": (2,)}, torch.int64),
    ("bert", "BertForSequenceClassification", {"problem_type": "multi_label_classification"},
     {"labels": (2, 3)}, torch.float32),
    ("bert", "BertForSequenceClassification", {"num_labels": 1}, {"labels": (2,)}, torch.float32),
    ("bert", "BertForTokenClassification", {}, {"labels": (2, 9)}, torch.int64),
    ("bert", "BertForQuestionAnswering", {"num_labels": 2}, {"start_positions": (2,), "end_positions": (2,)},
     torch.int64),
    ("bert", "BertForMaskedLM", {}, {"labels": (2, 9)}, torch.int64),
    ("t5", "T5ForConditionalGeneration", {}, {"labels": (2, 9)}, torch.int64),
]  # fmt: skip


@pytest.mark.parametrize(("config", "head", "more", "targets", "dtype"), HEADS)
def test_each_head_gets_its_labels_and_gives_a_loss(
    config: str, head: str, more: dict[str, object], targets: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    spec = make_spec(
        model={**TINY[config], "architectures": [head], **more}, optim="sgd",
        per_device_train_batch_size=2, seq_length=9, gpu="cpu", param_dtype="fp32",
    )  # fmt: skip
    step = prepare(spec, device="cpu", cuda=False).step
    batch = step.make_batch()
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {**BOTH, **targets}
    assert {batch[name].dtype for name in targets} == {dtype}
    assert step.model(**batch).loss.isfinite()
    found = against_recorder(spec)
    if found.difference:  # on a CPU the mean keeps the memory of the two squares it is made of
        assert "predicted birth of 4 bytes (mse_loss" in found.difference
    assert found.real - found.predicted == (4 if found.difference else 0)


def test_packed_row_is_what_the_collator_makes() -> None:
    from transformers import DataCollatorWithFlattening

    spec = make_spec(
        model=MODELS["llama"], per_device_train_batch_size=2, seq_length=8, gpu="cpu",
        packed=True, packed_documents=2,
    )  # fmt: skip
    made = prepare(spec, device="cpu", cuda=False).step.make_batch()
    documents = made["input_ids"].reshape(4, 4).tolist()
    collated = DataCollatorWithFlattening()([{"input_ids": ids} for ids in documents])
    assert set(made) == set(collated)
    for name, tensor in made.items():
        assert (tensor.shape, tensor.dtype) == (collated[name].shape, collated[name].dtype)
    for name in ("input_ids", "position_ids"):
        assert torch.equal(made[name], collated[name])


def test_packed_row_for_flash_attention_has_its_boundaries() -> None:
    spec = make_spec(
        model=MODELS["llama"], per_device_train_batch_size=2, seq_length=8, packed=True,
        packed_documents=4, attn_implementation="flash_attention_2", param_dtype="bf16",
    )  # fmt: skip
    prepared = prepare(spec, device="meta", cuda=True)
    batch = prepared.step.make_batch()
    assert batch["cu_seq_lens_q"].shape == (2 * 4 + 1,)
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_k"] == 2
    assert "packed: one row of 16 tokens, 8 documents of 2 tokens" in prepared.assumptions[0]


def test_packed_attention() -> None:
    """Flash attention takes [tokens, heads, head size]; SDPA one mask of all tokens by all."""
    fields = {"model": MODELS["llama"], "per_device_train_batch_size": 2, "seq_length": 20,
              "packed": True, "param_dtype": "bf16", "optim": "sgd"}  # fmt: skip
    flash = trace_spec(make_spec(**fields, attn_implementation="flash_attention_2"), steps=1)
    assert "_flash_attention_forward" in flash.names
    assert 40 * 40 not in flash.lifetimes.nbytes
    masked = trace_spec(make_spec(**fields, attn_implementation="sdpa"), steps=1)
    assert 40 * 40 in masked.lifetimes.nbytes  # one byte each
    assert "model asks whether all() of a mask holds: assumed no" in masked.assumptions


@pytest.mark.parametrize("case", ["packed sdpa", "packed eager"])
def test_packed_step_is_that_of_a_real_run(case: str) -> None:
    found = against_recorder(spec_of("qwen2", case))
    assert (found.real, found.difference) == (found.predicted, "")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": MODELS["bloom"]}, "position_ids, which BloomForCausalLM does not"),
        ({"model": MODELS["distilbert"]}, "DistilBertForSequenceClassification does not"),
        ({"packed_documents": 7}, "9 tokens cannot be cut into 7 documents"),
    ],
)
def test_what_cannot_be_packed(fields: dict[str, object], named: str) -> None:
    spec = make_spec(**{"model": MODELS["llama"], "seq_length": 9, "packed": True, **fields})
    with pytest.raises(LlmemError, match=named):
        prepare(spec, device="meta", cuda=True)


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
