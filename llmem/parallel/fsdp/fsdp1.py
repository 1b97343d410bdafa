"""``--strategy fsdp``: FSDP1 as accelerate sets it up; options from the RunSpec, tables by rank.

Wrapping: one unit per block of ``_no_split_modules`` and the root; with adapters also every leaf
module with a trained weight (peft's ``fsdp_auto_wrap_policy``, which Trainer uses). Mixed precision:
accelerate's ``MixedPrecision(param, reduce and buffer dtype)`` and its fp32 copies of trained flat
parameters, with autocast around the forward as on one GPU (``Accelerator.prepare_model``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmem.errors import LlmemError
from llmem.lifetimes import Parameter, Trace
from llmem.parallel import RankTable
from llmem.parallel.fsdp.fsdp1_flat import ITEMSIZE, FlatParameter, flatten
from llmem.parallel.fsdp.fsdp1_pass import Fsdp1Options, Fsdp1Pass
from llmem.parallel.fsdp.offload import check_offload, host_note
from llmem.parallel.host_step import step_on_host
from llmem.parallel.sharded_step import Shard, device_of, splice_optimizer, trace_optimizer
from llmem.parallel.units import Unit, units_of
from llmem.spec import RunSpec, checkpoints_calls, checkpoints_reentrantly

if TYPE_CHECKING:
    import torch


def compute_dtype(spec: RunSpec) -> str | None:
    """``MixedPrecision(param_dtype=...)``: what accelerate sets for bf16 and fp16."""
    return spec.autocast_dtype


def options_of(spec: RunSpec) -> Fsdp1Options:
    """Arguments of FSDP1 for ``spec``. Raises LlmemError for impossible ones."""
    if spec.gpus % spec.shard_ranks:
        raise LlmemError(
            f"--hybrid-shard {spec.hybrid_shard} does not divide {spec.gpus} GPUs; choose a divisor"
        )
    if spec.reshards not in (True, False):
        raise LlmemError(
            f"FSDP1 cannot keep a part of a unit after forward (--reshard-after-forward "
            f"{spec.reshards}); use true, false or --strategy fsdp2"
        )
    if spec.shard_ranks == 1 and spec.gpus > 1:
        raise LlmemError("FSDP1 with one GPU per copy does not shard (NO_SHARD); use --strategy ddp")
    check_offload(spec)
    return Fsdp1Options(
        free_after_forward=bool(spec.reshards),
        prefetch=spec.backward_prefetch,
        use_orig_params=spec.use_orig_params,
        reentrant=spec.gradient_checkpointing and checkpoints_calls(spec.as_transformers),
        inputs_require_grad=spec.gradient_checkpointing
        and checkpoints_reentrantly(spec.as_transformers),
        offload=spec.offload == "all",
        hybrid=spec.shard_ranks < spec.gpus,
    )


def wrapped_modules(trace: Trace, spec: RunSpec) -> list[str]:
    """Names of the modules that are units of their own, the root left out."""
    if spec.method == "full":
        return trace.wrapped
    alone = {p.key for p in ignored(trace, spec)}
    leaves = [
        p.name.removesuffix(".weight")
        for p in trace.parameters
        if p.trainable and p.name.endswith(".weight") and p.key not in alone
    ]
    return [*trace.wrapped, *leaves]


def ignored(trace: Trace, spec: RunSpec) -> list[Parameter]:
    """``ignored_modules``: adapters whose products are fused (fms-acceleration), whole on each rank."""
    from llmem.trace.standins.select import fuses_adapters

    return [p for p in trace.parameters if fuses_adapters(spec) and ".lora_" in p.name]


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    alone = ignored(trace, spec)
    options = replace(options_of(spec), ignored=frozenset(p.key for p in alone))
    units = units_of(trace, wrapped_modules(trace, spec))
    for unit in units:
        unit.parameters = [p for p in unit.parameters if p.key not in options.ignored]
    if alone and options.offload:
        raise LlmemError(
            "fused adapters are no part of what FSDP1 offloads, which is not modelled; leave --offload "
            "or the fused kernels out"
        )
    whole = [Shard(p.key, p.name, p.shape, p.dtype) for p in alone]
    flats = [_flat(unit, trace, spec) for unit in units]
    notes = _notes(units, options, spec)
    tables = []
    for members, sharded in _kinds(units, flats, spec):
        shards = [*sharded, *whole]
        step = trace_optimizer(
            shards, spec, device_of(spec), steps=len(trace.step_ticks) - 1, clip=clip
        )
        edited = Fsdp1Pass(trace, units, flats, options).run()
        optimizer, told = step.optimizer, notes
        if options.offload:
            # _cpu_grad is made for every flat parameter, frozen or not
            held = [(flat.shard * ITEMSIZE[flat.kept], True) for flat in flats if flat is not None]
            told = [*notes, host_note("fsdp: CPUOffload(offload_params=True)", held, step)]
            optimizer = step_on_host(edited)
        else:
            splice_optimizer(edited, shards, step)
        lifetimes, named = edited.finish()
        tables.append(RankTable(members[0], lifetimes, named, optimizer, told, members))
    return tables


def _flat(unit: Unit, trace: Trace, spec: RunSpec) -> FlatParameter | None:
    if not unit.parameters:
        return None
    return flatten(
        unit.parameters,
        spec.shard_ranks,
        kept=trace.masters,
        computed=spec.autocast_dtype,
        use_orig_params=spec.use_orig_params,
    )


def _kinds(
    units: list[Unit], flats: list[FlatParameter | None], spec: RunSpec
) -> list[tuple[tuple[int, ...], list[Shard]]]:
    """Ranks that own the same shapes, and what their optimizer sees."""
    trained = [(u, f) for u, f in zip(units, flats, strict=True) if f is not None and f.trainable]
    if not spec.use_orig_params:
        everyone = tuple(range(spec.gpus))
        return [(everyone, [flat.whole(unit.name) for unit, flat in trained])]
    kinds: dict[tuple[Shard, ...], list[int]] = {}
    for rank in range(spec.gpus):
        owned = [part for _, flat in trained for part in flat.parts(rank % spec.shard_ranks)]
        kinds.setdefault(tuple(owned), []).append(rank)
    return [(tuple(members), list(owned)) for owned, members in kinds.items()]


def clip(parameters: list[torch.nn.Parameter], max_norm: float) -> None:
    """The tensors that ``FullyShardedDataParallel.clip_grad_norm_`` makes, on one rank."""
    import torch

    norm, one = torch.linalg.vector_norm, torch.float32
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = norm(torch.stack([norm(g, 2.0, dtype=one) for g in gradients]), 2.0, dtype=one)
    total = local**2.0
    total = total ** (1.0 / 2.0)
    bounded = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(bounded.to(gradient.dtype))


def _notes(units: list[Unit], options: Fsdp1Options, spec: RunSpec) -> list[str]:
    blocks = sum(not unit.is_root for unit in units)
    strategy = "FULL_SHARD" if options.free_after_forward else "SHARD_GRAD_OP"
    shared = spec.shard_ranks
    strategy = strategy if shared == spec.gpus else f"HYBRID_SHARD ({strategy})"
    notes = [
        f"fsdp: FullyShardedDataParallel of torch on {blocks} modules and the root, {strategy}, "
        f"{shared} ranks share a copy, use_orig_params {str(options.use_orig_params).lower()}, "
        f"backward prefetch {options.prefetch}, no forward prefetch"
    ]
    if spec.autocast_dtype:
        notes.append(
            f"fsdp: MixedPrecision and autocast to {spec.autocast_dtype}, trained parameters kept "
            "in fp32, gradients reduced in the lower precision (as accelerate sets them)"
        )
    return notes
