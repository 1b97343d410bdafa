"""``--strategy fsdp2``: options from the RunSpec, one table for each kind of rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmem.errors import LlmemError
from llmem.lifetimes import Together, Trace
from llmem.parallel import RankTable
from llmem.parallel.fsdp.fsdp2 import Fsdp2Pass
from llmem.parallel.fsdp.fsdp2_shards import (
    ITEMSIZE,
    Fsdp2Options,
    expert_mesh,
    padded_shard,
)
from llmem.parallel.fsdp.offload import check_offload, host_note
from llmem.parallel.host_step import step_on_host
from llmem.parallel.sharded_step import Shard, device_of, splice_optimizer, trace_optimizer
from llmem.parallel.units import units_of
from llmem.spec import RunSpec
from llmem.trace.checkpointing import is_reentrant

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def compute_dtype(spec: RunSpec) -> str | None:
    """``MixedPrecisionPolicy(param_dtype=...)``: what accelerate sets for bf16 and fp16."""
    return spec.autocast_dtype


def options_of(spec: RunSpec) -> Fsdp2Options:
    """Arguments of ``fully_shard`` for ``spec``. Raises LlmemError for impossible ones."""
    shard = spec.shard_ranks
    if spec.gpus % shard:
        raise LlmemError(
            f"--hybrid-shard {shard} does not divide {spec.gpus} GPUs; choose a divisor"
        )
    reshard = spec.reshards
    if reshard is not True and reshard is not False and (reshard < 2 or shard % reshard):
        raise LlmemError(
            f"--reshard-after-forward {reshard} must be a divisor of the {shard} ranks that share "
            "a copy, at least 2; or true or false"
        )
    check_offload(spec)
    return Fsdp2Options(
        shard_size=shard,
        replicas=spec.gpus // shard,
        param_dtype=spec.autocast_dtype,
        reduce_dtype=DTYPES[spec.reduce_dtype] if spec.autocast_dtype else None,
        reshard=reshard,
        offload=spec.offload == "all",
        inputs_require_grad=spec.gradient_checkpointing
        and spec.method != "full"
        and is_reentrant(spec),
    )


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    options = options_of(spec)
    if spec.keep_last_block:
        options = replace(options, kept=frozenset(trace.wrapped[-1:]))
    together = trace.together if spec.fsdp_units == "accelerate" else []
    options = replace(
        options,
        kept=options.kept | {unit.name for unit in together if unit.kept},
        experts=expert_mesh(trace, spec),
    )
    _check_experts(options)
    trace, whole = _left_whole(trace, spec)
    units = units_of(trace, [*trace.wrapped, *trace.experts], together)
    apart = "".join(f", {_listed(unit)}" for unit in together)
    notes = [
        f"fsdp2: fully_shard of torch on each of {len(trace.wrapped)} blocks{apart} and the root, "
        f"{options.shard_size} ranks share a copy, {options.replicas} "
        f"{'copies' if options.replicas > 1 else 'copy'}, reshard_after_forward "
        f"{str(options.reshard).lower()}",
        *whole,
    ]
    if together:
        notes.append(
            "fsdp2: units as accelerate 1.15 makes them (--fsdp-units); the optimizer's parameters "
            "are exchanged for the shards, which allocates nothing"
        )
    if options.experts:
        notes.append(
            f"fsdp2: the experts of a block are a unit of their own, whose shards {options.experts.size} "
            f"rank{'s' * (options.experts.size > 1)} share{'s' * (options.experts.size == 1)}, as "
            "transformers' DistributedConfig does it"
        )
    if options.param_dtype:
        notes.append(
            f"fsdp2: MixedPrecisionPolicy(param_dtype={options.param_dtype}, "
            f"reduce_dtype={options.reduce_dtype}) (--reduce-dtype; accelerate sets bf16); "
            "trained parameters kept in fp32, as accelerate loads them"
        )
    return tables(
        trace, spec, options, notes, lambda: Fsdp2Pass(trace, units, trace.masters, options)
    )


def _check_experts(options: Fsdp2Options) -> None:
    reshard = options.reshard
    if options.experts and not isinstance(reshard, bool) and options.experts.size % reshard:
        raise LlmemError(
            f"--reshard-after-forward {reshard} does not divide the {options.experts.size} ranks that share "
            "the same experts; use a divisor, true or false"
        )


def tables(
    trace: Trace,
    spec: RunSpec,
    options: Fsdp2Options,
    notes: list[str],
    make_pass: Callable[[], Fsdp2Pass],
) -> list[RankTable]:
    """One table for each kind of rank: what ``make_pass`` plays, and the optimizer of its shards."""
    tables = []
    for members in kinds_of_rank(trace, options, spec.gpus):
        rank = members[0]
        editor = make_pass().run()
        shards = [
            Shard(
                p.key,
                p.name,
                options.local_shape(p, rank),
                trace.masters[p.key],
            )
            for p in trace.parameters
            if p.trainable
        ]
        step = trace_optimizer(shards, spec, device_of(spec), steps=len(trace.step_ticks) - 1)
        optimizer, told = step.optimizer, notes
        if options.offload:
            kept = [padded_shard(p, options.ranks(p)) for p in trace.parameters]
            told = [*notes, host_note("fsdp2: CPUOffloadPolicy", _sized(trace, kept), step)]
            optimizer = step_on_host(editor)
        else:
            splice_optimizer(editor, shards, step)
        lifetimes, named = editor.finish()
        tables.append(RankTable(rank, lifetimes, named, optimizer, told, members))
    return tables


def _listed(unit: Together) -> str:
    return f"[{unit.name}]" if len(unit.modules) > 1 else unit.name


def _left_whole(trace: Trace, spec: RunSpec) -> tuple[Trace, list[str]]:
    """The trace without the parameters that accelerate keeps from ``fully_shard``, and a note.

    They are frozen 4-bit weights stored as integers (``incompatible_params4bit`` in accelerate's
    ``fsdp2_prepare_model``).
    """
    if spec.fsdp_units != "accelerate":
        return trace, []
    whole = [p for p in trace.parameters if trace.masters[p.key] == "uint8" and not p.trainable]
    if not whole:
        return trace, []
    mib = sum(p.numel for p in whole) / 2**20
    note = (
        f"fsdp2: {len(whole)} 4-bit weights stored as uint8, {mib:,.1f} MiB, lie whole on each GPU, as "
        "accelerate leaves them"
    )
    kept = {p.key for p in whole}
    return replace(trace, parameters=[p for p in trace.parameters if p.key not in kept]), [note]


def _sized(trace: Trace, elements: list[int]) -> list[tuple[int, bool]]:
    """Bytes of each parameter's shard in the dtype it is kept in, and whether it is trained."""
    return [
        (numel * ITEMSIZE[trace.masters[p.key]], p.trainable)
        for p, numel in zip(trace.parameters, elements, strict=True)
    ]


def kinds_of_rank(trace: Trace, options: Fsdp2Options, world: int) -> list[tuple[int, ...]]:
    """Ranks grouped by the shapes they own: ranks of a group are exactly alike."""
    kinds: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in range(world):
        owned = tuple(options.local_shape(p, rank) for p in trace.parameters)
        kinds.setdefault(owned, []).append(rank)
    return [tuple(members) for members in kinds.values()]
