"""`llmem-code`: what LLMem's released code computes, without its GPU.

Source: `size_estimator.py` of github.com/taehokim20/LLMem (HEAD 3d289b4). It differs from the
paper: every tensor is rounded up to a 2 MiB page, biases are charged like weights, the backward
gathers of tensor parallelism cover all layers but one, and the chunks are not computed but measured
as part of the base. There, a live model on a GPU is needed; here the chain of modules is read from
shapes, and the base (context, NCCL, Gemini's chunks) is modelled unless it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmem.baselines import gemini_chunks, llmem_layout
from llmem.baselines.base import MIB, Answer, BaselineInput, cannot
from llmem.baselines.dims import dims_of, layer_stack

if TYPE_CHECKING:
    from torch import nn

PAGE = 2 * MIB
FP16, FP32, INT64 = 2, 4, 8
PROBE_BATCH = 2
"""The code measures its input on a probe of two sequences, whatever the real batch is."""

LEAVES_OUT = [
    "the working set of the layer that is recomputed in backward",
    "attention other than checkpointed layers' outputs, LoRA, quantisation, bf16, fused losses",
    "the caching allocator: every tensor is rounded to 2 MiB instead",
    "FSDP and ZeRO-3 free layers that Gemini keeps gathered",
]


@dataclass(frozen=True)
class Chain:
    """What the code records when it pushes a probe through Embedding and Linear modules.

    ``tables`` are the elements of the charged tensors, the head's last one at the end; ``outputs``
    the features of the recorded outputs; ``gathers`` those of the backward all-gathers; ``head``
    the features of the output that the code takes for the logits.
    """

    tables: tuple[int, ...]
    outputs: tuple[int, ...]
    gathers: tuple[int, ...]
    head: int
    finds_linears: bool


def chain_of(model: Any, config: Any) -> Chain:
    """The chain, from shapes: embedding output twice, the hidden state at every layer boundary,
    head.

    A model with a `project_out` in front of its head (OPT-350m) has that output as its last one.
    Where the layers hold no Linear (GPT-2's Conv1D), the code skips the head as it skips the first
    Linear of every block, and so takes the last layer boundary for the logits; this is repeated
    here.
    """
    embedding = int(model.get_input_embeddings().weight.shape[1])
    hidden, layers = dims_of(model, config).hidden, layer_stack(model)
    boundaries = (hidden,) * (len(layers) - 1)
    tables = tuple(
        p.numel() for m in model.modules() if llmem_layout.is_table(m) for p in m.parameters()
    )
    projection = _width_of(model, "project_out")
    if not any(llmem_layout.is_linear(m) for layer in layers for m in layer.modules()):
        outputs = (embedding, embedding, *boundaries)
        return Chain(tables, outputs[:-1], boundaries[:-1], outputs[-1], finds_linears=False)
    last = projection or (boundaries or (embedding,))[-1]
    return Chain(
        tables=tables,
        outputs=(embedding, embedding, *boundaries, last),
        gathers=(*boundaries, projection) if projection else boundaries,
        head=int(model.get_output_embeddings().weight.shape[0]),
        finds_linears=True,
    )


def estimate(inp: BaselineInput) -> Answer:
    """Bytes per GPU as the released code would add them up."""
    why = llmem_layout.cannot_express(inp.model, inp.config)
    if why:
        return cannot(why)
    method = llmem_layout.method_of(inp.zero, inp.gpus, inp.tp)
    if method is None:
        return cannot("LLMem has no form for ZeRO-1 and ZeRO-2")
    # Plain data parallelism is a full replica on every GPU: the code's single-GPU form.
    gpus = 1 if method == "CDP" else inp.gpus
    tp = inp.tp if inp.tp > 1 else 0
    chain = chain_of(inp.model, inp.config)
    parts = {
        "gathered_parameters": gathered_bytes(chain, gpus, tp),
        "optimizer_states": optimizer_bytes(chain, gpus),
        "input": page(PROBE_BATCH * inp.seq * INT64),
        "outputs": sum(page(inp.batch * inp.seq * f * FP16) for f in chain.outputs),
        "lm_head": head_bytes(chain, inp),
        "backward_gathers": back_bytes(chain, inp.batch, inp.seq, tp),
    }
    without_base = sum(parts.values())
    chunk_elements, chunk_bytes = chunks_of(inp.model, gpus, max(tp, 1))
    leaves_out = list(LEAVES_OUT)
    if not chain.finds_linears:
        leaves_out.append("the layers' weights and the logits: the code finds no Linear here")
    return Answer(
        bytes=inp.m_base + chunk_bytes + without_base,
        parts={
            "estimate_without_base": without_base,
            "chunk_elements": chunk_elements,
            **parts,
            "m_base": inp.m_base,
            "chunks": chunk_bytes,
        },
        leaves_out=leaves_out,
    )


def page(size: float) -> int:
    """``size`` bytes rounded up to 2 MiB; the code keeps fractions of a byte until here."""
    whole = int(size / PAGE) * PAGE
    return whole if size % PAGE == 0 else whole + PAGE


def gathered_bytes(chain: Chain, gpus: int, tp: int) -> int:
    """fp16 parameters that the other ranks hold and that are gathered here, per tensor.

    The factor of DP+TP is the code's; the true one would be 1/tp - 1/gpus.
    """
    if gpus == 1 or tp == gpus:
        return 0
    share = [page(n * FP16) for n in chain.tables[:-1]]
    if not tp:
        return sum(page(b * (gpus - 1) / gpus) for b in share)
    return sum(page(b * ((gpus - tp) / gpus - 1 / gpus)) for b in share)


def optimizer_bytes(chain: Chain, gpus: int) -> int:
    """Adam's two fp32 moments of every charged tensor but the last, each tensor divided by
    ``gpus``."""
    return sum(2 * page(n * FP32 / gpus) for n in chain.tables[:-1])


def head_bytes(chain: Chain, inp: BaselineInput) -> int:
    """Logits, their shifted copy and the log-softmax, and the last tensor in fp16 (``lm_p``)."""
    width = llmem_layout.logits_bytes(inp.name, inp.config)
    logits = page(inp.batch * inp.seq * chain.head * width)
    shifted = page(inp.batch * (inp.seq - 1) * chain.head * width)
    return logits + 2 * shifted + page(chain.tables[-1] * FP16)


def back_bytes(chain: Chain, batch: int, seq: int, tp: int) -> int:
    """Backward all-gathers of tensor parallelism: one per recorded layer, as if all lived
    together."""
    if not tp:
        return 0
    return sum(page(batch * seq * f * FP16 * (tp - 1) / tp) for f in chain.gathers)


def chunks_of(model: nn.Module, gpus: int, tp: int) -> tuple[int, int]:
    """Gemini's chunk size in elements, and the bytes of all chunks on one rank (fp16 and fp32).

    The code measures these bytes as part of its base, so each buffer has the 2 MiB rounding that
    the allocator gives to large blocks. One rank holds 1/dp of every chunk.
    """
    dp = max(1, gpus // tp)
    numels = llmem_layout.local_numels(llmem_layout.parameters(model), tp)
    size = gemini_chunks.search_chunk_size(numels, dp_degree=dp)
    shards = [c.elements // dp for c in gemini_chunks.assign_chunks(numels, size, dp)]
    return size, sum(page(n * FP16) + page(n * FP32) for n in shards)


def _width_of(model: nn.Module, ending: str) -> int:
    """Output features of the module whose name ends so, or 0."""
    for name, module in model.named_modules():
        if name.endswith(ending):
            return int(module.weight.shape[0])
    return 0
