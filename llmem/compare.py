"""This estimator and every baseline for the same run, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llmem._callable import make_callable
from llmem.baselines.base import NAMES, BaselineInput, run
from llmem.errors import LlmemError
from llmem.spec import RunSpec

OURS = "llmem"


def compare(
    spec: RunSpec,
    *,
    names: Sequence[str] = NAMES,
    base_bytes: int | None = None,
    measured: int | None = None,
) -> dict[str, Any]:
    """Bytes per GPU by every estimator that can express ``spec``.

    ``base_bytes`` is a measured base (CUDA context and libraries) for the baselines that need
    one, ``measured`` the true figure if it is known. Returns ``{"measured": B|None, "estimates":
    {name: {"bytes", "seconds", "parts", "leaves_out", "why_not"}}}``; our own ``bytes`` is the
    device level.
    """
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise LlmemError(f"unknown baseline {unknown[0]!r}; known are {', '.join(NAMES)}")
    estimates: dict[str, Any] = {OURS: _ours(spec)}
    inp = baseline_input(spec, base_bytes)
    for name in names:
        result = run(name, inp)
        estimates[name] = {
            "bytes": result.bytes,
            "seconds": round(result.seconds, 3),
            "parts": dict(result.parts),
            "leaves_out": list(result.leaves_out),
            "why_not": result.why_not,
        }
    return {"measured": measured, "estimates": estimates}


def _ours(spec: RunSpec) -> dict[str, Any]:
    from llmem.estimate import estimate

    start = time.perf_counter()
    try:
        result = estimate(spec)
    except LlmemError as error:
        seconds = round(time.perf_counter() - start, 3)
        return {
            "bytes": None, "seconds": seconds, "parts": {}, "leaves_out": [], "why_not": str(error)
        }  # fmt: skip
    worst = result.worst
    return {
        "bytes": worst.peak.device,
        "seconds": round(time.perf_counter() - start, 3),
        "parts": {**worst.peak.to_json(), **worst.breakdown, **result.outside},
        "leaves_out": [],
        "why_not": None,
    }


def baseline_input(spec: RunSpec, base_bytes: int | None = None) -> BaselineInput:
    """``spec`` in the terms of the baselines; the model is built on meta."""
    from llmem.trace.build import build_model

    notes: list[str] = []
    model = build_model(spec, "meta", notes)
    first = next(iter(model.parameters()))
    return BaselineInput(
        model=model,
        config=getattr(model, "config", None),
        name=str(spec.model),
        batch=spec.per_device_train_batch_size,
        seq=spec.seq_length,
        gpus=spec.gpus,
        tp=spec.tp,
        pp=spec.pp,
        zero=spec.strategy,
        dtype_bytes=first.element_size(),
        optim=spec.optim,
        gradient_checkpointing=spec.gradient_checkpointing,
        mixed=spec.bf16 or spec.fp16,
        offload=spec.offload,
        base_bytes=base_bytes,
    )


make_callable(__name__)
