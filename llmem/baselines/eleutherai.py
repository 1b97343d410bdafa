"""`eleutherai`: the transformer memory calculator of EleutherAI's cookbook, as it is and repaired.

Source: `calc/calc_transformer_mem.py` of github.com/EleutherAI/cookbook (827ee3b), which cites ZeRO
(arXiv 1910.02054) for states and Korthikanti et al. (arXiv 2205.05198) for activations. It divides
by `num_gpus` what tensor and pipeline parallelism have already divided, so that weights are sharded
twice under ZeRO-3, and leaves gradients and optimizer states whole on TP and PP ranks otherwise;
its `dp_degree` is computed and never used. `eleutherai-fixed` divides states by TP x PP, then by
dp. The sizes that its command line asks for are given as a careful user would: from the model's
config.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmem.baselines.base import Answer, BaselineInput, cannot
from llmem.baselines.dims import TransformerDims, dims_of

HIGH, LOW = 4, 2
GRADIENT_BYTES = 4
ALLGATHER_BUCKET, MAX_LIVE_PARAMS = int(5e8), int(1e9)
LEAVES_OUT = [
    "logits and loss, embedding and head activations",
    "LoRA, quantisation, fused or flash attention, optimizers beyond Adam, SGD and Muon",
    "tied embeddings (the embedding always counts twice), biases",
    "allocator, CUDA context, NCCL (its --misc-mem-gib is 0 by default)",
]


@dataclass(frozen=True)
class Sharding:
    """What each kind of state is divided by: ``model``, ``gradients`` and ``optimizer``."""

    model: int
    gradients: int
    optimizer: int


def estimate(inp: BaselineInput) -> Answer:
    """Per-GPU bytes as the calculator prints them, double division included."""
    stage, shards = inp.zero_stage, inp.tp * inp.pp
    return _answer(
        inp,
        Sharding(
            model=shards * (inp.gpus if stage == 3 else 1),
            gradients=inp.gpus if stage >= 2 else 1,
            optimizer=inp.gpus if stage >= 1 else 1,
        ),
    )


def estimate_fixed(inp: BaselineInput) -> Answer:
    """The same with every state divided by TP x PP, and by the data-parallel degree once."""
    stage, shards = inp.zero_stage, inp.tp * inp.pp
    return _answer(
        inp,
        Sharding(
            model=shards * (inp.dp if stage == 3 else 1),
            gradients=shards * (inp.dp if stage >= 2 else 1),
            optimizer=shards * (inp.dp if stage >= 1 else 1),
        ),
    )


def _answer(inp: BaselineInput, by: Sharding) -> Answer:
    try:
        dims = dims_of(inp.model, inp.config)
    except ValueError as error:
        return cannot(str(error))
    total = parameter_count(dims, inp.seq)
    width = LOW if inp.mixed or inp.dtype_bytes < 4 else HIGH
    parts = {
        "model": int(total * width / by.model),
        "gradients": int(total * GRADIENT_BYTES / by.gradients),
        "optimizer": int(total * optimizer_bytes(inp.optim) / by.optimizer),
        "communication": communication(inp, width),
        "activations": int(activations(dims, inp)),
    }
    return Answer(bytes=sum(parts.values()), parts=parts, leaves_out=list(LEAVES_OUT))


def parameter_count(d: TransformerDims, seq: int) -> int:
    """The calculator's parameter formula: two embeddings, ``seq`` positions, attention, MLPs,
    norms."""
    embedding, positions = 2 * d.vocab * d.hidden, d.hidden * seq
    norms = 8 * d.hidden * d.layers + 2 * d.hidden
    attention = int(2 * (1 + d.kv_heads / d.heads) * d.layers * d.hidden * d.hidden)
    mlp = (3 if d.gated else 2) * d.layers * d.hidden * d.ffn * d.experts
    return embedding + positions + norms + attention + mlp


def optimizer_bytes(optim: str) -> int:
    """Bytes per parameter: fp32 copy and moments; 8 for SGD with momentum and Muon, else Adam's
    12."""
    return 8 if optim.startswith(("sgd", "muon")) else 12


def communication(inp: BaselineInput, width: int) -> int:
    """DeepSpeed's all-gather bucket, and ZeRO-3's live parameters, at their defaults."""
    if inp.gpus == 1 or inp.zero_stage == 0:
        return 0
    live = MAX_LIVE_PARAMS if inp.zero_stage == 3 else 0
    return (ALLGATHER_BUCKET + live) * width


def activations(d: TransformerDims, inp: BaselineInput) -> float:
    """Bytes of all layers' activations, not divided by TP (ZeRO-R's partitioning is off by
    default)."""
    tokens = inp.seq * inp.batch
    linear = 16 * LOW + 2
    scores = 0.0 if inp.gradient_checkpointing else (2 * LOW + 1) * d.heads * inp.seq / d.hidden
    return tokens * d.hidden * d.layers * (linear + scores)
