"""From a RunSpec to an estimate: trace, shard, replay, read off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmem._callable import make_callable
from llmem.gpu.alloc_conf import AllocConf
from llmem.gpu.devices import DeviceProfile, get_device
from llmem.installed import installed
from llmem.lifetimes import Category, Trace
from llmem.parallel import RankTable, compute_dtype, ranks_of
from llmem.spec import RunSpec, make_spec
from llmem.timeline import PeakAt, Timeline, locate, replay
from llmem.trace.optimizers import by_step
from llmem.trace.run import DEFAULT_GPU, trace_spec
from llmem.unused import notes_on_unused

SCHEMA = "llmem.estimate/1"


@dataclass(frozen=True)
class Levels:
    """Peak bytes at the four levels, never mixed up.

    ``requested``: what ops asked for; ``allocated``: ``torch.cuda.max_memory_allocated``;
    ``reserved``: ``max_memory_reserved``; ``device``: nvidia-smi, i.e. reserved plus CUDA
    context, library handles and NCCL.
    """

    requested: int
    allocated: int
    reserved: int
    device: int

    def to_json(self) -> dict[str, int]:
        return dict(vars(self))


@dataclass(frozen=True)
class Rank:
    """One rank's result; ``breakdown`` sums to ``peak.allocated``."""

    rank: int
    peak: Levels
    peak_at: PeakAt
    breakdown: dict[str, int]
    first: Levels
    steady: Levels
    timeline: Timeline = field(repr=False)
    table: RankTable = field(repr=False)

    @property
    def kv_cache(self) -> int:
        """Allocated bytes of keys and values at the peak, a part of the breakdown's activations."""
        cached = self.timeline.lifetimes.category == Category.KV_CACHE
        alive = self.timeline.alive(self.peak_at.index)
        return int(self.timeline.block_bytes[alive & cached].sum())


@dataclass(frozen=True)
class Fit:
    """Whether every rank fits its GPU, and how.

    ``device`` is what nvidia-smi then shows: with little room the allocator gives cached blocks
    back, so it can be less than the peak without a limit.
    """

    fits: bool
    capacity: int
    sentence: str
    device: int
    retries: int = 0


@dataclass(frozen=True)
class Estimate:
    """What ``llmem.estimate`` returns; ``to_json`` is the documented JSON."""

    spec: RunSpec
    ranks: list[Rank]
    device: DeviceProfile
    outside: dict[str, int]
    """Bytes outside the allocator on each GPU, by cause."""
    fit: Fit | None
    interval: tuple[int, int]
    optimizer: dict[str, Any]
    assumptions: list[str]
    trace: Trace = field(repr=False)

    @property
    def worst(self) -> Rank:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.device)

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "schema": SCHEMA,
            "peak": worst.peak.to_json(),
            "worst_rank": worst.rank,
            "ranks": [
                {
                    "rank": number,
                    "peak": rank.peak.to_json(),
                    "peak_at": {
                        "phase": rank.peak_at.phase,
                        "module": rank.peak_at.module,
                        "op": rank.peak_at.op,
                        "step": rank.peak_at.step,
                    },
                    "breakdown": rank.breakdown,
                    **({"kv_cache": rank.kv_cache} if self.spec.task == "generate" else {}),
                    "steps": {"first": rank.first.to_json(), "steady": rank.steady.to_json()},
                }
                for rank in self.ranks
                for number in rank.table.ranks
            ],
            "steps": {"first": worst.first.to_json(), "steady": worst.steady.to_json()},
            "optimizer": self.optimizer,
            "fits": None if self.fit is None else self.fit.fits,
            "fit": None if self.fit is None else self.fit.sentence,
            "interval": {"low": self.interval[0], "high": self.interval[1]},
            "outside_allocator": self.outside,
            "gpu": self.device.name if self.spec.gpu else None,
            "assumptions": self.assumptions,
            "tracing_seconds": round(self.trace.tracing_seconds, 3),
            "versions": versions(),
        }


