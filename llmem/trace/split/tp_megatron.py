"""Megatron-LM's tensor parallelism on transformers' decoders: ``--tp-plan megatron``, with ``--sp``.

Column-parallel q, k, v, gate and up, row-parallel o and down, a vocabulary-parallel embedding and
head, and a cross-entropy that leaves the logits split (``llmem.trace.split.megatron_functions``). Between
them the layers are transformers' own: q, k and v are three layers where Megatron has one, and its
fused kernels for attention, activations and bias-dropout-add are not here. Vocabularies are padded
to a multiple of 128 x tp (``_vocab_size_with_padding``). Under ``--sp`` the residual stream is
[B, S/tp, H]; the all-reduce of the norms' gradients, which flattens a few MB, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.split import tp_plans
from llmem.trace.split.megatron_functions import (
    MAKE_VOCAB_SIZE_DIVISIBLE_BY,
    Linear,
    Ranks,
    ReduceOutput,
    Scatter,
    VocabParallelCrossEntropy,
    embed,
)

IGNORED = -100
"""Label of a token that has no loss, in transformers."""


def parallelize(model: torch.nn.Module, spec: RunSpec, mesh_of: Callable[[], Any]) -> str:
    """Cut the layers of ``model`` for this rank; returns a sentence about it.

    A model with a method ``over_ranks`` cuts itself. Raises LlmemError for one whose layers are not
    known or that cannot be cut.
    """
    if next(model.parameters()).device.type != "meta":
        raise LlmemError(
            "--tp-plan megatron cannot be run here: Megatron-LM trains with code of its own; use "
            "`llmem estimate`"
        )
    mesh = mesh_of()
    name = mesh.get_group().group_name
    ranks = Ranks(mesh.size(), mesh.get_local_rank(), name, spec.sp)
    if (over := getattr(model, "over_ranks", None)) is not None:
        return str(over(ranks))
    tp_plans.check_heads(model, spec)
    of_gpt2 = model.config.model_type == "gpt2"  # type: ignore[union-attr]
    (_cut_gpt2 if of_gpt2 else _cut_llama)(model, ranks)
    whole: Any = model
    whole.loss_function = partial(_loss, ranks)
    if spec.sp:
        model.register_forward_pre_hook(tp_plans._full_positions, with_kwargs=True)
    stream = "residual stream split over the sequence" if spec.sp else "residual stream whole"
    return (
        f"tensor parallelism: Megatron-LM's column- and row-parallel layers in "
        f"{type(model).__name__} on {spec.tp} ranks ({stream}, logits and loss split over the "
        "vocabulary, no fused kernels), every rank of them on the same batch"
    )


# -- models ----------------------------------------------------------------------------------------


def _cut_llama(model: torch.nn.Module, ranks: Ranks) -> None:
    """Decoders of q_proj, k_proj, v_proj, o_proj and an MLP (Llama, Qwen, Mistral, Gemma, Phi)."""
    anatomy = tp_plans._anatomy(model)
    for name in anatomy.layers:
        layer: Any = model.get_submodule(name)
        attention, mlp = layer.self_attn, layer.mlp
        for part in tp_plans.QUERY_KEY_VALUE:
            _column(getattr(attention, part), ranks, stand_in=ranks.sequence)
        if ranks.sequence:
            attention.register_forward_pre_hook(partial(_stand_in, ranks), with_kwargs=True)
            attention.register_forward_hook(partial(_forget, ranks))
        _row(getattr(attention, tp_plans._first(attention, tp_plans.OUTPUT) or ""), ranks)
        for up in (tp_plans._first(mlp, tp_plans.GATE), "up_proj"):
            if up and hasattr(mlp, up):
                _column(getattr(mlp, up), ranks)
        _row(getattr(mlp, tp_plans._first(mlp, tp_plans.DOWN) or ""), ranks)
    embedding: Any = model.get_submodule(anatomy.embedding)
    head: Any = model.get_submodule(anatomy.head)
    _vocabulary(embedding, head, ranks)
    embedding.forward = partial(_embed, embedding, embedding.forward, ranks)


def _cut_gpt2(model: Any, ranks: Ranks) -> None:
    """GPT-2, whose positions are added to whole embeddings, and whose q, k and v are one layer."""
    base = model.transformer
    for layer in base.h:
        attention, mlp = layer.attn, layer.mlp
        _column(attention.c_attn, ranks)
        attention.split_size //= ranks.degree
        _row(attention.c_proj, ranks)
        _column(mlp.c_fc, ranks)
        _row(mlp.c_proj, ranks)
    _vocabulary(base.wte, model.lm_head, ranks, stand_in=ranks.sequence)
    whole = Ranks(ranks.degree, ranks.rank, ranks.group, sequence=False)
    base.wte.forward = partial(_embed, base.wte, base.wte.forward, whole)
    if ranks.sequence:
        base.drop.register_forward_pre_hook(lambda _, args: (Scatter.apply(args[0], ranks),))
        base.ln_f.register_forward_hook(lambda _, args, output: _shape_of_whole(ranks, output))
        model.lm_head.register_forward_hook(partial(_forget, ranks))


def _stand_in(ranks: Ranks, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Attention asks its input for the number of tokens, which is not this rank's part's."""
    return args, {**kwargs, "hidden_states": _shape_of_whole(ranks, kwargs["hidden_states"])}


