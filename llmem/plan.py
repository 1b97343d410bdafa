"""Which strategies fit, the largest batch of each, and the pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmem._callable import make_callable
from llmem.baselines.algorithm1 import largest_batch
from llmem.errors import LlmemError
from llmem.estimate import Estimate, estimate_trace
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.devices import get_device
from llmem.lifetimes import Trace
from llmem.parallel import ENGINES, compute_dtype, is_modelled
from llmem.scaling import Scaled, scaled
from llmem.spec import RunSpec
from llmem.trace.run import trace_spec

ORDER = ("none", "ddp", "zero1", "zero2", "fsdp2", "fsdp", "zero3", "gemini")
"""From the least communication per step to the most (ZeRO-3 moves 1.5 times what DDP moves)."""

COSTS = (*ORDER, "megatron")
"""The same, and Megatron-LM's data parallelism, which is planned only where it is named."""


@dataclass(frozen=True)
class Option:
    """One strategy: its largest batch per GPU (0: none fits) and what it uses there."""

    strategy: str
    batch: int
    device_bytes: int | None
    sentence: str
    assumptions: list[str] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "assumptions"}


@dataclass(frozen=True)
class Plan:
    """All options, and the one to take (None if nothing fits)."""

    spec: RunSpec
    options: list[Option]
    pick: Option | None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "llmem.plan/1",
            "options": [option.to_json() for option in self.options],
            "pick": None if self.pick is None else self.pick.to_json(),
            "assumptions": self.assumptions,
        }

    @property
    def assumptions(self) -> list[str]:
        """Those of the pick, else of the first option that was tried to its end."""
        tried = [self.pick] if self.pick else [o for o in self.options if o.assumptions]
        return tried[0].assumptions if tried else []


def plan(
    spec: RunSpec, *, strategies: Sequence[str] | None = None, max_batch: int = 4096
) -> Plan:
    """The largest batch per GPU of each strategy on ``spec.gpus`` GPUs of kind ``spec.gpu``.

    The pick processes most sequences per step; at a tie, the strategy that communicates less.
    Traces at two batch sizes serve a whole strategy; the batch that is reported is traced again.
    A strategy that refuses the run has batch 0 and its reason. Raises LlmemError without a GPU, for
    strategies that are none, and if all refuse.
    """
    if spec.gpu is None or not get_device(spec.gpu).is_cuda:
        raise LlmemError("plan needs to know the card: add --gpu NAME (see `llmem gpus`)")
    AllocConf.parse(spec.alloc_conf)
    candidates = strategies or default_strategies(spec)
    if unknown := [name for name in candidates if name not in ENGINES]:
        raise LlmemError(f"there is no strategy {unknown[0]!r}; use some of {', '.join(ENGINES)}")
    sources: dict[tuple[str | None, bool], Source] = {}
    options: list[Option] = []
    refused: list[LlmemError] = []
    for strategy in candidates:
        trial = spec.model_copy(update={"strategy": strategy})
        try:
            dtype = compute_dtype(trial)
            source = sources.setdefault((dtype, trial.autocast_inside_engine), Source(trial, dtype))
            options.append(_option(trial, source, max_batch))
        except LlmemError as error:
            refused.append(error)
            options.append(Option(strategy, 0, None, str(error)))
    if refused and len(refused) == len(options):
        raise refused[0]
    fitting = [option for option in options if option.batch]
    pick = max(fitting, key=lambda o: (o.batch, -COSTS.index(o.strategy)), default=None)
    return Plan(spec, options, pick)


def default_strategies(spec: RunSpec) -> list[str]:
    """Every strategy that the number of GPUs allows and an engine models."""
    alone = spec.gpus == max(spec.tp, spec.ep) * spec.pp
    shared = spec.ep > 1 and spec.ep_plan == "alltoall"  # the ranks still share the rest
    return [
        strategy
        for strategy in ORDER
        if ((strategy == "none") == alone or (alone and shared))
        and is_modelled(spec.model_copy(update={"strategy": strategy}))
    ]


class Source:
    """Traces of one compute dtype at any batch size, from as few real ones as possible."""

    def __init__(self, spec: RunSpec, dtype: str | None) -> None:
        self._spec = spec
        self._dtype = dtype
        self._lines: Scaled | None = None
        self._known: dict[int, Trace] = {}

    def real(self, batch: int) -> Trace:
        if batch not in self._known:
            spec = self._spec.model_copy(update={"per_device_train_batch_size": batch})
            self._known[batch] = trace_spec(spec, compute_dtype=self._dtype)
        return self._known[batch]

    def at(self, batch: int) -> Trace:
        if self._lines is None:
            few, more = 2 * _unit(self._spec), 4 * _unit(self._spec)
            self._lines = scaled(self.real(few), self.real(more), few, more)
        if batch in self._known or self._lines is None:
            return self.real(batch)
        return self._lines.at(batch)


def _unit(spec: RunSpec) -> int:
    """Sequences that a batch can grow by: one for each micro-batch of a pipeline."""
    return spec.pipeline_micro_batches if spec.pp > 1 else 1


def _option(spec: RunSpec, source: Source, max_batch: int) -> Option:
    def at(batch: int, trace: Callable[[int], Trace]) -> Estimate:
        chosen = spec.model_copy(update={"per_device_train_batch_size": batch})
        return estimate_trace(trace(batch), chosen)

    def fits(batch: int) -> bool:
        if batch > max_batch:
            return False
        found = at(batch, source.at)
        return found.fit is not None and found.fit.fits

    unit = _unit(spec)
    batch = unit * largest_batch(lambda units: fits(unit * units))
    final = at(max(batch, unit), source.real)
    while batch and final.fit is not None and not final.fit.fits:
        batch -= unit  # the lines said yes, the step itself says no
        final = at(max(batch, unit), source.real)
    assert final.fit is not None
    used = final.fit.device if batch else None
    return Option(spec.strategy, batch, used, final.fit.sentence, final.assumptions)


make_callable(__name__)
