"""How LLMem's runs were made, as RunSpecs; their loss; their card.

Colossal-AI 0.3.0's Gemini in fp16 with gradient checkpointing, transformers 4.29.2, sequences of 512,
Tesla V100 of 16 GB. That version's models keep logits in fp16 (CodeGen and GPT-Neo cast them to fp32),
copy them without the last token's, and take the loss in that dtype: three buffers of logits. The
installed version casts to fp32 first, so the loss of 4.29.2 is put in its place while a step is traced.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from llmem.baselines.base import BaselineInput, run
from llmem.baselines.llmem_layout import FP32_LOGITS_NAMES
from llmem.estimate import Estimate, estimate_trace
from llmem.gpu.devices import get_device
from llmem.lifetimes import Trace
from llmem.scaling import Scaled, scaled
from llmem.spec import RunSpec, make_spec
from llmem.trace.run import trace_spec

LARGEST_LAYER = 40_000
"""Features by which a head is told from a layer: CodeGen has 51,200 words, GPT-Neo 50,257."""

DATA = Path(__file__).parent / "data"
MIB = 2**20
TOKENS = 512
GPU = "v100-16gb"
CAPACITY_MB = 16384
"""What nvidia-smi calls the card's total, and LLMem ``m_total``."""
DRIVER = (get_device(GPU).smi_total or 0) - get_device(GPU).capacity
"""Bytes that the driver keeps: LLMem's ground truth adds what NVML counts more than nvidia-smi."""


def rows(name: str) -> list[dict[str, str]]:
    """The lines of ``data/NAME.csv``."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def spec_of(model: str, batch: int, gpus: int = 1) -> RunSpec:
    """A run of the paper: Gemini on ``gpus`` GPUs."""
    return make_spec(
        model=model, per_device_train_batch_size=batch, seq_length=TOKENS, gpus=gpus,
        strategy="gemini", param_dtype="fp32", gradient_checkpointing=True,
        attn_implementation="eager", as_transformers="4.51", gpu=GPU,
    )  # fmt: skip


@contextmanager
def loss_of_4_29(model: str) -> Iterator[None]:
    """The loss of transformers 4.29.2 in place of the installed one."""
    from torch.nn.modules.module import register_module_forward_hook
    from transformers.loss import loss_utils

    installed = loss_utils.LOSS_MAPPING["ForCausalLM"]
    wide = any(name in model for name in FP32_LOGITS_NAMES)

    def loss(logits: Any, labels: Any, vocab_size: int, **others: Any) -> Any:
        shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        return torch.nn.functional.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1))

    def cast(module: Any, args: Any, output: Any) -> Any:
        """``lm_head(hidden_states).to(torch.float32)``: the fp16 logits are gone at once."""
        is_head = wide and getattr(module, "out_features", 0) > LARGEST_LAYER
        return output.to(torch.float32) if is_head else None

    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    hook = register_module_forward_hook(cast)
    try:
        yield
    finally:
        hook.remove()
        loss_utils.LOSS_MAPPING["ForCausalLM"] = installed


@cache
def trace_of(model: str, batch: int) -> Trace:
    """The unsharded step in fp16, as Gemini computes it."""
    with loss_of_4_29(model):
        return trace_spec(spec_of(model, batch), compute_dtype="float16")


@cache
def lines_of(model: str) -> Scaled | None:
    return scaled(trace_of(model, 2), trace_of(model, 4), 2, 4)


@cache
def traced(model: str, batch: int, gpus: int = 1) -> Estimate:
    """Our estimate, from two traces where batches lie on lines, else from a trace of its own."""
    lines = lines_of(model)
    trace = trace_of(model, batch) if lines is None else lines.at(batch)
    return estimate_trace(trace, spec_of(model, batch, gpus))


def clipped_mb(result: Estimate) -> float:
    """MiB that NVML shows when the allocator has the card and no more."""
    assert result.fit is not None
    return (result.fit.device + DRIVER) / MIB


def unlimited_mb(result: Estimate) -> float:
    """MiB that NVML would show on a card with room for all that the allocator asks for."""
    return (result.worst.peak.device + DRIVER) / MIB


def fits(model: str, batch: int, gpus: int = 1) -> bool:
    found = traced(model, batch, gpus).fit
    return found is not None and found.fits


@cache
def shape(model: str) -> Any:
    """The model on meta."""
    from llmem.trace.build import build_model

    return build_model(spec_of(model, 1), "meta", [])


def baseline_mb(
    name: str, model: str, batch: int, gpus: int = 1, tp: int = 1, base_mb: float | None = None
) -> float | None:
    """MiB per GPU by a baseline; ``base_mb`` is a measured base (None: modelled)."""
    built = shape(model)
    result = run(name, BaselineInput(
        model=built, config=built.config, name=model, batch=batch, seq=TOKENS, gpus=gpus, tp=tp,
        zero="gemini", dtype_bytes=2, optim="adam", gradient_checkpointing=True, mixed=True,
        base_bytes=None if base_mb is None else round(base_mb * MIB),
    ))  # fmt: skip
    return None if result.bytes is None else result.bytes / MIB
