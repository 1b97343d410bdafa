"""Generation and packed rows against real runs on CPU.

``python -m experiments.real_cpu.generate``: as ``compare``, each run is traced on meta tensors and
run for real under the same recorder; the table says by how many bytes the peaks differ, of the
whole run and of each forward, and what is the first birth or death that is not the same.
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from typing import Any

import torch

from experiments.real_cpu.cases import BATCH, TOKENS, has_sdpa
from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from llmem.spec import RunSpec, make_spec
from llmem.timeline import replay
from llmem.trace.run import trace_spec

FAMILIES = ("llama", "gpt2", "qwen2", "gemma2", "mixtral", "bloom", "t5")

GENERATE: dict[str, Any] = {"task": "generate", "max_new_tokens": 6}
PACKED: dict[str, Any] = {"packed": True, "packed_documents": 2, "seq_length": 24, "optim": "sgd"}

CASES: dict[str, dict[str, Any]] = {
    "dynamic": GENERATE,
    "dynamic bf16 eager": {**GENERATE, "param_dtype": "bf16", "attn_implementation": "eager"},
    "static": {**GENERATE, "cache_implementation": "static"},
    "3 beams": {**GENERATE, "num_beams": 3},
    "packed sdpa": {**PACKED, "attn_implementation": "sdpa"},
    "packed eager": {**PACKED, "attn_implementation": "eager"},
}
"""What differs between the runs of a model; fp32 unless said."""


def cases_of(model: str) -> list[str]:
    """The names of the cases that the model's class knows (no row is packed without positions)."""
    unknown = {"packed sdpa", "packed eager"} if model in ("bloom", "t5") else set()
    unknown |= set() if has_sdpa(model) else {"packed sdpa"}
    return [name for name in CASES if name not in unknown]


def spec_of(model: str, case: str) -> RunSpec:
    """The run named by a key of ``MODELS`` and one of ``CASES``, for CPU kernels."""
    fields = {"param_dtype": "fp32", "seq_length": TOKENS, **CASES[case]}
    return make_spec(model=MODELS[model], per_device_train_batch_size=BATCH, gpu="cpu", **fields)


def peaks(spec: RunSpec, device: str) -> list[int]:
    """Peak of live storage bytes in each step: of training, or each forward of a generation."""
    torch.manual_seed(0)
    trace = trace_spec(spec, device=device)
    curve = replay(trace.lifetimes, exact=True)
    spans = [curve.span(start, stop) for start, stop in pairwise(trace.step_ticks)]
    return [int(curve.requested[start:stop].max()) for start, stop in spans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(FAMILIES), choices=list(MODELS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    print(
        f"{'model':10} {'case':20} {'predicted':>10} {'real':>6} {'worst step':>10}  first difference"
    )
    rows = equal = 0
    for model in arguments.models:
        for case in (name for name in cases_of(model) if name in arguments.cases):
            spec = spec_of(model, case)
            found = against_recorder(spec)
            steps = zip(peaks(spec, "meta"), peaks(spec, "cpu"), strict=True)
            gap = max((real - predicted for predicted, real in steps), key=abs)
            print(f"{model:10} {case:20} {found.predicted:10,} "
                  f"{found.real - found.predicted:+6,} {gap:+10,}  {found.difference}", flush=True)  # fmt: skip
            rows += 1
            equal += found.real == found.predicted
    print(f"{rows} runs: peak equal to the byte in {equal}")


if __name__ == "__main__":
    main()
