"""Memory-relevant behaviour of another version of transformers than the installed one.

Each habit is a patch for the time of a trace, with the version in which the library gave it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.trace import older_habits

Note = Callable[[str], None]


@contextmanager
def behave_like(version: str | None, note: Note) -> Iterator[None]:
    """transformers keeps the habits that it had in ``version`` (None: none but its own).

    ``note`` receives a sentence for each habit. Raises LlmemError if ``version`` is no version or
    older than what is known (4.39), or if the installed transformers has a habit that it had not.
    """
    with ExitStack() as stack:
        if version is not None:
            asked, here = _parse(version), _parse(installed("transformers"))
            for given_up, habit, sentence in _HABITS:
                if here < given_up <= asked:
                    raise LlmemError(
                        f"the installed transformers {installed('transformers')} still has a habit of "
                        f"before {given_up[0]}.{given_up[1]} ({sentence}); install that or a later "
                        f"version to trace as {version}"
                    )
                # An older installation has the habit itself; that of SDPA changed once before.
                if asked < given_up and (here >= given_up or habit is _contiguous_sdpa):
                    stack.enter_context(habit(asked))
                if asked < given_up:
                    note(f"as transformers {version}: {sentence}")
        yield


def _parse(version: str) -> tuple[int, int]:
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise LlmemError(f"'{version}' is no version of transformers; write it as 4.51")
    found = int(parts[0]), int(parts[1])
    if found < (4, 39):
        raise LlmemError(f"what transformers {version} did is not known here; use 4.39 or later")
    return found


@contextmanager
def _float_mask(asked: tuple[int, int]) -> Iterator[None]:
    """Before masking_utils (4.53) SDPA got one additive mask in the model's dtype, not a bool one.

    torch turns a bool mask into such a one in every layer (``convert_boolean_attn_mask``).
    """
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    before = AttentionMaskInterface._global_mapping["sdpa"]
    AttentionMaskInterface.register("sdpa", eager_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", before)


@contextmanager
def _cache_as_given(asked: tuple[int, int]) -> Iterator[None]:
    """An empty DynamicCache kept the first keys and values themselves; since 4.56 it copies them.

    ``cat`` with an empty tensor makes the copy (cache_utils.py, ``DynamicLayer.update``). What is
    kept may be a view into a larger storage, which then lives as long as the cache.
    """
    from transformers.cache_utils import DynamicLayer

    original = DynamicLayer.update

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.get_seq_length() > 0:
            return original(self, key_states, value_states, *args, **kwargs)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    DynamicLayer.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        DynamicLayer.update = original  # type: ignore[method-assign]


@contextmanager
def _contiguous_sdpa(asked: tuple[int, int]) -> Iterator[None]:
    """Until 4.56 query, key and value were made contiguous, until 4.54 always for all heads.

    integrations/sdpa_attention.py; 4.54 and 4.55 leave grouped heads to SDPA without a mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import repeat_kv

    installed: Any = AttentionInterface._global_mapping["sdpa"]

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, **others: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        groups = getattr(module, "num_key_value_groups", 1)
        grouped = groups > 1 and asked >= (4, 54) and attention_mask is None
        if groups > 1 and not grouped:
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.contiguous(), key.contiguous(), value.contiguous(), attn_mask=attention_mask,
            dropout_p=dropout, scale=scaling, enable_gqa=grouped,
            is_causal=bool(is_causal and attention_mask is None and query.shape[2] > 1),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def choose(*args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
        if position_bias is not None:  # encoders that got SDPA after all this
            return installed(*args, position_bias=position_bias, **kwargs)
        return forward(*args, **kwargs)

    AttentionInterface.register("sdpa", choose)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", installed)


def dress(model: torch.nn.Module, version: str | None, note: Note) -> None:
    """Give ``model`` what models of that version had; ``note`` receives a sentence for each."""
    if version is not None and hasattr(model, "get_output_embeddings"):
        for sentence in older_habits.dress(model, _parse(version)):
            note(f"as transformers {version}: {sentence}")


_HABITS: tuple[tuple[tuple[int, int], Callable[[tuple[int, int]], Any], str], ...] = (
    (
        (4, 48),
        older_habits.repeated_keys_for_flash,
        "Mistral's flash attention gets keys and values repeated for all heads",
    ),
    (
        (4, 50),
        older_habits.shifted_logits,
        "the loss copies the logits without the last token's",
    ),
    ((4, 53), older_habits.checkpoint_the_call, "checkpointing is around the calls of layers"),
    ((4, 53), _float_mask, "SDPA gets one additive mask for all layers"),
    ((4, 56), _cache_as_given, "the cache keeps the first keys and values without a copy"),
    ((4, 56), _contiguous_sdpa, "query, key and value are made contiguous before SDPA"),
)
"""(first version without it, the patch, what it does)"""