def _forget(ranks: Ranks, *_: Any) -> None:
    ranks.local = None


def _shape_of_whole(ranks: Ranks, part: torch.Tensor) -> torch.Tensor:
    """A tensor of the whole sequence's shape without memory; ``part`` waits for the next layers."""
    ranks.local = part
    batch, tokens, width = part.shape
    return part.detach().as_strided((batch, tokens * ranks.degree, width), (0, 0, 1))


# -- layers ----------------------------------------------------------------------------------------


def _column(layer: Any, ranks: Ranks, *, stand_in: bool = False) -> None:
    """Cut along the outputs; the parameter becomes [out / tp, in] (Conv1D has it transposed)."""
    whole = _outputs_first(layer)
    layer.weight = _part(whole, 0, ranks, layer)
    if layer.bias is not None:
        layer.bias = _part(layer.bias.detach(), 0, ranks, layer)
    layer.forward = partial(_column_forward, layer, ranks, stand_in)


def _column_forward(layer: Any, ranks: Ranks, stand_in: bool, x: torch.Tensor) -> torch.Tensor:
    given = ranks.local if stand_in else x
    return Linear.apply(given, layer.weight, layer.bias, ranks, True)  # type: ignore[no-any-return]


def _row(layer: Any, ranks: Ranks) -> None:
    """Cut along the inputs; the bias stays whole and is added after the reduction."""
    layer.weight = _part(_outputs_first(layer), 1, ranks, layer)
    layer.forward = partial(_row_forward, layer, ranks)


def _row_forward(layer: Any, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = Linear.apply(x, layer.weight, None, ranks, False)
    output = ReduceOutput.apply(output, ranks)
    return output if layer.bias is None else output + layer.bias


def _vocabulary(embedding: Any, head: Any, ranks: Ranks, *, stand_in: bool = False) -> None:
    """Pad the vocabulary, and give embedding and head this rank's words; tied ones stay tied."""
    multiple = MAKE_VOCAB_SIZE_DIVISIBLE_BY * ranks.degree
    tied = embedding.weight is head.weight
    for layer in (embedding, head):
        words, width = layer.weight.shape
        padded = -(-words // multiple) * multiple
        weight = torch.nn.Parameter(layer.weight.new_empty(padded // ranks.degree, width))
        weight.sharded_dimension = (0, padded)  # type: ignore[attr-defined]
        layer.weight = weight
    if tied:
        head.weight = embedding.weight
    head.forward = partial(_column_forward, head, ranks, stand_in)


def _embed(
    layer: Any, forward: Callable[..., Any], ranks: Ranks, ids: torch.Tensor
) -> torch.Tensor:
    """The embedding of the whole vocabulary, and what the model's own class does with it."""
    scale = getattr(layer, "embed_scale", None)
    output: torch.Tensor = ReduceOutput.apply(embed(ids, layer.weight, ranks), ranks)
    return output if scale is None else output * scale.to(output.dtype)


def _outputs_first(layer: Any) -> torch.Tensor:
    whole: torch.Tensor = layer.weight.detach()
    return whole if isinstance(layer, torch.nn.Linear) else whole.t()


def _part(whole: torch.Tensor, dim: int, ranks: Ranks, layer: Any) -> torch.nn.Parameter:
    size = whole.shape[dim]
    if size % ranks.degree:
        raise LlmemError(
            f"--tp {ranks.degree} cannot split the {size} {'inputs' if dim else 'outputs'} of a "
            f"{type(layer).__name__}: Megatron-LM gives every rank equal parts; use a divisor"
        )
    rows = size // ranks.degree
    mine = whole.narrow(dim, ranks.rank * rows, rows)
    parameter = torch.nn.Parameter(mine.clone(memory_format=torch.contiguous_format))
    parameter.sharded_dimension = (dim, size)  # type: ignore[attr-defined]
    return parameter


def _loss(
    ranks: Ranks, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Mean loss of the next tokens; logits [B, S, V/tp], labels [B, S]."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    mask = (shifted != IGNORED).float()
    losses: torch.Tensor = VocabParallelCrossEntropy.apply(logits, shifted, ranks)
    return (losses.view(-1) * mask.view(-1)).sum() / mask.sum()
