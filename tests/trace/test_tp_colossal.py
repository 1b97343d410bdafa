"""Colossal-AI's 1-D plan: a two-layer toy of which every buffer is written down, equation (9), Gemini."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, TICK, Phase, Trace
from llmem.spec import RunSpec, make_spec
from llmem.trace.run import trace_spec
from llmem.trace.split import tp_colossal
from llmem.trace.split.process_group import make_mesh, rank_of

WORDS, WIDTH, INNER, TOKENS = 10, 8, 12, 4
FLOAT = 4


class Toy(torch.nn.Module):
    """ids [4] -> embedding [10, 8] -> up [12, 8] and a bias -> down [8, 12] -> sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.up = torch.nn.Linear(WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embedding(ids))).sum()  # type: ignore[no-any-return]


def traced(degree: int) -> Trace:
    """One forward and backward of the toy on rank 0 of ``degree``."""
    spec = make_spec(model="opt-125m", tp=degree, gpus=degree, tp_plan="colossal")
    with rank_of(degree, 0):
        with torch.device("meta"):
            model, ids = Toy(), torch.zeros(TOKENS, dtype=torch.long)
        tp_colossal.parallelize(model, spec, lambda: make_mesh((degree,), ("tp",)))
        return llmem.trace(lambda: model(ids).backward(), model=model, steps=1, gpu="cpu")


Buffer = tuple[int, str, str, int, int | None]


