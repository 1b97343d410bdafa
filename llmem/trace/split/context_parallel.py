"""Context parallelism: each rank trains on its part of every sequence.

``allgather`` and ``ring`` are torch's own ``context_parallel`` (torch/distributed/tensor/
experimental/_context_parallel/_attention.py), set up as transformers' Trainer and accelerate do:
the batch is cut along the sequence, SDPA becomes a loop over the key and value blocks of all ranks
whose partial outputs are merged in fp32 by their log-sum-exp, and backward passes fp32 gradients
of keys and values around. Blocks come from one all-gather (``set_rotate_method("allgather")``) or
go from rank to rank (``"alltoall"``). torch's code itself runs, on meta in a process group that
talks to nobody. ``ulysses`` is in ``llmem.trace.split.ulysses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.batch import Batch, task_of
from llmem.trace.split.process_group import MeshOf
from llmem.trace.split.ulysses import UlyssesAttention, check_heads
from llmem.trace.step import TrainingStep

aten = torch.ops.aten
ROTATE_METHODS = {"allgather": "allgather", "ring": "alltoall"}
"""``--cp-comm`` -> what ``set_rotate_method`` takes."""


def check_context_parallel(spec: RunSpec) -> None:
    """Raises LlmemError if ``spec.cp`` ranks cannot share this run's sequences."""
    if spec.cp == 1:
        return
    plan = spec.tp > 1 and spec.tp_plan not in ("transformers", "torchtitan")
    for option, given in (
        (f"--tp-plan {spec.tp_plan}", plan), ("--packed", spec.packed),
        ("--padding", spec.padding), ("--task generate", spec.task == "generate"),
    ):  # fmt: skip
        if given:
            raise LlmemError(f"--cp with {option} is not supported; leave one of them out")
    if spec.seq_length % spec.cp:
        raise LlmemError(
            f"--cp {spec.cp} cannot cut {spec.seq_length} tokens evenly; give --seq-length a "
            f"multiple of {2 * spec.cp}"
        )
    if spec.sp and spec.seq_length % (spec.cp * spec.tp):
        raise LlmemError(
            f"--sp cannot split the {spec.seq_length // spec.cp} tokens of a rank of --cp {spec.cp} "
            f"over {spec.tp} ranks; give --seq-length a multiple of {2 * spec.cp * spec.tp}"
        )
    if spec.cp_comm != "ulysses" and spec.attn_implementation not in (None, "sdpa"):
        raise LlmemError(
            f"torch's context parallelism replaces SDPA (Trainer refuses "
            f"{spec.attn_implementation}); use --attn-implementation sdpa or --cp-comm ulysses"
        )


def split_sequences(step: TrainingStep, spec: RunSpec, notes: list[str], mesh_of: MeshOf) -> None:
    """Let ``step`` train on this rank's part of each batch, among the ranks of ``rank_mesh``.

    Raises LlmemError for models whose attention cannot be split.
    """
    model: Any = step.model
    _check_model(model, spec)
    mesh = mesh_of()["cp"]
    each = spec.seq_length // spec.cp
    if spec.cp_comm == "ulysses":
        check_heads(model.config.get_text_config(), spec.cp, spec.tp)
        step.micro_batch_context = partial(_ulysses, model.config._attn_implementation, mesh, spec)
        notes.append(
            f"context parallelism: Ulysses on {spec.cp} ranks as DeepSpeed's UlyssesSPAttentionHF, "
            f"{each} tokens of every sequence on each, all of them for 1/{spec.cp} of the heads in "
            "attention; the loss is each rank's own"
        )
        return
    _masks_become_causal(model)
    step.micro_batch_context = partial(_torch_context, mesh, spec)
    balanced = spec.seq_length % (2 * spec.cp) == 0
    notes.append(
        f"context parallelism: torch's context_parallel on {spec.cp} ranks, rotate method "
        f"{ROTATE_METHODS[spec.cp_comm]}, {each} tokens of every sequence on each "
        f"({'head and tail parts, balanced' if balanced else 'one part, not balanced'}), inputs as "
        "Trainer makes them (position_ids and shift_labels), attention causal without a mask"
    )


def _check_model(model: Any, spec: RunSpec) -> None:
    config = getattr(model, "config", None)
    name = type(model).__name__
    other = getattr(config, "is_encoder_decoder", False) or name.endswith("ForMaskedLM")
    if config is None or other or task_of(model):
        raise LlmemError(f"--cp is for causal language models, which {name} is not; leave --cp out")
    text = config.get_text_config()
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (("sdpa",) if spec.cp_comm != "ulysses" else ("sdpa", "flash_attention_2")):
        raise LlmemError(f"--cp {spec.cp} cannot split {attention} attention of {name}; use sdpa")
    # As accelerate's _attach_context_parallel_hooks: masks that are no more than causal.
    types = set(getattr(text, "layer_types", None) or ())
    if not types and getattr(text, "sliding_window", None):
        types = {"sliding_attention"}
    if others := sorted(types - {"full_attention"}):
        raise LlmemError(
            f"--cp splits full causal attention alone and {name} has {', '.join(others)} (accelerate "
            "refuses it); leave --cp out"
        )


def _masks_become_causal(model: torch.nn.Module) -> None:
    """``is_causal`` in place of a mask, as accelerate's ``_attach_context_parallel_hooks``."""

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
            kwargs["is_causal"] = True
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


# -- a micro-batch ---------------------------------------------------------------------------------