def estimate(spec: RunSpec | None = None, **fields: Any) -> Estimate:
    """Predict the memory of a run; ``fields`` are RunSpec's if no spec is given.

    Raises LlmemError (one sentence) if the run makes no sense or cannot be traced.
    """
    spec = spec if spec is not None else make_spec(**fields)
    AllocConf.parse(spec.alloc_conf)  # says what is wrong with it before anything is traced
    return estimate_trace(trace_spec(spec, compute_dtype=compute_dtype(spec)), spec)


def estimate_trace(trace: Trace, spec: RunSpec) -> Estimate:
    """The estimate of ``spec`` from the trace of its unsharded step (see ``trace_spec``).

    One trace serves every strategy, number of GPUs and GPU whose kernels it was traced for.
    """
    device = get_device(spec.gpu or DEFAULT_GPU)
    conf = AllocConf.parse(spec.alloc_conf)
    tables = ranks_of(trace, spec)
    outside = outside_allocator(device, spec)
    ranks = [_measure(table, trace, device, conf, sum(outside.values())) for table in tables]
    worst = max(ranks, key=lambda rank: rank.peak.device)
    fit = _fit(ranks, device, conf, outside) if spec.gpu and device.capacity else None
    return Estimate(
        spec=spec,
        ranks=ranks,
        device=device,
        outside=outside,
        fit=fit,
        interval=_interval(worst, device, spec),
        optimizer=by_step(worst.table.optimizer),
        assumptions=_assumptions(trace, tables, device, spec),
        trace=trace,
    )


def _measure(
    table: RankTable, trace: Trace, device: DeviceProfile, conf: AllocConf, outside: int
) -> Rank:
    exact = not device.is_cuda
    emptied = table.trace.cache_emptied
    timeline = replay(
        table.lifetimes, exact=exact, conf=conf, cache_emptied=emptied, held=table.held
    )
    index = timeline.peak_index()
    starts = table.trace.step_ticks
    return Rank(
        rank=table.rank,
        peak=_levels(timeline, 0, None, outside),
        peak_at=locate(timeline, table.trace, index),
        breakdown=timeline.breakdown(index),
        first=_levels(timeline, *timeline.span(starts[0], starts[1]), outside),
        steady=_levels(timeline, *timeline.span(starts[-2], starts[-1]), outside),
        timeline=timeline,
        table=table,
    )


def _levels(timeline: Timeline, start: int, stop: int | None, outside: int) -> Levels:
    reserved = int(timeline.reserved[start:stop].max())
    return Levels(
        requested=int(timeline.requested[start:stop].max()),
        allocated=int(timeline.allocated[start:stop].max()),
        reserved=reserved,
        device=reserved + outside,
    )


def outside_allocator(device: DeviceProfile, spec: RunSpec) -> dict[str, int]:
    """Bytes that nvidia-smi shows and the allocator does not know, by cause."""
    if not device.is_cuda:
        return {}
    communicators = _communicators(spec)
    return {
        "cuda_context": device.context.value,
        "library_handles": device.handles.value,
        "nccl": sum(device.nccl(ranks).value for ranks in communicators),
    }


