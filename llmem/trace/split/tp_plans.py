"""torchtitan's tensor-parallel plan: torch's ``parallelize_module``, with sequence and loss parallel.

The styles are those that torchtitan gives Hugging Face models
(pytorch/torchtitan, experiments/transformers_modeling_backend/infra/parallelize.py at 03debc5,
``apply_non_moe_tp``): column-parallel q, k, v, gate and up, row-parallel o and down, a
vocabulary-parallel embedding and head. Under ``sp`` the residual stream [B, S/tp, H] and the norms
are sharded over the sequence, attention and MLP gather it, and their outputs are reduce-scattered.
Without ``sp`` norms stay plain tensors and outputs are all-reduced, as in torch's tutorial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.spec import RunSpec
from llmem.trace.split.tp_colossal import check_colossal
from llmem.trace.step import TrainingStep

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
OUTPUT = ("o_proj", "dense")
GATE = ("gate_proj", "fc1")
DOWN = ("down_proj", "fc2")
FINAL_NORM = ("norm", "final_layernorm")
"""Names of the layers that torchtitan's plan looks for, in its order of preference."""

SANDWICH = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}
"""Norms whose output is added to the residual stream, if the layer has the second (Gemma 2, 3)."""


def check_tp_plan(spec: RunSpec) -> None:
    """Raises LlmemError if the options of the plan contradict each other or the run."""
    asked = "--sp" if spec.sp else "--loss-parallel" if spec.loss_parallel else None
    if asked and spec.tp == 1:
        raise LlmemError(f"{asked} shards over tensor-parallel ranks; add --tp N")
    if spec.tp > 1 and spec.tp_plan == "megatron":
        _check_megatron(spec)
    elif asked and spec.tp_plan != "torchtitan":
        why = "has no sequence parallelism" if spec.sp else "gathers the logits"
        whose = "transformers' tp_plan" if spec.tp_plan == "transformers" else "Colossal-AI's plan"
        raise LlmemError(f"{whose} {why}; add --tp-plan torchtitan to {asked}")
    check_colossal(spec)
    if spec.loss_parallel and (spec.loss != "full" or spec.liger):
        raise LlmemError(
            "--loss-parallel splits torch's cross-entropy of all tokens; use --loss full "
            "without --liger"
        )
    if spec.sp and spec.seq_length % spec.tp:
        raise LlmemError(
            f"--sp cannot split {spec.seq_length} tokens over {spec.tp} ranks (torchtitan refuses "
            f"it); give --seq-length a multiple of {spec.tp}"
        )
    if spec.sp and spec.padding:
        raise LlmemError(
            "--sp trains full sequences without an attention mask, as torchtitan does; leave "
            "--padding out"
        )


def _check_megatron(spec: RunSpec) -> None:
    if spec.loss_parallel:
        raise LlmemError("--tp-plan megatron always splits the loss; leave --loss-parallel out")
    if spec.bf16 or spec.fp16:
        raise LlmemError(
            "--tp-plan megatron computes in the dtype of the parameters, without autocast; give "
            "--param-dtype bf16 in place of --bf16"
        )
    if spec.loss != "full" or spec.liger:
        raise LlmemError("--tp-plan megatron brings its own loss; leave --loss and --liger out")
    if spec.strategy not in ("none", "ddp", "megatron"):
        raise LlmemError(
            f"--tp-plan megatron with --strategy {spec.strategy} is not supported; use megatron, "
            "ddp or none"
        )
    if spec.pp > 1 and spec.strategy != "megatron":
        raise LlmemError(
            f"--tp-plan megatron with --pp and --strategy {spec.strategy} is not supported; use "
            "--strategy megatron"
        )


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Anatomy:
    """Names of the parts of a decoder, from the model's root."""

    embedding: str
    layers: list[str]
    norm: str
    head: str


