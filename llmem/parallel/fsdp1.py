"""``--strategy fsdp``: FSDP1 as accelerate sets it up; options from the RunSpec, tables by rank.

Wrapping: one unit per block of ``_no_split_modules`` and the root; with adapters also every leaf
module with a trained weight (peft's ``fsdp_auto_wrap_policy``, which Trainer uses). Mixed precision:
accelerate's ``MixedPrecision(param, reduce and buffer dtype)`` and its fp32 copies of trained flat
parameters, with autocast around the forward as on one GPU (``Accelerator.prepare_model``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmem.errors import LlmemError
from llmem.lifetimes import Trace
from llmem.parallel import RankTable
from llmem.parallel.fsdp1_flat import FlatParameter, flatten
from llmem.parallel.fsdp1_pass import Fsdp1Options, Fsdp1Pass
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
    if spec.gpus % shard_ranks(spec):
        raise LlmemError(
            f"--hybrid-shard {spec.hybrid_shard} does not divide {spec.gpus} GPUs; choose a divisor"
        )
    if spec.reshard_after_forward not in (True, False):
        raise LlmemError(
            f"FSDP1 cannot keep a part of a unit after forward (--reshard-after-forward "
            f"{spec.reshard_after_forward}); use true, false or --strategy fsdp2"
        )
    if spec.offload != "none":
        raise LlmemError("--offload is not supported with fsdp yet; leave it out")
    return Fsdp1Options(
        free_after_forward=bool(spec.reshard_after_forward),
        prefetch=spec.backward_prefetch,
        use_orig_params=spec.use_orig_params,
        reentrant=spec.gradient_checkpointing and checkpoints_calls(spec.as_transformers),
        inputs_require_grad=spec.gradient_checkpointing
        and checkpoints_reentrantly(spec.as_transformers),
    )


def shard_ranks(spec: RunSpec) -> int:
    """Ranks that share one copy of the parameters."""
    return spec.hybrid_shard or spec.gpus


def wrapped_modules(trace: Trace, spec: RunSpec) -> list[str]:
    """Names of the modules that are units of their own, the root left out."""
    if spec.method == "full":
        return trace.wrapped
    leaves = [
        p.name.removesuffix(".weight")
        for p in trace.parameters
        if p.trainable and p.name.endswith(".weight")
    ]
    return [*trace.wrapped, *leaves]


def ranks(trace: Trace, spec: RunSpec) -> list[RankTable]:
    options = options_of(spec)
    units = units_of(trace, wrapped_modules(trace, spec))
    flats = [_flat(unit, trace, spec) for unit in units]
    notes = _notes(units, options, spec)
    tables = []
    for members, shards in _kinds(units, flats, spec):
        step = trace_optimizer(
            shards, spec, device_of(spec), steps=len(trace.step_ticks) - 1, clip=clip
        )
        edited = Fsdp1Pass(trace, units, flats, options).run()
        splice_optimizer(edited, shards, step)
        lifetimes, named = edited.finish()
        tables.append(RankTable(members[0], lifetimes, named, step.optimizer, notes, members))
    return tables


def _flat(unit: Unit, trace: Trace, spec: RunSpec) -> FlatParameter | None:
    if not unit.parameters:
        return None
    return flatten(
        unit.parameters,
        shard_ranks(spec),
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
        owned = [part for _, flat in trained for part in flat.parts(rank % shard_ranks(spec))]
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
    shared = shard_ranks(spec)
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
