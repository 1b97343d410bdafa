"""Habits of transformers 4.39 to 4.57 that a model or its checkpointing keeps.

Read in the released packages 4.39.3, 4.43.3, 4.45.2 and 4.48.1 (modeling_utils.py,
models/mistral/modeling_mistral.py, loss/loss_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

Version = tuple[int, int]


@contextmanager
def checkpoint_the_call(asked: Version) -> Iterator[None]:
    """Layers were checkpointed around ``__call__``: module hooks run again inside backward."""
    from transformers.modeling_layers import GradientCheckpointingLayer as Layer

    def plainly(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.gradient_checkpointing = False
        try:
            return torch.nn.Module.__call__(self, *args, **kwargs)
        finally:
            self.gradient_checkpointing = True

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return torch.nn.Module.__call__(self, *args, **kwargs)
        return self._gradient_checkpointing_func(partial(plainly, self, **kwargs), *args)

    Layer.__call__ = call
    try:
        yield
    finally:
        del Layer.__call__


@contextmanager
def shifted_logits(asked: Version) -> Iterator[None]:
    """Until 4.49 the loss made a contiguous copy of the fp32 logits without the last token's."""
    from transformers.loss import loss_utils

    installed = loss_utils.LOSS_MAPPING["ForCausalLM"]

    def loss(
        logits: torch.Tensor, labels: torch.Tensor, vocab_size: int,
        num_items_in_batch: Any = None, ignore_index: int = -100, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        logits = logits.float()
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return loss_utils.fixed_cross_entropy(
            shift_logits.view(-1, vocab_size), shift_labels.view(-1), num_items_in_batch, ignore_index
        )

    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    try:
        yield
    finally:
        loss_utils.LOSS_MAPPING["ForCausalLM"] = installed


@contextmanager
def repeated_keys_for_flash(asked: Version) -> Iterator[None]:
    """Until 4.47 Mistral's flash attention got keys and values repeated for all heads."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import repeat_kv

    installed: Any = AttentionInterface._global_mapping["flash_attention_2"]

    def forward(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1 and type(module).__name__.startswith("Mistral"):
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        return installed(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("flash_attention_2", forward)
    try:
        yield
    finally:
        AttentionInterface.register("flash_attention_2", installed)


def dress(model: Any, asked: Version) -> list[str]:
    """Give ``model`` what it had in that version; returns a sentence for each change."""
    said = []
    if asked < (4, 46) and model.get_output_embeddings() is not None:
        model.get_output_embeddings().register_forward_hook(lambda _, args, out: out.float())
        said.append("logits are upcast to fp32 before the loss and returned so")
    config = model.config
    if asked < (4, 43) and config.model_type == "mistral":
        _rotary_caches(model, config)
        said.append("every layer has RoPE caches of max_position_embeddings tokens")
    return said


def _rotary_caches(model: Any, config: Any) -> None:
    """Buffers ``cos_cached`` and ``sin_cached`` of each attention, in the dtype of loading."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            weight = next(module.parameters())
            for name in ("cos_cached", "sin_cached"):
                cache = torch.empty(
                    config.max_position_embeddings, width, dtype=weight.dtype, device=weight.device
                )
                module.register_buffer(name, cache, persistent=False)