def parallelize(model: torch.nn.Module, spec: RunSpec, mesh_of: Callable[[], Any]) -> str:
    """Carry the plan out on ``model`` over a mesh of ``spec.tp``; returns a sentence about it.

    Raises LlmemError for a model whose layers the plan does not know or that cannot be cut.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    anatomy = _anatomy(model)
    check_heads(model, spec)
    _check_sizes(model, anatomy, spec)
    if spec.sp:
        _check_masks(model)
    mesh = mesh_of()
    # Each rank keeps its own part; torch 2.6 has no such choice and sends rank 0's, before the step.
    known = "src_data_rank" in signature(parallelize_module).parameters
    sent: dict[str, Any] = {"src_data_rank": None} if known else {}
    parallelize_module(model, mesh, _root_plan(anatomy, spec), **sent)
    for name in anatomy.layers:
        layer = model.get_submodule(name)
        parallelize_module(layer, mesh, _layer_plan(layer, sp=spec.sp), **sent)
    if spec.sp:
        model.register_forward_pre_hook(_full_positions, with_kwargs=True)
    stream = "norms and residual stream sharded over the sequence" if spec.sp else "norms whole"
    logits = "logits sharded (loss_parallel)" if spec.loss_parallel else "logits gathered"
    return (
        f"tensor parallelism: torchtitan's plan of {type(model).__name__} on {spec.tp} ranks "
        f"({stream}, {logits}), every rank of them on the same batch"
    )


def _root_plan(anatomy: _Anatomy, spec: RunSpec) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    stream = Shard(1) if spec.sp else Replicate()
    plan: dict[str, Any] = {
        anatomy.embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        anatomy.head: ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if spec.loss_parallel else Replicate(),
            use_local_output=not spec.loss_parallel,
        ),
    }
    if spec.sp:
        plan[anatomy.norm] = SequenceParallel()
    return plan


def _layer_plan(layer: torch.nn.Module, *, sp: bool) -> dict[str, Any]:
    """Styles of one decoder layer, by the names of its parts."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    stream = Shard(1) if sp else Replicate()
    columns = [f"self_attn.{name}" for name in QUERY_KEY_VALUE]
    ups = (_first(mlp, GATE), "up_proj")
    columns += [f"mlp.{name}" for name in ups if name and hasattr(mlp, name)]
    rows = [f"self_attn.{_first(attention, OUTPUT)}", f"mlp.{_first(mlp, DOWN)}"]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in rows}
    if hasattr(attention, "q_norm") and hasattr(attention, "k_norm"):  # over this rank's heads
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if not sp:
        return plan
    for name in _norms(layer):
        added = name in SANDWICH and hasattr(layer, SANDWICH[name])
        plan[name] = SequenceParallel(use_local_output=added)
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": stream},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    return plan


