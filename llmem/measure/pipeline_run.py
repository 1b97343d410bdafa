"""A pipeline rank as torch.distributed.pipelining runs it.

The model is cut as transformers' ``apply_pipeline_parallelism`` cuts it: a stage is the whole
model whose other layers pass on what they get, that takes what it receives as its embeddings, and
that ends with its last layer or, on the last stage, with norm, head and loss. The first stage has
the embeddings; a tied head has its copy of them.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from llmem.errors import LlmemError
from llmem.lifetimes import Phase
from llmem.measure.engines import Wrapped, shard_blocks
from llmem.parallel.pipeline.schedule import SPLIT, actions, stages_on, stages_per_rank
from llmem.parallel.pipeline.stages import split_layers
from llmem.spec import RunSpec
from llmem.trace.batch import Batch
from llmem.trace.build import Prepared, blocks_of, prepare
from llmem.trace.compiled.regions import compile_parts
from llmem.trace.micro_batch import one_micro_batch
from llmem.trace.split.process_group import rank_mesh, sharing
from llmem.trace.split.tensor_parallel import by_mesh
from llmem.trace.step import NoWatcher, Watcher

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
POINT_TO_POINT = "gloo"
"""The backend of sends and receives. gloo's own: it sends from and receives into the tensors that
it is given, and no thread of its own holds them."""


def build_pipeline(spec: RunSpec, device: str) -> Wrapped:
    """This process's stages of ``spec``, and the step that trains them.

    Ranks are numbered (pp, replica, cp, tp), as the estimate's. Raises LlmemError for what has no
    pipeline here: GPUs, tensor parallelism under DDP, other strategies than ddp and fsdp2, unknown
    families.
    """
    _check(spec, device)
    per_rank = stages_per_rank(spec.pp_schedule, spec.virtual_stages)
    replicas = spec.gpus // spec.pp
    rank, _ = divmod(dist.get_rank(), replicas)
    actions(spec.pp_schedule, spec.pp, rank, spec.pipeline_micro_batches, per_rank)  # or refuses
    one_micro_batch(spec)
    alone: dict[str, Any] = {"gpus": spec.tp * spec.cp, "pp": 1, "strategy": "none"}
    if spec.strategy == "fsdp2":  # its policy takes autocast's place
        alone |= {"bf16": False}
    ranks = cache(partial(rank_mesh, spec, pp=spec.pp))
    prepared = prepare(spec.model_copy(update=alone), device=device, cuda=False, mesh=ranks)
    if spec.compile:
        compile_parts(prepared.step, blocks_of(prepared.model), spec, torch.compile)
    total = spec.pp * per_rank
    pipeline, data = _groups(spec.pp, replicas)
    mesh = sharing(ranks()) if spec.strategy == "fsdp2" else None
    mine: list[PipelineStage] = []
    step = PipelineStep(spec, prepared)
    # All of them before any is sharded, which gives a layer another class.
    numbers = stages_on(spec.pp_schedule, spec.pp, rank, per_rank)
    modules = [StageModule(prepared, number, total, sp=spec.sp) for number in numbers]
    for stage in modules:
        module: torch.nn.Module = stage
        if mesh is not None:
            shard_blocks(stage, stage.mine, spec, mesh)
        step.parameters += [p for p in module.parameters() if p.requires_grad]
        if spec.strategy == "ddp":
            module = _replicated(module, spec, data)
        mine.append(WatchedStage(step, module, stage.number, total, device, pipeline))
    if not step.parameters:
        raise LlmemError(f"pipeline rank {rank} has nothing to train; use another --method or --pp")
    step.parameters = list(dict.fromkeys(step.parameters))  # a tied one of both ends of a V
    step.start(mine, prepared)
    batch = sum(tensor.nbytes for tensor in prepared.step.make_batch().values())
    notes = prepared.assumptions
    del prepared  # and with it the layers of other ranks
    gc.collect()
    return Wrapped(step, [], notes, batch)


def _check(spec: RunSpec, device: str) -> None:
    if device != "cpu":
        raise LlmemError("--pp is measured on the CPU alone; use --device cpu")
    if spec.tp > 1 and spec.strategy == "ddp":
        raise LlmemError("--pp with --tp and --strategy ddp cannot be measured; use fsdp2 or none")
    if spec.strategy not in ("none", "ddp", "fsdp2"):
        raise LlmemError(
            f"--pp with --strategy {spec.strategy} cannot be measured; use ddp, fsdp2 or none"
        )
    if spec.pp_schedule in SPLIT and spec.strategy != "none":
        raise LlmemError(
            f"--pp-schedule {spec.pp_schedule} with --strategy {spec.strategy} cannot be measured; use "
            "--strategy none, or another schedule"
        )
    if spec.pp_schedule in SPLIT and spec.loss_parallel:
        raise LlmemError(
            f"--pp-schedule {spec.pp_schedule} with --loss-parallel cannot be measured: a stage hands out "
            "its loss as a view, whose graph torch's stage_backward_input cannot drop; leave one out"
        )
    if spec.zero_grad == "before_backward" or spec.hold_outputs or spec.fp16:
        raise LlmemError(
            "a pipeline's schedule runs forward and backward itself, in fp32 or bf16; leave out "
            "--fp16, hold_outputs and zero_grad='before_backward'"
        )


def _groups(pp: int, replicas: int) -> tuple[Any, Any]:
    """The groups of this rank's pipeline and of the replicas of its stages."""
    rank = dist.get_rank()
    mine: list[Any] = [None, None]
    for replica in range(replicas):
        members = [stage * replicas + replica for stage in range(pp)]
        group = dist.new_group(members, backend=POINT_TO_POINT)
        mine[0] = group if rank in members else mine[0]
    for stage in range(pp if replicas > 1 else 0):
        members = [stage * replicas + replica for replica in range(replicas)]
        group = dist.new_group(members)
        mine[1] = group if rank in members else mine[1]
    return mine[0], mine[1]


