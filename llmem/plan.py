"""Which strategies fit, the largest batch of each, and the pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmem._callable import make_callable
from llmem.errors import LlmemError
from llmem.estimate import Estimate, estimate_trace, outside_allocator
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.devices import get_device
from llmem.largest import LEAST, MOST, largest_batch
from llmem.lifetimes import Trace
from llmem.parallel import ENGINES, RankTable, compute_dtype, is_modelled, ranks_of
from llmem.scaling import Scaled, scaled
from llmem.spec import RunSpec
from llmem.timeline import replay
from llmem.trace.run import DEFAULT_GPU, trace_spec

ORDER = ("none", "ddp", "zero1", "zero2", "fsdp2", "fsdp", "zero3", "gemini")
"""From the least communication per step to the most (ZeRO-3 moves 1.5 times what DDP moves)."""

COSTS = (*ORDER, "megatron")
"""The same, and Megatron-LM's data parallelism, which is planned only where it is named."""


MAX_TOKENS = 1 << 20
"""Per GPU and step; no larger batch is tried. A toy model on a large card has no use for more."""

MEANING = (
    f"largest batch: it fits, and so do those below it (an eighth of it, {LEAST} to {MOST}, tried one by one)"
)


@dataclass(frozen=True)
class Option:
    """One strategy: its largest batch per GPU (0: none fits) and what it uses there.

    Smaller batches fit as well (see `llmem.largest`). ``fits_beyond``: larger ones that do, with one
    between that does not. ``limited``: larger ones were not tried.
    """

    strategy: str
    batch: int
    device_bytes: int | None
    sentence: str
    fits_beyond: tuple[int, ...] = ()
    limited: bool = False
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
        return [MEANING, *tried[0].assumptions] if tried else []


def plan(
    spec: RunSpec, *, strategies: Sequence[str] | None = None, max_batch: int = 4096
) -> Plan:
    """The largest batch per GPU of each strategy on ``spec.gpus`` GPUs of kind ``spec.gpu``.

    It fits, and so do smaller ones: what fits need not be monotone in the batch (see `llmem.largest`).
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
    unit = _unit(spec)
    limit = max(1, min(max_batch, MAX_TOKENS // spec.seq_length) // unit)
    room = _Room(spec, source)
    found = largest_batch(
        lambda units: room.fits(unit * units), limit=limit, start=room.guess(unit, limit)
    )
    batch = unit * found.batch
    final = _estimate(spec, source, max(batch, unit))
    while batch and final.fit is not None and not final.fit.fits:
        batch -= unit  # the lines said yes, the step itself says no
        final = _estimate(spec, source, max(batch, unit))
    assert final.fit is not None
    used = final.fit.device if batch else None
    limited = found.limited and batch == unit * found.batch
    beyond = tuple(unit * units for units in found.beyond)
    sentence = final.fit.sentence + _beyond(beyond) * bool(batch) + _limit(batch, spec) * limited
    return Option(spec.strategy, batch, used, sentence, beyond, limited, final.assumptions)


def _beyond(batches: tuple[int, ...]) -> str:
    if not batches:
        return ""
    named = ", ".join(map(str, batches))
    return f"; {named} would fit too, but not every batch below"


def _limit(batch: int, spec: RunSpec) -> str:
    return f"; no more than {batch} ({batch * spec.seq_length:,} tokens per GPU) were tried"


def _estimate(spec: RunSpec, source: Source, batch: int) -> Estimate:
    chosen = spec.model_copy(update={"per_device_train_batch_size": batch})
    return estimate_trace(source.real(batch), chosen)


class _Room:
    """Whether all ranks of ``spec`` fit their card at a batch size, as cheaply as it can be said."""

    def __init__(self, spec: RunSpec, source: Source) -> None:
        self._spec, self._source = spec, source
        device = get_device(spec.gpu or DEFAULT_GPU)
        self._conf = AllocConf.parse(spec.alloc_conf)
        self._bytes = device.capacity - sum(outside_allocator(device, spec).values())

    def _tables(self, batch: int) -> list[RankTable]:
        chosen = self._spec.model_copy(update={"per_device_train_batch_size": batch})
        return ranks_of(self._source.at(batch), chosen)

    def fits(self, batch: int) -> bool:
        """Whether no rank runs out of memory: one replay for each, and nothing else."""
        return all(
            replay(
                table.lifetimes, conf=self._conf, capacity=self._bytes,
                cache_emptied=table.trace.cache_emptied, held=table.held,
            ).oom is None
            for table in self._tables(batch)
        )  # fmt: skip

    def guess(self, unit: int, limit: int) -> int:
        """Units of the batch at which the line through the live bytes of two batches fills the card."""
        few, more = (
            max(int(replay(table.lifetimes, exact=True).allocated.max()) for table in self._tables(n * unit))
            for n in (2, 4)
        )
        if more <= few:
            return 1
        return min(max(1, 2 + 2 * (self._bytes - few) // (more - few)), limit)


make_callable(__name__)
