"""Optimizers, checkpointing forms and losses against real steps on CPU.

``python -m experiments.real_cpu.optimizers``: as ``compare``, the step is traced on meta tensors
and run for real under the same recorder; the table says whether every birth and death is the same.
bitsandbytes' optimizers are stand-ins on meta: their kernels on a CPU have temporaries that those
on a GPU have not, so it is the states that are compared, tensor by tensor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

import torch

from experiments.real_cpu.cases import BATCH, TOKENS
from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from llmem.optim_names import BITSANDBYTES
from llmem.spec import RunSpec, make_spec
from llmem.trace.optimizers_8bit import Kind, build, kind_of

FAMILIES = ("llama", "gpt2", "qwen3")

CKPT: dict[str, Any] = {"gradient_checkpointing": True}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
LONG: dict[str, Any] = {"loss": "chunked", "seq_length": 100}
"""297 tokens to predict: two chunks, the second not full."""

CASES: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor"},
    "adafactor bf16": {"optim": "adafactor", "param_dtype": "bf16"},
    "adafactor_torch": {"optim": "adafactor_torch"},
    "adafactor_torch bf16": {"optim": "adafactor_torch", "param_dtype": "bf16"},
    "sgd_momentum": {"optim": "sgd_momentum"},
    "rmsprop": {"optim": "rmsprop"},
    "adagrad": {"optim": "adagrad"},
    "in backward": IN_BACKWARD,
    "in backward adafactor_torch": {**IN_BACKWARD, "optim": "adafactor_torch"},
    "op": {**CKPT, "checkpoint_policy": "op"},
    "every 2nd": {**CKPT, "checkpoint_every": 2},
    "reentrant": {**CKPT, "use_reentrant": True},
    "chunked": LONG,
    "chunked bf16 ckpt": {**CKPT, **LONG, "param_dtype": "bf16"},
}
"""What differs between the runs of a model; AdamW one parameter at a time, fp32, unless said."""

ONE_EACH = [(FAMILIES[index % len(FAMILIES)], case) for index, case in enumerate(CASES)]
"""Every case on one family, the families in turn: what the tests run."""


def spec_of(model: str, case: str) -> RunSpec:
    """The run named by a key of ``MODELS`` and one of ``CASES``, for CPU kernels."""
    fields = {
        "param_dtype": "fp32", "optim": "adamw_torch", "seq_length": TOKENS, **CASES[case]
    }  # fmt: skip
    return make_spec(model=MODELS[model], per_device_train_batch_size=BATCH, gpu="cpu", **fields)


SHAPES = ((331, 48), (4096,), (4095,), (100, 41), (7,), (300, 400), (1000, 101))
"""Below, at and above 4,096 elements; whole blocks of 256 and not."""

State = dict[str, tuple[tuple[int, ...], torch.dtype] | int]


def states(optim: str, device: str) -> list[State]:
    """Shape and dtype of all that bitsandbytes' optimizer keeps for parameters of ``SHAPES``.

    ``device``: ``cpu`` for the library itself, ``meta`` for its stand-in.
    """
    kind = kind_of(optim)
    assert isinstance(kind, Kind)
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = build(parameters, kind, lr=1e-3, cuda=False)
    optimizer.step()
    return [_described(optimizer.state[parameter]) for parameter in parameters]


def _described(state: dict[str, Any]) -> State:
    return {
        name: (tuple(value.shape), value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


ON_CPU = [name for name in BITSANDBYTES if not name.startswith("paged")]
"""Managed memory needs CUDA; the paged classes differ in nothing else."""


def _rows(models: Iterable[str], cases: Iterable[str]) -> tuple[int, int]:
    rows = same = 0
    for model in models:
        for case in cases:
            found = against_recorder(spec_of(model, case))
            print(f"{model:12} {case:28} {found.predicted:10,} "
                  f"{found.real - found.predicted:+8,}  {found.difference}", flush=True)  # fmt: skip
            rows += 1
            same += not found.difference
    return rows, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(FAMILIES), choices=list(MODELS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    print(f"{'model':12} {'case':28} {'predicted':>10} {'real':>8}  first difference")
    rows, same = _rows(arguments.models, arguments.cases)
    print(f"{rows} runs: whole sequence of births and deaths the same in {same}")
    equal = [name for name in ON_CPU if states(name, "cpu") == states(name, "meta")]
    print(f"bitsandbytes' states: {len(equal)} of {len(ON_CPU)} optimizers equal")


if __name__ == "__main__":
    main()
