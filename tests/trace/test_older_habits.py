"""What models of transformers 4.39 to 4.52 did, in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Phase, Trace
from llmem.trace.as_transformers import behave_like

MISTRAL = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None,
}  # fmt: skip
BATCH, TOKENS = 2, 32
LOGITS = BATCH * TOKENS * 512


def traced(version: str | None, **fields: Any) -> Trace:
    return llmem.trace(
        MISTRAL, per_device_train_batch_size=BATCH, seq_length=TOKENS, param_dtype="bf16",
        as_transformers=version, **fields,
    )  # fmt: skip


def born(trace: Trace, op: str, nbytes: int, phase: Phase = Phase.FORWARD) -> int:
    """How many storages of that size the op of that name made in step 0."""
    table = trace.lifetimes
    return sum(
        trace.op_name(int(at)) == op
        and trace.ops.phase[at] == phase
        and trace.ops.step[at] == 0
        for at in table.birth_op[(table.nbytes == nbytes) & (table.birth_op >= 0)]
    )


def test_logits_without_the_last_token_are_copied_until_4_49() -> None:
    shifted = BATCH * (TOKENS - 1) * 512 * 4
    assert [born(traced(v), "clone", shifted) for v in ("4.49", "4.50")] == [1, 0]


def test_logits_are_upcast_once_and_16_bit_ones_dropped_until_4_45() -> None:
    for version, dropped in (("4.45", True), ("4.46", False)):
        trace = traced(version)
        table = trace.lifetimes
        assert born(trace, "_to_copy", LOGITS * 4) == 1
        head = table.category == Category.LOGITS_AND_LOSS
        (low, *_) = np.flatnonzero(head & (table.nbytes == LOGITS * 2))
        loss = next(op for op in range(len(trace.ops)) if trace.op_name(op) == "nll_loss_forward")
        assert bool(table.death[low] < trace.ops.tick[loss]) is dropped


def test_every_mistral_layer_had_its_rope_caches_until_4_42() -> None:
    cache = 128 * 16 * 2
    for version, count in (("4.42", 2 * 2), ("4.43", 0)):
        table = traced(version).lifetimes
        assert int(((table.category == Category.BUFFER) & (table.nbytes == cache)).sum()) == count


def test_flash_attention_got_repeated_keys_until_4_47() -> None:
    # all four heads of 16 in bf16; clones of keys and of values in two layers
    repeated = BATCH * TOKENS * 64 * 2
    flash = {"attn_implementation": "flash_attention_2"}
    old, new = (born(traced(v, **flash), "clone", repeated) for v in ("4.47", "4.48"))
    assert old - new == 4


def test_checkpointing_ran_layers_through_their_calls_until_4_52() -> None:
    for version, again in (("4.52", 2), ("4.53", 0), (None, 0)):
        trace = traced(version, gradient_checkpointing=True)
        calls = [
            s for s in trace.spans
            if s.recompute and s.step == 0 and trace.modules[s.module] in trace.wrapped
        ]  # fmt: skip
        assert len(calls) == again


def test_reentrant_checkpointing_recomputes_the_whole_layer() -> None:
    old, new = (traced(v, gradient_checkpointing=True) for v in ("4.57", None))
    recomputed = [int((t.ops.recompute & (t.ops.step == 0)).sum()) for t in (old, new)]
    assert recomputed[0] > recomputed[1]  # the other one stops at the last tensor it needs


def test_older_than_known_is_said() -> None:
    with pytest.raises(LlmemError, match=r"4\.39"), behave_like("4.38", lambda _: None):
        pass