def trainer_inputs(batch: Batch) -> Batch:
    """``batch`` [B, S] with position_ids and labels that are shifted before they are cut.

    transformers/trainer.py, ``_prepare_context_parallel_inputs``.
    """
    ids = batch["input_ids"]
    if "labels" in batch:
        padded = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)
        batch["shift_labels"] = padded[:, 1:].contiguous()
    batch["position_ids"] = torch.arange(ids.size(1), device=ids.device).repeat(ids.size(0), 1)
    return batch


@contextmanager
def _torch_context(mesh: Any, spec: RunSpec) -> Iterator[Callable[[Batch], Batch]]:
    """Around forward and backward of a micro-batch; yields what cuts its batch, in place."""
    from torch.distributed.tensor.experimental import context_parallel

    set_rotate_method = torch_loop().set_rotate_method
    with ExitStack() as stack:

        def cut(batch: Batch) -> Batch:
            buffers = list(trainer_inputs(batch).values())
            dims, kept = [1] * len(buffers), set(buffers)
            stack.enter_context(
                context_parallel(
                    mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept
                )
            )
            return batch

        set_rotate_method(ROTATE_METHODS[spec.cp_comm])
        stack.callback(set_rotate_method, "allgather")
        stack.enter_context(ring_around_cpu_kernel())
        yield cut


@contextmanager
def _ulysses(attention: str, mesh: Any, spec: RunSpec) -> Iterator[Callable[[Batch], Batch]]:
    """Around forward and backward of a micro-batch; yields what takes this rank's part of it.

    DeepSpeed's UlyssesSPDataLoaderAdapter cuts on the host; labels are the shifted ones
    (transformers' ``deepspeed_sp_compute_loss``).
    """

    def cut(batch: Batch) -> Batch:
        whole = trainer_inputs(batch)
        whole.pop("labels", None)
        parts = {
            name: tensor.chunk(spec.cp, dim=1)[mesh.get_local_rank()].clone()
            for name, tensor in whole.items()
        }
        return parts | {"labels": parts["shift_labels"]}

    with UlyssesAttention(mesh.get_group(), spec.cp).in_place_of(attention):
        yield cut


# -- torch's ring ----------------------------------------------------------------------------------


def torch_loop() -> Any:
    """The module of torch's loop over blocks, which is private. Raises LlmemError if it is not there."""
    try:
        return import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    except ImportError:
        raise LlmemError(
            f"torch {torch.__version__} does not have context_parallel where 2.13 has it; install "
            "torch 2.13"
        ) from None


@contextmanager
def ring_around_cpu_kernel() -> Iterator[None]:
    """Let torch's loop over blocks also run around flash attention's CPU kernel.

    torch registers it for the kernels of GPUs alone; the loop is the same, and so is what it
    allocates. This is what lets processes without a GPU show that the trace is right.
    """
    torch_cp = torch_loop()

    handlers: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_backward,
    }
    added = [op for op in handlers if op not in torch_cp.custom_ops]
    torch_cp.custom_ops.update({op: handlers[op] for op in added})
    try:
        yield
    finally:
        for op in added:
            torch_cp.custom_ops.pop(op)


def _cpu_forward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(output, log-sum-exp) of ``_scaled_dot_product_flash_attention_for_cpu`` on DTensors."""
    torch_cp = torch_loop()

    mesh = args[0].device_mesh
    query, key, value = (_local(arg) for arg in args[:3])
    dropout_p = args[3] if len(args) > 3 else 0.0
    is_causal = len(args) > 4 and args[4]
    out = torch_cp._templated_ring_attention(
        mesh.get_group(), 2, aten._scaled_dot_product_flash_attention_for_cpu,
        query=query, key=key, value=value, is_causal=is_causal, dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )  # fmt: skip
    return tuple(_sharded(tensor, mesh) for tensor in out)


def _cpu_backward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(grad_query, grad_key, grad_value) of the same."""
    torch_cp = torch_loop()

    mesh = args[0].device_mesh
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    given = dict(zip(names, (_local(arg) for arg in args), strict=True))
    gradients = torch_cp._templated_ring_attention_backward(
        mesh.get_group(), 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad_out_name="grad_out", scale=kwargs.get("scale"), **given,
    )  # fmt: skip
    return tuple(_sharded(tensor, mesh) for tensor in gradients)


def _local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)


def _sharded(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False)


@contextmanager
def sent_blocks_wait() -> Iterator[None]:
    """A block that is sent lives until its collective is waited for, as NCCL's are.

    ProcessGroupNCCL keeps the tensors of an asynchronous collective until ``wait`` (torch 2.8 on;
    before, ``record_stream`` kept their blocks as long).
    """
    torch_cp = torch_loop()

    with ExitStack() as stack:
        for rotater in (torch_cp._AllGatherRotater, torch_cp._AllToAllRotater):
            for name, replacement in _holding(rotater).items():
                stack.callback(setattr, rotater, name, getattr(rotater, name))
                setattr(rotater, name, replacement)
        yield


def _holding(rotater: Any) -> dict[str, Callable[..., Any]]:
    exchange, following = rotater.exchange_buffers, rotater.next_buffer

    def exchange_buffers(self: Any, curr_buffer: torch.Tensor) -> None:
        self.sent = curr_buffer
        exchange(self, curr_buffer)

    def next_buffer(self: Any) -> torch.Tensor:
        self.sent = None
        return following(self)  # type: ignore[no-any-return]

    return {"exchange_buffers": exchange_buffers, "next_buffer": next_buffer}
