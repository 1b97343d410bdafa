"""The batch that a model is trained on, or the prompts that it continues."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.models import max_positions
from llmem.spec import RunSpec

Batch = dict[str, Any]
"""Keyword arguments of the model's forward: tensors, and lengths that a packed row has besides."""


def batch_maker(model: torch.nn.Module, spec: RunSpec, device: str) -> Callable[[], Batch]:
    """Returns a function that puts one micro-batch on ``device``.

    int64 tensors of shape [batch, tokens]: input_ids, attention_mask (all ones: every sequence
    has full length) and labels, as a collator makes them. Sequence classification has labels
    [batch] (floats [batch, classes] if the config says several at once), question answering
    start_positions and end_positions [batch]; ``packed`` makes one row of all (see ``_flattened``);
    prompts have no labels. Encoder-decoder models get labels as long as their input and derive
    decoder_input_ids from them. Every call makes new tensors, as a loader's batch is new.
    Raises LlmemError when the sequence is longer than a model with learned positions allows, and
    for a module without a config, whose inputs nobody knows.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise LlmemError(
            f"{type(model).__name__} has no config that tells its inputs; "
            "trace a step() of your own over it: llmem.trace(step, model=model)"
        )
    wanted = getattr(model, "main_input_name", "input_ids")
    if wanted != "input_ids" and "input_ids" not in signature(model.forward).parameters:
        raise LlmemError(
            f"{type(model).__name__} is trained on {wanted}, not on tokens; trace a step() of your own "
            "over it: llmem.trace(step, model=model)"
        )
    _check_length(config, spec)
    size = (spec.per_device_train_batch_size, spec.seq_length)
    vocabulary = int(getattr(config.get_text_config(), "vocab_size", 2) or 2)
    ids = torch.randint(0, vocabulary, size, device=device)
    if spec.packed:
        made = _flattened(model, spec, ids)
        if device == "meta":
            made |= _boundaries(model, spec)
    else:
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if spec.task == "train":
            made |= _labels(model, config, ids)
    return lambda: {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in made.items()
    }


def _check_length(config: Any, spec: RunSpec) -> None:
    limit = max_positions(config)
    name = spec.model if isinstance(spec.model, str) else getattr(config, "model_type", "the model")
    if limit is not None and spec.seq_length > limit:
        raise LlmemError(
            f"{spec.seq_length} tokens are more than the {limit} positions that {name} has "
            f"learned; use -s {limit} or less"
        )
    decoder_alone = not getattr(config, "is_encoder_decoder", False)
    whole = spec.seq_length * decoder_alone + spec.max_new_tokens
    if spec.task == "generate" and limit is not None and whole > limit:
        raise LlmemError(
            f"{spec.seq_length} tokens and {spec.max_new_tokens} new ones are more than the {limit} "
            f"positions that {name} has learned; give a shorter -s or --max-new-tokens"
        )


_CLASS_OF_TASK = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def task_of(model: torch.nn.Module) -> str:
    """Which of ``_CLASS_OF_TASK`` the model is, also inside a wrapper as peft's; '' for others."""
    names = [type(module).__name__ for module in model.modules()]
    return next((task for task in _CLASS_OF_TASK if any(n.endswith(task) for n in names)), "")


def _labels(model: torch.nn.Module, config: Any, ids: torch.Tensor) -> Batch:
    task = task_of(model)
    classes = int(getattr(config, "num_labels", 2))
    batch, tokens = ids.shape
    several = getattr(config, "problem_type", None)

    def below(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, device=ids.device)

    if task == "ForQuestionAnswering":
        return {f"{end}_positions": below(tokens, batch) for end in ("start", "end")}
    if task == "ForTokenClassification":
        return {"labels": below(classes, batch, tokens)}
    if task == "ForSequenceClassification" and several == "multi_label_classification":
        return {"labels": torch.zeros(batch, classes, device=ids.device)}
    if task == "ForSequenceClassification" and (several == "regression" or classes == 1):
        return {
            "labels": torch.zeros(batch, *(() if classes == 1 else (classes,)), device=ids.device)
        }
    if task == "ForSequenceClassification":
        return {"labels": below(classes, batch)}
    return {"labels": ids.clone()}


def _flattened(model: torch.nn.Module, spec: RunSpec, ids: torch.Tensor) -> Batch:
    """One row of all tokens, as ``DataCollatorWithFlattening`` of transformers makes it.

    input_ids, labels and position_ids [1, batch x tokens], no mask; position_ids start again at
    every document. Raises LlmemError for models and tasks that no such row is made for.
    """
    if task_of(model) or spec.task == "generate" or not _takes_positions(model):
        raise LlmemError(
            f"--packed is a row of documents for a causal language model with position_ids, which "
            f"{type(model).__name__} does not train on; leave out --packed"
        )
    number = spec.packed_documents
    if spec.seq_length % number:
        raise LlmemError(
            f"{spec.seq_length} tokens cannot be cut into {number} documents of one length; give -s "
            "a multiple of --packed-documents"
        )
    row = ids.reshape(1, -1)
    positions = torch.arange(row.numel(), device=ids.device)[None] % (spec.seq_length // number)
    return {"input_ids": row, "labels": row.clone(), "position_ids": positions}


def _boundaries(model: torch.nn.Module, spec: RunSpec) -> Batch:
    """What flash attention would read off the values of position_ids, which meta tensors lack.

    cu_seq_lens_q and cu_seq_lens_k [documents + 1] in int32, max_length_q and max_length_k, as the
    collator's ``return_flash_attn_kwargs`` gives them; nothing for other attentions.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", "") != "flash_attention_2":
        return {}
    documents = spec.per_device_train_batch_size * spec.packed_documents
    ends = torch.empty(documents + 1, dtype=torch.int32, device="meta")
    length = spec.seq_length // spec.packed_documents
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length
    }  # fmt: skip


def note_packing(spec: RunSpec) -> str:
    """The assumption that ``packed`` makes."""
    number, each = spec.per_device_train_batch_size, spec.packed_documents
    return (
        f"packed: one row of {spec.tokens} tokens, {number * each} documents of "
        f"{spec.seq_length // each} tokens, position_ids and no mask (DataCollatorWithFlattening)"
    )


def _takes_positions(model: Any) -> bool:
    import inspect

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "position_ids" in inspect.signature(inner.forward).parameters