def buffers(trace: Trace) -> list[Buffer]:
    """(bytes, op, module, birth, death) of everything, in events from 1; None: never freed."""
    table = trace.lifetimes
    deaths = [None if death == NEVER else int(death) // TICK for death in table.death]
    return [
        (
            int(table.nbytes[row]),
            trace.op_name(int(table.birth_op[row])),
            trace.modules[table.module[row]],
            int(table.birth[row]) // TICK,
            deaths[row],
        )
        for row in range(len(table))
    ]


def gather(part: int, degree: int, module: str, start: int, death: int) -> list[Buffer]:
    """A gather that begins at event ``start``: its list, NCCL's flat copy, the parts side by side.

    The flat copy goes first, then the list, its last tensor first.
    """
    end = start + 2 * degree + 3
    listed: list[Buffer] = [
        (part, "gather_list", module, start + i, end - 1 - i) for i in range(degree)
    ]
    flat = (degree * part, "all_gather_into_tensor", module, start + degree, start + degree + 1)
    return [*listed, flat, (degree * part, "cat", module, start + degree + 2, death)]


@pytest.mark.parametrize("degree", [2, 4])
def test_every_buffer_of_two_layers(degree: int) -> None:
    hidden, inner = TOKENS * WIDTH * FLOAT, TOKENS * INNER * FLOAT
    table, up, down = (
        rows * columns // degree * FLOAT
        for rows, columns in ((WORDS, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    )
    d = 2 * degree  # events of a gather besides those of its flat copy and of what it leaves
    assert buffers(traced(degree)) == [
        (table, "", "embedding", 1, None),
        (up, "", "up", 2, None),
        (INNER * FLOAT, "", "up", 3, None),  # the bias, whole
        (down, "", "down", 4, None),
        # forward: this rank's columns of the embeddings, gathered
        (hidden // degree, "embedding", "embedding", 5, 9 + d),
        *gather(hidden // degree, degree, "embedding", 6, 14 + d),
        (hidden // degree, "clone", "up", 10 + d, 32 + 2 * d),  # its copy for up
        (inner, "mm", "up", 11 + d, 13 + d),  # partial sums, reduced in place
        (inner, "add", "up", 12 + d, 17 + d),
        (inner // degree, "clone", "down", 15 + d, 23 + d),
        (hidden, "mm", "down", 16 + d, 19 + d),
        (FLOAT, "sum", "", 18 + d, 42 + 3 * d),
        (FLOAT, "ones_like", "", 20 + d, 41 + 3 * d),
        # backward: gathers of the gradients of both inputs
        (down, "mm", "down", 21 + d, None),
        (inner // degree, "mm", "down", 22 + d, 27 + 2 * d),
        *gather(inner // degree, degree, "down", 24 + d, 31 + 2 * d),
        (INNER * FLOAT, "sum", "up", 28 + 2 * d, None),
        (up, "mm", "up", 29 + 2 * d, None),
        (hidden // degree, "mm", "up", 30 + 2 * d, 36 + 3 * d),
        *gather(hidden // degree, degree, "up", 33 + 2 * d, 38 + 3 * d),
        (hidden // degree, "clone", "embedding", 37 + 3 * d, 40 + 3 * d),
        (table, "embedding_dense_backward", "embedding", 39 + 3 * d, None),
    ]


LAYERS, BATCH, SEQUENCE, HIDDEN, FEEDFORWARD, VOCABULARY = 3, 2, 16, 32, 64, 104
HALF = 2
OPT: dict[str, Any] = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "ffn_dim": FEEDFORWARD,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def paper_spec(tp: int, gpus: int, **fields: Any) -> RunSpec:
    return make_spec(**{
        "model": OPT, "per_device_train_batch_size": BATCH, "seq_length": SEQUENCE,
        "param_dtype": "fp32", "attn_implementation": "eager", "gradient_checkpointing": True,
        "strategy": "gemini", "gpus": gpus, "tp": tp, "tp_plan": "colossal", "gpu": "cpu",
        "steps": 1, **fields,
    })  # fmt: skip


def bytes_of(trace: Trace, op_name: str, phase: Phase) -> list[int]:
    table = trace.lifetimes
    return [
        int(nbytes)
        for nbytes, op in zip(table.nbytes, table.birth_op, strict=True)
        if trace.op_name(int(op)) == op_name and int(trace.ops.phase[op]) == phase
    ]


@pytest.mark.parametrize("tp", [2, 4])
def test_the_terms_of_equation_9_are_in_the_timeline(tp: int) -> None:
    """The list of one gather holds what all ranks send; all but this rank's own is (9)'s term."""
    trace = trace_spec(paper_spec(tp, tp), compute_dtype="float16")
    rows = bytes_of(trace, "gather_list", Phase.BACKWARD)
    output = BATCH * SEQUENCE * HIDDEN * HALF
    # q, k, v, out and fc1 of each layer and the head take the hidden width, fc2 the inner one
    wide = FEEDFORWARD // HIDDEN
    assert sorted(rows) == sorted(
        [output // tp] * tp * (5 * LAYERS + 1) + [wide * output // tp] * tp * LAYERS
    )
    others = sum(rows) * (tp - 1) // tp
    m_back = LAYERS * output * (tp - 1) // tp  # equation (9), one gather per layer
    assert others == m_back * (5 + wide) + output * (tp - 1) // tp
    # The whole gradient comes twice more: as NCCL's flat copy, and put side by side.
    for made in ("all_gather_into_tensor", "cat"):
        whole = [n for n in bytes_of(trace, made, Phase.BACKWARD) if n in (output, wide * output)]
        assert sum(whole) == sum(rows)
    # They never live together: of lists and flat copies one gather's at most.
    table = trace.lifetimes
    names = [trace.op_name(int(op)) for op in table.birth_op]
    mine = [i for i, name in enumerate(names) if name in ("gather_list", "all_gather_into_tensor")]
    at_once = max(int(table.take(mine).alive_at(int(t)) @ table.nbytes[mine]) for t in table.birth)
    assert at_once == 2 * wide * output


def test_logits_are_whole_on_every_rank() -> None:
    trace = trace_spec(paper_spec(4, 4), compute_dtype="float16")
    logits = BATCH * SEQUENCE * VOCABULARY * HALF
    assert logits in bytes_of(trace, "mm", Phase.FORWARD)
    assert [p.shape for p in trace.parameters if p.name.endswith("fc1.weight")] == LAYERS * [(64, 8)]
    assert [p.shape for p in trace.parameters if p.name.endswith("fc1.bias")] == LAYERS * [(64,)]


def test_gemini_shares_split_weights_among_the_replicas() -> None:
    """Split weights over gpus / tp ranks; biases and norms whole, in a chunk of their own."""
    from llmem.parallel.gemini import layout_of

    trace = trace_spec(paper_spec(2, 4), compute_dtype="float16")
    split = sum(p.numel for p in trace.parameters if p.key in trace.sharded)
    whole = sum(p.numel for p in trace.parameters) - split
    assert whole == LAYERS * (4 * HIDDEN + FEEDFORWARD + HIDDEN + 4 * HIDDEN) + 2 * HIDDEN
    layout = layout_of(trace.parameters, 2, min_chunk=2048, split=trace.sharded)
    keys = [[layout.parameters[m].key in trace.sharded for m in c.members] for c in layout.chunks]
    assert all(all(chunk) or not any(chunk) for chunk in keys)
    kept = [index for index, chunk in enumerate(keys) if not chunk[0]]
    assert layout.gathered == frozenset(kept)
    assert [layout.shard(index) for index in kept] == [whole]
    assert [sum(layout.slices(rank)) for rank in (0, 1)] == [
        whole + sum(min(c.used, c.elements // 2) for c in layout.chunks[: kept[0]]),
        whole + sum(max(0, c.used - c.elements // 2) for c in layout.chunks[: kept[0]]),
    ]


def test_ranks_of_two_replicas_of_two_shards() -> None:
    """In a model so small everything stays gathered: all four ranks are alike."""
    four, alone = (estimate(paper_spec(2, gpus)) for gpus in (4, 2))
    assert [rank.table.ranks for rank in four.ranks] == [(0, 1, 2, 3)]
    assert [rank.table.ranks for rank in alone.ranks] == [(0, 1)]
    assert four.worst.peak == alone.worst.peak
    assert four.optimizer["name"] == "HybridAdam"
    trace = four.trace
    assert four.optimizer["state_elements"] == 2 * sum(p.numel for p in trace.parameters)
    assert not {"all_gather", "reduce_scatter"} & set(four.worst.table.trace.names)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 3, "gpus": 3}, "cannot split the 32 inputs of model.decoder.embed_tokens"),
        ({"model": "gpt2", "tp": 2}, "GPT2LMHeadModel is made of Conv1D"),
        ({"tp": 2, "tp_plan": "transformers"}, "gemini knows Colossal-AI's tensors only"),
        ({"tp": 2, "strategy": "fsdp2", "gpus": 4}, "colossal with --strategy fsdp2 is not"),
        ({"tp": 2, "strategy": "none", "pp": 2, "gpus": 4}, "colossal with --pp is not supported"),
        ({"tp": 2, "sp": True}, "Colossal-AI's plan has no sequence parallelism"),
        ({"tp": 2, "loss_parallel": True}, "Colossal-AI's plan gathers the logits"),
    ],
)
def test_what_cannot_be_split(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(paper_spec(**{"gpus": 2, **fields}))
