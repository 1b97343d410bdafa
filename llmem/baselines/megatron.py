"""`megatron`: Megatron-LM's theoretical memory report, for its most loaded shard.

Source: `megatron/training/theoretical_memory_usage.py` (NVIDIA/Megatron-LM d98e8a6); activations
after Table 2 of Korthikanti et al. (arXiv 2205.05198). The report prints activations only where
sequence parallelism and selective recomputation are on; elsewhere it knows weights and optimizer
alone, and so does this. Training is bf16 with fp32 gradients, masters and Adam: 18 bytes per
parameter, of which the distributed optimizer (here: ZeRO-1 and above) shards 12.
"""

from __future__ import annotations

from llmem.baselines.base import Answer, BaselineInput, cannot
from llmem.baselines.dims import TransformerDims, dims_of

VOCAB_MULTIPLE = 128
"""`--make-vocab-size-divisible-by`: the vocabulary is padded to this times the TP degree."""

LEAVES_OUT = [
    "communication buffers, temporaries of the optimizer step, recomputation",
    "other precisions than bf16 with fp32 masters, other optimizers than Adam, LoRA",
    "allocator, CUDA context, NCCL",
]


def estimate(inp: BaselineInput) -> Answer:
    """Per-GPU bytes of the report: with activations where it prints a total, else without."""
    try:
        dims = dims_of(inp.model, inp.config)
    except ValueError as error:
        return cannot(str(error))
    vocab = padded_vocab(dims.vocab, inp.tp)
    states = weights_and_optimizer(dims, vocab, inp)
    parts = {"weights_and_optimizer": int(states)}
    leaves_out = list(LEAVES_OUT)
    # Megatron switches sequence parallelism off where tensors are not split.
    if inp.sp and inp.tp > 1 and not inp.gradient_checkpointing:
        parts["activations"] = int(activations(dims, vocab, inp))
    else:
        leaves_out.insert(0, "activations: reported only with sequence parallelism")
    return Answer(bytes=sum(parts.values()), parts=parts, leaves_out=leaves_out)


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rounded up to 128 x tp entries."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def weights_and_optimizer(d: TransformerDims, vocab: int, inp: BaselineInput) -> float:
    """Bytes of the most loaded shard: its layers, the embedding, and the head where it lies
    there."""
    attention = 2 * d.hidden * d.heads * d.head_dim * (1 + d.kv_heads / d.heads)
    mlp = 2 * d.hidden * (d.ffn * d.experts * (1.5 if d.gated else 1) + 2)
    block = (attention + mlp) * d.layers + 2 * d.hidden
    embedding = d.hidden * vocab
    head = embedding if not d.tied and inp.pp == 1 else 0
    shard = (block / inp.pp + embedding + head) / inp.tp
    per_parameter = 6 + 12 / inp.dp if inp.zero_stage >= 1 else 18
    return shard * per_parameter


def activations(d: TransformerDims, vocab: int, inp: BaselineInput) -> float:
    """Bytes of the first stage's activations, 1F1B with at least ``pp`` micro-batches in flight."""
    tokens = inp.seq * inp.batch
    layers = tokens * d.hidden * (18 + 4 * d.ffn / d.hidden) * d.layers
    embedding = (8 * tokens + tokens * d.hidden) * inp.pp
    head = tokens * d.hidden * 4 * (1 + vocab / d.hidden) if inp.pp == 1 else 0
    return (layers + embedding + head) / inp.tp
