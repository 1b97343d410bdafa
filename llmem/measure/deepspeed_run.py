"""DeepSpeed around a prepared model, and its training step as transformers' Trainer drives it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.lifetimes import Phase
from llmem.parallel.zero.config import STAGES, read_ds_config
from llmem.spec import RunSpec
from llmem.trace.build import Prepared
from llmem.trace.step import NoWatcher, Watcher, whole_batches


@dataclass
class DeepSpeedStep:
    """One optimizer step: forward, ``engine.backward``, ``engine.step`` for each micro-batch."""

    engine: Any
    make_batch: Any
    accumulation: int
    micro_batch_context: Any = whole_batches
    watcher: Watcher = field(default_factory=NoWatcher)
    _count: int = 0

    def __call__(self) -> None:
        self.watcher.start_step(self._count)
        self._count += 1
        for micro in range(self.accumulation):
            with self.micro_batch_context() as mine:
                self._micro_batch(mine)
            last = micro == self.accumulation - 1
            with self.watcher.in_phase(Phase.OPTIMIZER if last else Phase.OTHER):
                self.engine.step()

    def _micro_batch(self, mine: Callable[[Any], Any]) -> None:
        watch = self.watcher
        with watch.in_phase(Phase.BATCH):
            batch = mine(self.make_batch())
        with watch.in_phase(Phase.FORWARD):
            loss = self._loss(batch)
        del batch
        with watch.in_phase(Phase.BACKWARD):
            self.engine.backward(loss)

    def _loss(self, batch: dict[str, Any]) -> Any:
        outputs = self.engine(**batch)
        loss = outputs.loss
        del outputs
        return loss


def wrap(prepared: Prepared, spec: RunSpec, device: str) -> DeepSpeedStep:
    """``deepspeed.initialize`` with the ds_config of ``spec``, "auto" filled in.

    Raises LlmemError where DeepSpeed is not installed or the configuration makes no sense.
    """
    try:
        import deepspeed  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise LlmemError("DeepSpeed is not installed; run: pip install deepspeed") from None

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device == "cpu":
        os.environ.setdefault("LOCAL_SIZE", str(spec.gpus))
        # oneDNN's bf16 matmul packs its operands into scratch that no GPU kernel has.
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    engine, *_ = deepspeed.initialize(
        model=prepared.model, optimizer=prepared.step.optimizer, config=config_of(spec)
    )
    plain = prepared.step
    return DeepSpeedStep(
        engine, plain.make_batch, spec.gradient_accumulation_steps, plain.micro_batch_context
    )


def config_of(spec: RunSpec) -> dict[str, Any]:
    """The ds_config that DeepSpeed gets: the user's, and what RunSpec says."""
    from llmem.parallel.zero.options import fill_auto

    config, _ = fill_auto(read_ds_config(spec.deepspeed)[0], spec)
    zero = dict(config.get("zero_optimization") or {})
    zero["stage"] = STAGES[spec.strategy]
    config["zero_optimization"] = zero
    config["train_micro_batch_size_per_gpu"] = spec.per_device_train_batch_size
    config["gradient_accumulation_steps"] = spec.gradient_accumulation_steps
    config.pop("train_batch_size", None)
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    config["gradient_clipping"] = spec.max_grad_norm
    for name in ("bf16", "fp16"):
        config[name] = {**(config.get(name) or {}), "enabled": getattr(spec, name)}
    return config | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
