"""Context parallelism: what one attention layer allocates on a rank, counted by hand."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import NEVER, Trace
from llmem.parallel import ranks_of
from llmem.parallel.context import kinds
from llmem.spec import RunSpec, make_spec
from llmem.trace.run import trace_spec
from llmem.trace.split.context_parallel import ROTATE_METHODS, sent_blocks_wait, torch_loop
from llmem.trace.split.process_group import rank_of
from llmem.trace.split.ulysses import UlyssesAttention

BATCH, HEADS, TOKENS, SIZE = 2, 3, 32, 8
BF16, FLOAT = 2, 4
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101,
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def ring(degree: int, rank: int, comm: str, gpu: str = "a100-80gb") -> Trace:
    """SDPA of [2, 3, 32, 8] in bf16 on a rank of torch's context_parallel, forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    with rank_of(degree, rank), sent_blocks_wait() if gpu != "cpu" else nullcontext():
        mesh = init_device_mesh("cpu", (degree,))
        set_rotate_method(ROTATE_METHODS[comm])

        def step() -> None:
            whole = torch.empty(BATCH, HEADS, TOKENS, SIZE, device="meta", dtype=torch.bfloat16)
            with context_parallel(
                mesh, buffers=[whole], buffer_seq_dims=[2], no_restore_buffers={whole}
            ):
                q, k, v = (whole.clone().requires_grad_() for _ in range(3))
                attention = torch.nn.functional.scaled_dot_product_attention
                attention(q, k, v, is_causal=True).sum().backward()

        try:
            return llmem.trace(step, steps=1, gpu=gpu)
        finally:
            set_rotate_method("allgather")


def made_by(trace: Trace, op: str) -> list[int]:
    table = trace.lifetimes
    return [
        int(table.nbytes[row])
        for row in range(len(table))
        if trace.op_name(int(table.birth_op[row])) == op
    ]


@pytest.mark.parametrize("degree", [2, 4])
def test_allgather_gathers_keys_and_values_once_in_each_direction(degree: int) -> None:
    trace = ring(degree, 0, "allgather")
    keys = BATCH * HEADS * TOKENS // degree * SIZE
    assert made_by(trace, "all_gather_into_tensor") == [2 * keys * BF16 * degree] * 2
    # fp32 gradients of keys and values go around the whole ring, to come home at the end.
    assert made_by(trace, "all_to_all_single") == [2 * keys * FLOAT] * degree


@pytest.mark.parametrize("degree", [2, 4])
def test_ring_passes_blocks_one_at_a_time(degree: int) -> None:
    trace = ring(degree, 0, "ring")
    keys = BATCH * HEADS * TOKENS // degree * SIZE
    assert made_by(trace, "all_gather_into_tensor") == []
    forward, passed = [2 * keys * BF16] * (degree - 1), Counter([2 * keys * FLOAT] * degree)
    sent = made_by(trace, "all_to_all_single")
    assert sent[: degree - 1] == forward
    assert Counter(sent[degree - 1 :]) == Counter(forward) + passed