def _full_positions(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positions of the whole sequence, and no mask (torchtitan's ``HFTransformerModel.forward``).

    The model would count them, and size a mask, by its local part of the embeddings. Positions that
    come with the batch stay (context parallelism's, which are not 0, 1, 2).
    """
    ids = kwargs["input_ids"]
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    kwargs.pop("attention_mask", None)
    return args, kwargs


# -- what the plan needs of a model ----------------------------------------------------------------


def _check_masks(model: torch.nn.Module) -> None:
    """From 4.53 on, and as long as models took ``cache_position``, masks had the embeddings' length.

    transformers/masking_utils.py, ``_preprocess_mask_arguments``: that of the rank's part, under sp.
    """
    counts = "cache_position" in signature(model.forward).parameters
    if counts and find_spec("transformers.masking_utils") is not None:
        raise LlmemError(
            f"transformers {installed('transformers')} sizes the masks of {type(model).__name__} by "
            "the rank's part of the sequence, which --sp cannot train with; install 5.24 or later, or "
            "leave --sp out"
        )


def _anatomy(model: Any) -> _Anatomy:
    names = {id(module): name for name, module in model.named_modules()}
    layers = [name for name, module in model.named_modules() if _is_decoder_layer(module)]
    base = layers[0].rsplit(".", 2)[0] if layers else ""
    parent = model.get_submodule(base)
    norm = _first(parent, FINAL_NORM)
    ends = [
        names.get(id(getattr(model, getter, lambda: None)()))
        for getter in ("get_input_embeddings", "get_output_embeddings")
    ]
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if not layers or norm is None or None in ends or len(layers) != expected:
        raise LlmemError(
            f"torchtitan's tensor-parallel plan does not know {type(model).__name__}, which is no "
            "decoder of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj with a "
            "head; use --tp-plan transformers, or leave --tp out"
        )
    embedding, head = (str(name) for name in ends)
    return _Anatomy(embedding, layers, f"{base}.{norm}".lstrip("."), head)


def _is_decoder_layer(module: torch.nn.Module) -> bool:
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if not isinstance(attention, torch.nn.Module) or not isinstance(mlp, torch.nn.Module):
        return False
    parts = [getattr(attention, name, None) for name in QUERY_KEY_VALUE]
    parts += [getattr(attention, _first(attention, OUTPUT) or "", None)]
    parts += [getattr(mlp, _first(mlp, names) or "", None) for names in (GATE, DOWN)]
    return all(isinstance(part, torch.nn.Linear) for part in parts)


def _first(module: torch.nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if hasattr(module, name)), None)


def _norms(layer: torch.nn.Module) -> list[str]:
    """Names of the norms among a layer's own parts."""
    return [name for name, _ in layer.named_children() if name.endswith("norm")]


def check_heads(model: Any, spec: RunSpec) -> None:
    """Raises LlmemError if ranks would get parts of heads, with which attention cannot compute."""
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % spec.tp:
            raise LlmemError(
                f"--tp {spec.tp} cannot split {type(model).__name__}'s {heads} {what}: "
                f"{spec.tp_plan} gives every rank whole heads of its own; use a divisor of both "
                "numbers of heads"
            )


def _check_sizes(model: Any, anatomy: _Anatomy, spec: RunSpec) -> None:
    """Raises LlmemError where the plan's local outputs would not fit together."""
    config = model.config
    mlp = model.get_submodule(f"{anatomy.layers[0]}.mlp")
    inner = getattr(mlp, _first(mlp, DOWN) or "").in_features
    if inner % spec.tp:
        raise LlmemError(
            f"--tp {spec.tp} cannot split {type(model).__name__}'s {inner} columns of the MLP: "
            "parallelize_module's local outputs must be equal; use a divisor"
        )
    if not spec.sp:
        return
    attention = getattr(config, "_attn_implementation", "sdpa")
    if attention == "eager":
        raise LlmemError(
            "--sp leaves no mask for eager attention, as torchtitan calls the model; use "
            "--attn-implementation sdpa"
        )
    window = getattr(config, "sliding_window", None)
    slides = getattr(config, "use_sliding_window", True)
    if window is not None and slides and spec.seq_length > window:
        raise LlmemError(
            f"--sp leaves no mask for a sliding window of {window} tokens; give --seq-length "
            f"{window} or less"
        )


# -- the step --------------------------------------------------------------------------------------


class LossParallelStep(TrainingStep):
    """A step whose cross-entropy works on sharded logits, forward and backward."""

    def _micro_batch(self, mine: Callable[[Any], Any], *, first: bool) -> None:
        from torch.distributed.tensor.parallel import loss_parallel

        sharded_loss = loss_parallel()
        sharded_loss.__enter__()
        try:
            super()._micro_batch(mine, first=first)
        finally:  # loss_parallel itself would not clean up after an error
            sharded_loss.__exit__(None, None, None)


def step_class(spec: RunSpec) -> type[TrainingStep]:
    """The class of the training step of ``spec``."""
    return LossParallelStep if spec.loss_parallel else TrainingStep