def _replicated(module: torch.nn.Module, spec: RunSpec, group: Any) -> torch.nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=spec.bucket_cap_mb,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
    )


class PipelineStep:
    """One optimizer step of a rank: its schedule, clipping, and the optimizer of its parameters."""

    def __init__(self, spec: RunSpec, prepared: Prepared) -> None:
        self.watcher: Watcher = NoWatcher()
        self.parameters: list[torch.nn.Parameter] = []
        self._spec = spec
        self._make_batch = prepared.step.make_batch
        self._context = prepared.step.micro_batch_context
        self._clip = prepared.step.clip
        self._count = 0

    def start(self, stages: list[PipelineStage], prepared: Prepared) -> None:
        """Make the schedule and the optimizer."""
        kind = SCHEDULES[self._spec.pp_schedule]
        self._first = any(stage.is_first for stage in stages)
        self._last = any(stage.is_last for stage in stages)
        self._schedule = kind(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=self._spec.pipeline_micro_batches,
            loss_fn=lambda loss, target: loss,  # the last stage's output
        )
        groups = ({"params": group} for group in by_mesh(self.parameters))
        self._optimizer = prepared.optimizer_plan.build(groups)

    def __call__(self) -> None:
        watch = self.watcher
        watch.start_step(self._count)
        self._count += 1
        self._zero_grad("before_forward")
        with self._context() as mine:  # around all micro-batches, as torchtitan's train loop has it
            with watch.in_phase(Phase.BATCH):
                batch = mine(self._make_batch())
            self._run(batch)
            del batch
        if self._spec.max_grad_norm:
            with watch.in_phase(Phase.CLIP):
                self._clip(self.parameters, self._spec.max_grad_norm, foreach=None)
        with watch.in_phase(Phase.OPTIMIZER):
            self._optimizer.step()
        self._zero_grad("after_step")

    def _run(self, batch: Batch) -> None:
        """The schedule; it cuts the batch into micro-batches."""
        wanted = ["attention_mask", "position_ids", *(["labels", "shift_labels"] if self._last else [])]
        with loss_parallel() if self._spec.loss_parallel else nullcontext():
            self._schedule.step(
                *([batch["input_ids"]] if self._first else []),
                target=batch["labels"] if self._last else None,
                losses=[] if self._last else None,
                return_outputs=False,
                **{name: batch[name] for name in wanted if name in batch},
            )

    def _zero_grad(self, moment: str) -> None:
        if self._spec.zero_grad == moment:
            with self.watcher.in_phase(Phase.ZERO_GRAD):
                self._optimizer.zero_grad()


