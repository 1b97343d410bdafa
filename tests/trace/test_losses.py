"""Losses: how many buffers as large as the logits they hold, and which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import llmem
from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from experiments.real_cpu.optimizers import ONE_EACH, spec_of
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Trace
from llmem.timeline import replay
from llmem.trace.losses import CHUNK
from llmem.trace.standins import liger_ops

ROWS, VOCABULARY = 2048, 8192
LOGITS = ROWS * VOCABULARY * 4


def peak_in_logits(loss: Any, steps: int = 2) -> float:
    """Peak of a loss on fp32 logits that want a gradient, kept from step to step."""
    logits = torch.empty(ROWS, VOCABULARY, device="meta", requires_grad=True)
    target = torch.empty(ROWS, dtype=torch.int64, device="meta")
    before = LOGITS  # the logits themselves: made before the trace starts
    trace = llmem.trace(lambda: loss(logits, target).backward(), steps=steps, gpu="a100-80gb")
    return (before + int(replay(trace.lifetimes).requested.max())) / LOGITS


def test_torch_holds_five_logits_and_a_fused_loss_one() -> None:
    """As Liger's benchmark measures it on an A100: 1,280.1 and 256.3 MiB for 256 MiB of logits.

    The gradient of an earlier call is still there: logits, that gradient, log-probabilities,
    their gradient and the logits' new one. Without it there are four. Liger writes the gradient
    over the logits, and its benchmark reads from a copy of none.
    """
    assert peak_in_logits(F.cross_entropy) == pytest.approx(5.00, abs=0.005)
    assert peak_in_logits(F.cross_entropy, steps=1) == pytest.approx(4.00, abs=0.005)


def fused(hidden_size: int = 64) -> Trace:
    hidden = torch.empty(ROWS, hidden_size, device="meta", requires_grad=True)
    target = torch.empty(ROWS, dtype=torch.int64, device="meta")
    weight = torch.empty(VOCABULARY, hidden_size, device="meta", requires_grad=True)

    def step() -> None:
        liger_ops.cross_entropy(F.linear(hidden, weight), target).backward()

    return llmem.trace(step, steps=1, gpu="a100-80gb")


def test_liger_writes_the_gradient_over_the_logits() -> None:
    sizes = fused().lifetimes.nbytes
    assert np.count_nonzero(sizes == LOGITS) == 1
    peak = int(replay(fused().lifetimes).requested.max())
    others = int(sizes[sizes < LOGITS].sum())
    assert LOGITS < peak <= LOGITS + others


MODEL = {**MODELS["llama"], "vocab_size": 3310}
TOKENS = 3 * 99  # the last of each sequence predicts nothing: chunks of 256 and 41


def traced(**fields: Any) -> Trace:
    return llmem.trace(
        MODEL, per_device_train_batch_size=3, seq_length=100, gpu="a100-80gb", steps=1, **fields
    )


def test_chunks_are_the_only_logits() -> None:
    """[256, V] and [41, V] in fp32, forward and again in backward; never [300, V]."""
    sizes = traced(loss="chunked").lifetimes.nbytes
    rest = TOKENS - CHUNK
    assert 300 * 3310 * 4 not in sizes and TOKENS * 3310 * 4 not in sizes
    full, part = (int((sizes == rows * 3310 * 4).sum()) for rows in (CHUNK, rest))
    assert full == part > 0


def logits_and_loss(trace: Trace) -> list[int]:
    table = trace.lifetimes
    return table.nbytes[table.category == Category.LOGITS_AND_LOSS].tolist()


def test_chunks_count_as_logits_and_loss_when_computed_again_too() -> None:
    trace = traced(loss="chunked")
    chunk = CHUNK * 3310 * 4
    assert logits_and_loss(trace).count(chunk) == int((trace.lifetimes.nbytes == chunk).sum())


def test_one_chunk_is_alive_at_a_time() -> None:
    table = traced(loss="chunked").lifetimes
    first = table.take(table.nbytes == CHUNK * 3310 * 4)
    second = table.take(table.nbytes == (TOKENS - CHUNK) * 3310 * 4)
    assert not any(int(first.alive_at(tick).sum()) for tick in second.birth)


def test_longer_sequences_cost_no_more_logits() -> None:
    def most(**fields: Any) -> int:
        table = llmem.trace(
            MODEL, per_device_train_batch_size=8, gpu="a100-80gb", steps=1, **fields
        ).lifetimes
        rows = table.take(table.category == Category.LOGITS_AND_LOSS)
        big = rows.take(rows.nbytes >= CHUNK * 3310 * 4)
        return max(int(big.nbytes[big.alive_at(tick)].sum()) for tick in big.birth)

    assert most(loss="chunked", seq_length=65) == most(loss="chunked", seq_length=128)
    assert most(seq_length=128) > 1.9 * most(seq_length=65)


def test_a_head_with_adapters_is_refused_as_by_trl() -> None:
    with pytest.raises(LlmemError, match="adapter on the head"):
        traced(loss="chunked", method="lora", lora_target_modules=("lm_head",))
    classifier = {**MODELS["distilbert"]}
    with pytest.raises(LlmemError, match="no language-model head"):
        llmem.estimate(model=classifier, loss="chunked", seq_length=16)
    with pytest.raises(LlmemError, match="not compatible with --liger"):
        traced(loss="chunked", liger=True)


def test_a_module_of_the_user_keeps_its_forward() -> None:
    from llmem import models

    model = models.build(models.resolve(MODEL), dtype="fp32", device="meta")
    common = {"per_device_train_batch_size": 1, "seq_length": 20, "gpu": "cpu"}
    before = llmem.estimate(model=model, **common).worst.peak
    llmem.estimate(model=model, loss="chunked", **common)
    assert llmem.estimate(model=model, **common).worst.peak == before


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "zero3"])
def test_engines_take_chunked_losses(strategy: str) -> None:
    trace = llmem.estimate(
        model=MODEL, per_device_train_batch_size=3, seq_length=100, gpu="a100-80gb",
        loss="chunked", strategy=strategy, gpus=2, bf16=True,
    ).trace  # fmt: skip
    assert logits_and_loss(trace)


def test_classifiers_have_logits_of_their_labels() -> None:
    trace = llmem.trace(
        MODELS["distilbert"], per_device_train_batch_size=3, seq_length=10, gpu="a100-80gb", steps=1
    )
    assert 3 * 3 * 4 in logits_and_loss(trace)
    assert max(logits_and_loss(trace)) < 3 * 331 * 4  # never of a vocabulary


@pytest.mark.parametrize(("model", "case"), [each for each in ONE_EACH if "chunked" in each[1]])
def test_chunks_are_those_of_a_real_run(model: str, case: str) -> None:
    found = against_recorder(spec_of(model, case))
    assert found.real == found.predicted
    assert found.difference == ""