def _communicators(spec: RunSpec) -> list[int]:
    """Ranks of each NCCL communicator: one for each mesh dimension whose ranks exchange tensors in a step.

    NCCL makes a communicator at a group's first collective, and each dimension of a mesh is a group of its
    own, even if another one has the same ranks (``DeviceMesh._flatten``). FSDP shards over dp x cp (torchtitan's
    ``fsdp``, accelerate's ``dp_shard_cp``), attention exchanges keys over cp; the dimension of dp alone
    deals out batches and has no communicator. Left out: the group of all ranks that averages a logged loss.
    """
    apart = spec.ep > 1 and spec.ep_plan == "alltoall" and spec.strategy != "none"
    data = spec.gpus // (max(spec.tp, 1 if apart else spec.ep) * spec.pp)
    shard = spec.shard_ranks if data % spec.shard_ranks == 0 else data
    experts = shard // spec.ep if apart else 1
    degrees = (shard, data // shard, experts, spec.tp, spec.cp, spec.ep, spec.pp)
    return [ranks for ranks in degrees if ranks > 1]


def _fit(
    ranks: list[Rank], device: DeviceProfile, conf: AllocConf, outside: dict[str, int]
) -> Fit:
    """That of a rank that does not fit, else of the one that uses most.

    All are asked: with little room it is not always the highest peak without a limit that fails.
    """
    fits = [_fit_of(rank, len(ranks) > 1, device, conf, outside) for rank in ranks]
    return min(fits, key=lambda fit: (fit.fits, -fit.device))


def _fit_of(
    rank: Rank, named: bool, device: DeviceProfile, conf: AllocConf, outside: dict[str, int]
) -> Fit:
    capacity = device.capacity
    room = capacity - sum(outside.values())
    emptied = rank.table.trace.cache_emptied
    table, held = rank.table.lifetimes, rank.table.held
    timeline = replay(table, conf=conf, capacity=room, cache_emptied=emptied, held=held)
    gib = 2**30
    if timeline.oom is not None:
        at = locate(timeline, rank.table.trace, timeline.oom.event)
        where = f" on rank {rank.rank}" if named else ""
        return Fit(
            False,
            capacity,
            f"out of memory on {device.name} ({capacity / gib:.2f} GiB){where}: {at.op or 'a load'} "
            f"in {at.phase}{f' of {at.module}' if at.module else ''} asks for "
            f"{timeline.oom.requested / 2**20:,.1f} MiB",
            int(timeline.reserved.max()) + sum(outside.values()),
            timeline.retries,
        )
    how = (
        f"fits {device.name} only after freeing cached blocks ({timeline.retries} times)"
        if timeline.retries
        else f"fits {device.name}"
    )
    used = int(timeline.reserved.max()) + sum(outside.values())
    spare = f"{(capacity - used) / gib:.2f} GiB to spare"
    return Fit(True, capacity, f"{how}, {spare}", used, timeline.retries)


def _interval(worst: Rank, device: DeviceProfile, spec: RunSpec) -> tuple[int, int]:
    """Bounds of the device level.

    Below: the allocator could not do with less than the allocated peak, and the context and
    libraries take their least. Above: reserved memory plus what stays unsplit at the peak (a
    different order of the same requests can leave as much again unused), and the most the
    context and libraries take. Batches padded to their own longest row ask for other sizes each time:
    then the largest cached block may not serve any of them, and counts again.
    """
    if not device.is_cuda:
        return worst.peak.requested, worst.peak.requested
    communicators = [device.nccl(ranks) for ranks in _communicators(spec)]
    parts = [device.context, device.handles, *communicators]
    slack = worst.peak.reserved - worst.peak.allocated
    if spec.padding:
        slack += int(worst.timeline.block_bytes.max())
    low = worst.peak.allocated + sum(part.low for part in parts)
    high = worst.peak.reserved + slack + sum(part.high for part in parts)
    return low, high


def _assumptions(
    trace: Trace, tables: list[RankTable], device: DeviceProfile, spec: RunSpec
) -> list[str]:
    notes = [
        *spec.notes,
        *notes_on_unused(spec),
        f"batch: {spec.per_device_train_batch_size} x {spec.seq_length} tokens, "
        + ("padded to that length" if spec.padding else "full length, no padding"),
        *trace.assumptions,
    ]
    for table in tables[:1]:
        notes += table.assumptions
    if spec.gpu is None:
        notes.append(f"GPU: kernels, context and libraries of {device.name} (no --gpu given)")
    if spec.alloc_conf:
        notes.append(f"allocator: PYTORCH_ALLOC_CONF {spec.alloc_conf}")
    if spec.as_torch is not None:
        notes.append(f"as torch {spec.as_torch}: its kernels' scratch and choices")
    if not device.is_cuda:
        notes.append("device: CPU kernels and defaults, bytes exact, nothing rounded or cached")
    seen: dict[str, None] = dict.fromkeys(notes)
    return list(seen)


def versions() -> dict[str, str]:
    """Versions of what the step was traced with."""
    found = {name: installed(name) for name in ("torch", "transformers", "peft", "numpy")}
    found["llmem"] = _own_version()
    return found


def _own_version() -> str:
    import llmem

    return llmem.__version__


make_callable(__name__)