def test_gradients_are_summed_in_fp32() -> None:
    sums = made_by(ring(2, 0, "allgather"), "zeros_like")
    assert sums == [BATCH * HEADS * TOKENS // 2 * SIZE * FLOAT] * 3


def test_first_rank_uses_half_its_queries_and_the_last_half_the_keys() -> None:
    half = BATCH * HEADS * TOKENS // 4
    first, last = (ring(2, rank, "allgather") for rank in (0, 1))
    name = "_scaled_dot_product_flash_attention"
    outputs = [[n for n in made_by(t, name) if n % (half * SIZE * BF16) == 0 and n] for t in (first, last)]
    whole = 2 * half * SIZE * BF16
    assert outputs == [[whole, whole // 2], [whole, whole]]
    # Half of the log-sum-exp is replaced in a copy of all of it, then half of the output.
    forward = [2 * half * FLOAT, 2 * half * SIZE * FLOAT]
    assert made_by(first, "cat")[1:3] == forward
    assert forward[0] not in made_by(last, "cat")


def test_a_block_that_was_sent_waits_for_its_collective() -> None:
    trace = ring(2, 0, "ring")
    table, block = trace.lifetimes, 2 * BATCH * HEADS * TOKENS // 2 * SIZE * BF16
    births = {trace.op_name(int(op)): row for row, op in reversed(list(enumerate(table.birth_op)))}
    sent, first = births["cat"], births["_scaled_dot_product_flash_attention"]
    assert int(table.nbytes[sent]) == block
    assert int(table.death[sent]) > int(table.birth[first])


def test_the_cpu_kernel_takes_part_in_the_same_loop() -> None:
    spec = llama(cp=2, gpu="cpu")
    trace = trace_spec(spec, steps=1)
    keys = 3 * 4 * 16 * 8  # heads repeated: the CPU's kernel has no grouped ones
    layers = 2
    gathered = made_by(trace, "all_gather_into_tensor")
    assert len(gathered) == 2 * layers
    assert set(gathered) <= {2 * keys * FLOAT * 2, keys * FLOAT * 2}


# -- Ulysses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "keys"), [(2, 2), (4, 4)])
def test_ulysses_exchanges_tokens_for_heads(degree: int, keys: int) -> None:
    """4 heads, 2 of keys: with 4 ranks each needs one, so they are repeated."""
    heads, tokens = 4, TOKENS // degree
    shapes: list[tuple[int, ...]] = []

    def attention(_: Any, query: Any, key: Any, value: Any, mask: Any, **__: Any) -> Any:
        shapes.extend(tuple(t.shape) for t in (query, key, value))
        assert mask is None
        return query.transpose(1, 2).contiguous(), None

    class Module:
        num_key_value_groups = 2

    def step() -> None:
        q = torch.empty(BATCH, heads, tokens, SIZE, device="meta", requires_grad=True)
        k, v = (torch.empty(BATCH, 2, tokens, SIZE, device="meta") for _ in range(2))
        out, _ = ulysses(Module(), q, k, v, torch.empty(0, device="meta"))
        assert out.shape == (BATCH, tokens, heads * SIZE)
        out.sum().backward()

    with rank_of(degree, 1):
        ulysses = UlyssesAttention(torch.distributed.group.WORLD, degree)
        ulysses._attention = attention
        trace = llmem.trace(step, steps=1, gpu="cpu")
    local = (BATCH, heads // degree, TOKENS, SIZE)
    assert shapes == [local, (BATCH, keys // degree, TOKENS, SIZE), (BATCH, keys // degree, TOKENS, SIZE)]
    q, k = (BATCH * n * tokens * SIZE * FLOAT for n in (heads, keys))
    # Receive buffers: q, k, v, the output, and in backward the output's and q's gradients.
    assert made_by(trace, "empty_like") == [q, k, k, q, q, q]


# -- whole runs ------------------------------------------------------------------------------------


def llama(**fields: Any) -> RunSpec:
    defaults = {
        "per_device_train_batch_size": 3, "seq_length": 32, "gpus": 2, "strategy": "ddp",
        "param_dtype": "fp32",
    }  # fmt: skip
    return make_spec(**{"model": LLAMA, **defaults, **fields})


def test_everything_outside_attention_has_a_part_of_the_tokens() -> None:
    whole, quarter = 3 * 32 * 101 * FLOAT, 3 * 8 * 101 * FLOAT
    for cp, there, absent in ((1, whole, quarter), (4, quarter, whole)):
        trace = trace_spec(llama(cp=cp, gpus=4, gpu="cpu"), steps=1)
        assert there in trace.lifetimes.nbytes and absent not in trace.lifetimes.nbytes


@pytest.mark.parametrize("comm", ["allgather", "ulysses"])
def test_shards_are_those_of_all_ranks(comm: str) -> None:
    """FSDP2 shards over dp x cp: parameters and state are as without context parallelism."""
    plain, split = (
        estimate(llama(gpus=4, strategy="fsdp2", cp=cp, cp_comm=comm, gpu="cpu")) for cp in (1, 2)
    )
    for kind in ("parameters", "optimizer_states"):
        assert plain.worst.breakdown[kind] == split.worst.breakdown[kind]
    assert split.worst.peak.requested < plain.worst.peak.requested
    assert sorted(r for rank in split.ranks for r in rank.table.ranks) == [0, 1, 2, 3]
    assert any("context parallelism" in note for note in split.assumptions)


def test_kinds_of_rank() -> None:
    assert kinds(llama(cp=2)) == [(0,), (1,)]
    assert kinds(llama(cp=8, gpus=8)) == [(0,), (1, 2, 3, 4, 5, 6), (7,)]
    assert kinds(llama(cp=8, gpus=8, cp_comm="ulysses")) == [tuple(range(8))]
    tables = ranks_of(trace_spec(spec := llama(cp=2, gpus=4, gpu="cpu")), spec)
    assert [table.ranks for table in tables] == [(0, 2), (1, 3)]


def test_nothing_is_left_changed() -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = torch.nn.functional.scaled_dot_product_attention
    before = dict(torch_cp.custom_ops), ALL_ATTENTION_FUNCTIONS["sdpa"]
    for comm in ("ring", "ulysses"):
        trace = trace_spec(llama(cp=2, cp_comm=comm, bf16=True), steps=1)
        assert (trace.lifetimes.death != NEVER).any()
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert (dict(torch_cp.custom_ops), ALL_ATTENTION_FUNCTIONS["sdpa"]) == before
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping  # it would hide later registrations
    assert torch_cp._cp_options.rotate_method is torch_cp._RotateMethod.ALL_GATHER


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cp": 3, "gpus": 4}, "does not divide"),
        ({"cp": 2, "seq_length": 33}, "multiple of 4"),
        ({"cp": 2, "strategy": "zero3"}, "ddp, fsdp2"),
        ({"cp": 2, "tp": 2, "gpus": 4, "tp_plan": "colossal"}, "--tp-plan colossal"),
        ({"cp": 2, "tp": 4, "gpus": 8, "tp_plan": "torchtitan", "sp": True, "seq_length": 36},
         "multiple of 16"),
        ({"cp": 2, "tp": 2, "gpus": 4, "cp_comm": "ulysses", "tp_plan": "torchtitan",
          "model": {**LLAMA, "num_attention_heads": 2}}, "1 attention heads"),
        ({"cp": 2, "attn_implementation": "eager"}, "SDPA"),
        ({"cp": 2, "padding": True}, "--padding"),
        ({"cp": 2, "gpu": "a100-80gb"}, "plain math"),
        ({"cp": 4, "gpus": 4, "cp_comm": "ulysses", "model": {**LLAMA, "num_attention_heads": 2}},
         "2 attention heads"),
        ({"cp": 2, "model": {**LLAMA, "model_type": "mistral", "architectures":
          ["MistralForCausalLM"], "sliding_window": 8}}, "sliding_attention"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        estimate(llama(**fields))


def test_a_torch_without_the_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LlmemError, match=r"install torch 2\.13"):
        torch_loop()
