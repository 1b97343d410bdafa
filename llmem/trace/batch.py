"""The batch that a model's class is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.models import max_positions
from llmem.spec import RunSpec

Batch = dict[str, torch.Tensor]


def batch_maker(model: torch.nn.Module, spec: RunSpec, device: str) -> Callable[[], Batch]:
    """Returns a function that puts one micro-batch on ``device``.

    int64 tensors of shape [batch, tokens]: input_ids, attention_mask (all ones: every sequence
    has full length) and labels, as a collator makes them; sequence classification has labels
    [batch]. On ``cpu`` the ids are random and copied at each call, as a loader's batch would be.
    Raises LlmemError when the sequence is longer than a model with learned positions allows, and
    for a module without a config, whose inputs nobody knows.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise LlmemError(
            f"{type(model).__name__} has no config that tells its inputs; "
            "trace a step() of your own over it: llmem.trace(step, model=model)"
        )
    limit = max_positions(config)
    size = (spec.per_device_train_batch_size, spec.seq_length)
    if limit is not None and spec.seq_length > limit:
        name = spec.model if isinstance(spec.model, str) else config.model_type
        raise LlmemError(
            f"{spec.seq_length} tokens are more than the {limit} positions that {name} has "
            f"learned; use -s {limit} or less"
        )
    # Wrappers such as peft's hold the classifier inside.
    classes_inside = (type(module).__name__ for module in model.modules())
    is_classifier = any(name.endswith("ForSequenceClassification") for name in classes_inside)
    vocabulary = int(getattr(config.get_text_config(), "vocab_size", 2) or 2)
    classes = int(getattr(config, "num_labels", 2)) if is_classifier else vocabulary

    made: Batch = {
        "input_ids": torch.randint(0, vocabulary, size, device=device),
        "attention_mask": torch.ones(size, dtype=torch.int64, device=device),
        "labels": torch.randint(0, classes, size[:1] if is_classifier else size, device=device),
    }
    return lambda: {name: tensor.clone() for name, tensor in made.items()}
