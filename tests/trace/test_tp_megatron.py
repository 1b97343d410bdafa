"""Megatron-LM's plan: its collectives, the global buffer, the split loss, who is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, Phase, Trace
from llmem.spec import RunSpec
from llmem.trace.run import trace_spec
from tests.trace.test_tp_plans import (
    BATCH,
    FLOAT,
    GATHER,
    LAYERS,
    SCATTER,
    STREAM,
    TOKENS,
    TOY,
    WIDTH,
    communication,
    toy,
)

PADDED = 128
"""Words of a rank: ten of them are padded to 128 x tp."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 10, "n_embd": WIDTH,
    "n_layer": LAYERS, "n_head": 4, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def megatron(degree: int, **fields: Any) -> RunSpec:
    return toy(degree, tp_plan="megatron", **fields)


def counted(trace: Trace, phase: Phase) -> Counter[str]:
    ops = trace.ops
    names = [trace.names[name] for name in ops.name[ops.phase == phase]]
    return Counter(name for name in names if name.startswith(("all_", "reduce_scatter")))


def born(trace: Trace, nbytes: int) -> list[str]:
    table = trace.lifetimes
    return [trace.op_name(int(op)) for op in table.birth_op[table.nbytes == nbytes]]


@pytest.mark.parametrize("degree", [2, 4])
def test_all_reduces_work_in_place(degree: int) -> None:
    trace = trace_spec(megatron(degree))
    # The embedding, attention and MLP of each layer; the loss's maximum, target and sum.
    assert counted(trace, Phase.FORWARD) == {"all_reduce_": 1 + 2 * LAYERS + 3}
    # Gradients of the inputs of q, k, v, gate and up, and of the head.
    assert counted(trace, Phase.BACKWARD) == {"all_reduce_": 5 * LAYERS + 1}
    assert communication(trace, Phase.FORWARD) == communication(trace, Phase.BACKWARD) == []


@pytest.mark.parametrize("degree", [2, 4])
def test_sequence_parallelism_gathers_into_one_buffer(degree: int) -> None:
    trace = trace_spec(megatron(degree, sp=True))
    scatter, gather = (SCATTER, STREAM // degree), (GATHER, STREAM)
    # The embedding, attention and MLP of each layer.
    assert communication(trace, Phase.FORWARD) == (1 + 2 * LAYERS) * [scatter]
    # The head; then the gradient of the output of MLP and attention, and those of their inputs.
    layer = [gather, *2 * [scatter], gather, *3 * [scatter]]
    assert communication(trace, Phase.BACKWARD) == [scatter, *LAYERS * layer, gather]
    # q, k, v, gate, up and the head gather what they multiply, forward and again backward.
    into_buffer = 5 * LAYERS + 1
    assert counted(trace, Phase.FORWARD)["all_gather_into_tensor_out"] == into_buffer
    assert counted(trace, Phase.BACKWARD)["all_gather_into_tensor_out"] == into_buffer
    table = trace.lifetimes
    made = [trace.op_name(int(op)) == "global_memory_buffer" for op in table.birth_op]
    assert table.nbytes[made].tolist() == [STREAM]
    assert table.death[made].tolist() == [NEVER]


def test_the_residual_stream_is_split() -> None:
    def additions(**fields: Any) -> list[int]:
        trace = trace_spec(megatron(2, **fields))
        table, ops = trace.lifetimes, trace.ops
        return [
            int(n)
            for n, op in zip(table.nbytes, table.birth_op, strict=True)
            if op >= 0
            and trace.op_name(int(op)) == "add"
            and trace.modules[ops.module[op]].removeprefix("model.layers.").isdecimal()
            and ops.phase[op] == Phase.FORWARD
        ]

    assert additions() == 2 * LAYERS * [STREAM]
    assert additions(sp=True) == 2 * LAYERS * [STREAM // 2]


def test_the_loss_keeps_a_softmax_of_this_rank_in_fp32() -> None:
    rows = BATCH * TOKENS * PADDED
    half = trace_spec(megatron(2, param_dtype="bf16"))
    # Logits, and the gradient in their dtype; logits in fp32, which become softmax and gradient.
    assert born(half, 2 * rows) == ["mm", "_to_copy"]
    assert born(half, 4 * rows) == ["_to_copy"]
    assert born(trace_spec(megatron(2)), 4 * rows) == ["mm"]  # .float() of fp32 is the tensor itself


def test_vocabulary_and_weights_are_cut() -> None:
    trace = trace_spec(megatron(2))
    shapes = {p.name: p.shape for p in trace.parameters}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (PADDED, WIDTH)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (6, WIDTH)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (WIDTH, 6)
    assert shapes["model.layers.0.input_layernorm.weight"] == (WIDTH,)


@pytest.mark.parametrize("sp", [False, True])
def test_gpt2(sp: bool) -> None:
    trace = trace_spec(megatron(2, model=GPT2, sp=sp))
    shapes = {p.name: p.shape for p in trace.parameters}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (3 * WIDTH // 2, WIDTH)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (3 * WIDTH // 2,)
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (WIDTH, 2 * WIDTH)
    assert shapes["transformer.h.0.mlp.c_proj.bias"] == (WIDTH,)
    assert shapes["transformer.wpe.weight"] == (16, WIDTH)
    tied = {"transformer.wte.weight", "lm_head.weight"}  # one parameter, under one name
    assert [shapes[name] for name in tied & set(shapes)] == [(PADDED, WIDTH)]
    forward, backward = (counted(trace, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    if not sp:
        assert forward["all_reduce_"] == 1 + 2 * LAYERS + 3
        assert backward["all_reduce_"] == 2 * LAYERS + 1
        return
    # Whole embeddings are reduced and then split, as positions are added to them in between.
    assert forward["all_reduce_"] == 1 + 3 and forward[SCATTER] == 2 * LAYERS
    assert backward[SCATTER] == 2 * LAYERS + 1 and backward[GATHER] == 2 * LAYERS + 1


@pytest.mark.parametrize("sp", [False, True])
def test_nothing_of_a_step_outlives_it(sp: bool) -> None:
    """Between steps there are parameters, gradients and the buffer."""
    trace = trace_spec(megatron(2, sp=sp, steps=2, optim="sgd"))
    table = trace.lifetimes
    held = table.nbytes[table.alive_at(trace.step_ticks[-1])].sum()
    parameters = sum(p.numel for p in trace.parameters) * FLOAT
    rope = 2 * FLOAT * 2  # inv_freq and its original
    assert held <= 2 * parameters + rope + (STREAM if sp else 0) + 64


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bf16": True}, "computes in the dtype of the parameters"),
        ({"loss_parallel": True}, "always splits the loss"),
        ({"loss": "chunked"}, "--loss chunked with --tp is not supported"),
        ({"liger": True}, "brings its own loss"),
        ({"sp": True, "seq_length": 7}, "--sp cannot split 7 tokens over 2 ranks"),
        ({"gpus": 4, "strategy": "fsdp2"}, "megatron with --strategy fsdp2 is not supported"),
        ({"gpus": 4, "pp": 2, "micro_batches": 1}, "megatron with --pp and --strategy none"),
        ({"model": {**TOY, "num_key_value_heads": 1}}, "1 num_key_value_heads: megatron gives"),
        ({"model": {**TOY, "intermediate_size": 13}}, "cannot split the 13 outputs of a Linear"),
        ({"method": "lora"}, "--tp with --method lora is not supported"),
    ],
)
def test_what_cannot_be_split(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(megatron(2, **fields))
