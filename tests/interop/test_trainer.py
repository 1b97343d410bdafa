"""The callback in a real Trainer, on a CPU: what it reads and what it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from llmem.errors import LlmemError
from llmem.interop.trainer import MemoryCallback, fields_of

TINY = LlamaConfig(
    vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip


def train(folder: Path, callback: MemoryCallback, **more: Any) -> None:
    model = LlamaForCausalLM(TINY)
    trainer = Trainer(model, arguments(folder, **more), train_dataset=Rows(), callbacks=[callback])
    trainer.train()


def test_it_predicts_the_run_it_is_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = MemoryCallback(seq_length=8, gpu="cpu")
    with caplog.at_level(logging.WARNING):
        train(tmp_path, callback, optim="sgd", gradient_checkpointing=True)
    found = callback.estimate
    assert found is not None and found.optimizer["name"] == "SGD"
    assert found.spec.per_device_train_batch_size == 2 and found.spec.gradient_checkpointing
    parameters = sum(p.numel() for p in LlamaForCausalLM(TINY).parameters())
    assert found.worst.breakdown["parameters"] == 4 * parameters
    assert "llmem predicts a peak of" in caplog.text
    assert "nothing was measured" in caplog.text or callback.measured


def test_arguments_that_compile(tmp_path: Path) -> None:
    model = LlamaForCausalLM(TINY)
    assert fields_of(arguments(tmp_path, torch_compile=True), model)["compile"] is True
    assert "compile" not in fields_of(arguments(tmp_path), model)


def test_a_run_that_cannot_be_predicted_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = MemoryCallback(gpu="cpu")
    train(tmp_path, callback)
    assert callback.estimate is None and "give seq_length" in caplog.text


def test_it_can_stop_what_will_not_fit(tmp_path: Path) -> None:
    huge = {"per_device_train_batch_size": 4096, "model": "opt-6.7b"}
    callback = MemoryCallback(seq_length=2048, stop=True, gpu="t4", **huge)
    with pytest.raises(LlmemError, match="out of memory on"):
        train(tmp_path, callback)


def test_adapters_and_deepspeed_are_read(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=5, target_modules=["q_proj"])
    model = get_peft_model(LlamaForCausalLM(TINY), config)  # type: ignore[arg-type]
    args = arguments(tmp_path)
    fields = fields_of(args, model)
    assert fields["method"] == "lora" and fields["peft_config"]["r"] == 5
    assert fields["model"]["architectures"] == ["LlamaForCausalLM"]
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    assert fields_of(args, model)["strategy"] == "zero2"
    args.deepspeed, args.fsdp = None, ["shard_grad_op"]
    assert fields_of(args, model)["reshard_after_forward"] is False