class WatchedStage(PipelineStage):
    """A stage that tells its step's watcher what it does."""

    def __init__(
        self,
        step: PipelineStep,
        module: torch.nn.Module,
        number: int,
        total: int,
        device: str,
        group: Any,
    ) -> None:
        super().__init__(module, number, total, torch.device(device), group=group)
        self._step = step

    def _compute_outputs(self, *args: Any, module: Any, **kwargs: Any) -> Any:
        """The forward that finds out shapes, past DDP, which would await its backward."""
        return super()._compute_outputs(*args, module=getattr(module, "module", module), **kwargs)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._step.watcher.in_phase(Phase.FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._step.watcher.in_phase(Phase.BACKWARD):
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._step.watcher.in_phase(Phase.BACKWARD):
            super().backward_weight_one_chunk(*args, **kwargs)


class StageModule(torch.nn.Module):
    """Stage ``number`` of ``total`` of a causal language model, as a module of its own.

    Takes token ids (first stage) or hidden states [sequences, tokens, width]; returns hidden states
    or the loss (last stage), for which it gets labels. Under ``sp`` hidden states are the rank's part
    of the tokens.
    """

    def __init__(self, prepared: Prepared, number: int, total: int, *, sp: bool = False) -> None:
        super().__init__()
        whole: Any = prepared.model
        model = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
        self.number = number
        self.first, self.last = number == 0, number == total - 1
        names = [name.rpartition(".")[2] for name in blocks_of(model)]
        mine = split_layers(names, total)[number]
        self._context: Callable[[], AbstractContextManager[Any]] = prepared.step.forward_context
        self._outputs_of = prepared.step.outputs_of
        self._received, self._made = Received(), Made()
        self._sp = sp
        base = _shallow(getattr(model, model.base_model_prefix))
        family = _family(base)
        layers = base.get_submodule(family.layers)
        kept = [layer if n in mine else Absent() for n, layer in zip(names, layers, strict=True)]  # type: ignore[arg-type]
        setattr(base, family.layers, torch.nn.ModuleList(kept))
        self.mine = [layer for layer in kept if not isinstance(layer, Absent)]
        if not self.first:
            for name in family.embeddings:
                setattr(base, name, Absent())
            for name in family.positions:
                setattr(base, name, Nothing())
            if family.handed_on:
                setattr(base, family.handed_on, self._received)
        if not self.last:
            setattr(base, family.norm, self._made)
        self.model = base
        if self.last:
            self.model = _shallow(model)
            setattr(self.model, model.base_model_prefix, base)
            if sp:  # counts positions by token ids, which this stage does not have
                self.model._forward_pre_hooks = OrderedDict()

    def forward(self, hidden: Any, attention_mask: Any = None, **rest: Any) -> Any:
        given: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": hidden, **rest}
        if self._sp:  # as torchtitan calls the model: all positions, and no mask
            if "position_ids" not in given:
                given["position_ids"] = torch.arange(attention_mask.shape[1]).unsqueeze(0)
            attention_mask = None
        self._received.hidden = None if self.first else hidden
        with self._context():
            outputs = self.model(**given, attention_mask=attention_mask)
            if self.last:
                outputs = self._outputs_of(outputs)
            result = outputs.loss if self.last else self._made.take()
        self._received.hidden = None
        return result.to_local() if isinstance(result, DTensor) else result


@dataclass(frozen=True)
class Family:
    """How a family's base model names what a stage keeps or leaves out."""

    layers: str = "layers"
    norm: str = "norm"
    embeddings: list[str] = field(default_factory=lambda: ["embed_tokens"])
    positions: list[str] = field(default_factory=list)
    handed_on: str = ""
    """The module whose output goes into the first layer, where the embeddings are added before."""


def _family(base: torch.nn.Module) -> Family:
    """Raises LlmemError for a model whose parts are not known."""
    if all(hasattr(base, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return Family()
    if all(hasattr(base, name) for name in ("wte", "wpe", "drop", "h", "ln_f")):
        return Family("h", "ln_f", ["wte"], ["wpe"], "drop")
    raise LlmemError(
        f"{type(base).__name__} cannot be cut into stages to be measured: use a model of Llama's "
        "or GPT-2's layout"
    )


class Absent(torch.nn.Module):
    """What another stage has: passes on its first argument."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


class Made(Absent):
    """In place of the final norm: keeps what the last layer made, of which GPT-2 returns a view."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        self._hidden = hidden
        return hidden

    def take(self) -> Any:
        hidden, self._hidden = self._hidden, None
        return hidden


class Nothing(torch.nn.Module):
    """Position embeddings that an earlier stage has added."""

    def forward(self, *args: Any) -> torch.Tensor:
        return torch.zeros(())


class Received(torch.nn.Module):
    """Gives the stage's input to its first layer, in place of what was made of it."""

    hidden: Any = None

    def forward(self, made: Any) -> Any:
        return self.hidden


def _shallow(module: Any) -> Any:
    """A copy that shares everything, and whose children can be replaced."""
    new = copy(module)
    new._modules = dict(module._modules)
    return new
