"""FSDP1 on the toy, every buffer written down (three units of 6 x 6 weights, 144 bytes each)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, TICK, Category, Lifetimes, Parameter, Trace
from llmem.measure import measure_all, validate
from llmem.parallel.fsdp.fsdp1 import options_of, wrapped_modules
from llmem.parallel.fsdp.fsdp1_flat import flatten
from llmem.parallel.fsdp.fsdp1_pass import (
    ALL_REDUCE_STREAM,
    PRE_UNSHARD_STREAM,
    Fsdp1Options,
    Fsdp1Pass,
)
from llmem.parallel.sharded_step import Shard
from llmem.parallel.units import units_of
from llmem.spec import make_spec
from tests.parallel.toy import collectives, toy_trace

WEIGHT = 144
ELEMENTS = 36


def sharded(
    trace: Trace, ranks: int = 2, computed: str | None = None, **options: Any
) -> tuple[Lifetimes, Trace]:
    units = units_of(trace, trace.wrapped)
    flats = [flatten(u.parameters, ranks, kept=trace.masters, computed=computed) for u in units]
    return Fsdp1Pass(trace, units, flats, Fsdp1Options(**options)).run().finish()


def alive(table: Lifetimes, trace: Trace, category: Category, op_name: str, nth: int) -> list[int]:
    """Sizes of a category alive when the nth op of that name in step 0 has made its output."""
    name = trace.names.index(op_name)
    found = np.flatnonzero((trace.ops.name == name) & (trace.ops.step == 0))
    now = table.alive_at(int(trace.ops.tick[found[nth]]) + TICK) & (table.category == category)
    return sorted(int(n) for n in table.nbytes[now])


def test_shards_are_padded_chunks() -> None:
    table, _ = sharded(toy_trace(), ranks=5)
    # 36 elements on 5 ranks: chunks of 8, four of them padding
    assert table.nbytes[table.category == Category.PARAMETER].tolist() == [8 * 4] * 3


def test_gathered_while_each_block_runs() -> None:
    table, trace = sharded(toy_trace())
    # forward of embedding, block 0 and block 1: the root's parameter, and the block's
    expected = {0: 1, 1: 2, 2: 2}
    # backward of block 1 (two mm): root, block 1, and block 0, prefetched; then block 0 itself
    expected |= {3: 3, 4: 3, 5: 2, 6: 2, 7: 1}
    for mm, count in expected.items():
        assert alive(table, trace, Category.COMMUNICATION, "mm", mm) == [WEIGHT] * count


def test_gradients_are_joined_reduced_and_kept_as_shards() -> None:
    table, trace = sharded(toy_trace())
    # when block 0's gradient is made, block 1's is a shard
    assert alive(table, trace, Category.GRADIENT, "mm", 5) == [WEIGHT // 2, WEIGHT]
    assert alive(table, trace, Category.GRADIENT, "add_", 0) == [WEIGHT // 2] * 3
    whole = (table.category == Category.GRADIENT) & (table.nbytes == WEIGHT)
    # per unit and step: backward's own gradient and its flat copy, alive together for a moment
    assert int(whole.sum()) == 2 * 2 * 3
    assert int((table.death[whole] == NEVER).sum()) == 0


def test_reduction_pads_what_ranks_do_not_divide() -> None:
    table, _ = sharded(toy_trace(), ranks=5)
    reduced = table.stream == 3
    # per unit and step: the padded gradient (40 elements) and the new shard (8)
    assert sorted(table.nbytes[reduced].tolist()) == [8 * 4] * 6 + [40 * 4] * 6


def test_mixed_precision_casts_the_shard_before_and_the_gradient_after() -> None:
    trace = toy_trace()
    trace.masters = dict.fromkeys(trace.masters, "float32")
    table, _ = sharded(trace, computed="bfloat16")
    low = table.nbytes[table.stream == 2]  # five gathers per step (three forward, two backward)
    assert low.tolist() == [ELEMENTS // 2 * 2] * 10
    reduced = sorted(table.nbytes[table.stream == 3].tolist())
    assert reduced == [ELEMENTS // 2 * 2] * 6 + [ELEMENTS // 2 * 4] * 6
    # the first forward allocates and frees each unit's low shard, its gathered parameter in both
    # dtypes once
    born = np.sort(table.nbytes[(table.stream == 0) & (table.category == Category.COMMUNICATION)])
    assert born.tolist() == sorted([36, 72, 144] * 3)


def test_gathers_and_reduces_by_unit() -> None:
    _, trace = sharded(toy_trace())
    assert collectives(trace) == [
        ("all_gather", ""),
        ("all_gather", "blocks.0"),
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.1"),
        ("all_gather", "blocks.0"),
        ("reduce_scatter", "blocks.1"),
        ("reduce_scatter", "blocks.0"),
        ("reduce_scatter", ""),
    ]


@pytest.mark.parametrize(("prefetch", "counts"), [("pre", 3), ("post", 2), ("none", 2)])
def test_prefetch_decides_what_is_there_with_block_1(prefetch: str, counts: int) -> None:
    table, trace = sharded(toy_trace(), prefetch=prefetch)
    assert alive(table, trace, Category.COMMUNICATION, "mm", 3) == [WEIGHT] * counts


def test_shard_grad_op_gathers_once_per_step() -> None:
    _, trace = sharded(toy_trace(), free_after_forward=False)
    gathers = [op for op in range(len(trace.ops)) if trace.op_name(op) == "all_gather"]
    assert [int(trace.ops.step[op]) for op in gathers] == [0, 0, 0, 1, 1, 1]


# -- flat parameters -------------------------------------------------------------------------------


def parameters(*sizes: int, trainable: bool = True, dtype: str = "float32") -> list[Parameter]:
    return [Parameter(i, f"p{i}", (n,), dtype, 4, trainable, i) for i, n in enumerate(sizes)]


def test_original_parameters_start_at_16_bytes_and_are_cut_by_rank() -> None:
    kept = dict.fromkeys(range(3), "float32")
    flat = flatten(parameters(5, 6, 2), 2, kept=kept, use_orig_params=True)
    # 5 + 3 padding, 6 + 2 padding, 2: 18 elements, 9 per rank
    assert [piece.numel for piece in flat.pieces] == [5, 3, 6, 2, 2]
    assert flat.parts(0) == [Shard(0, "p0", (5,), "float32"), Shard(1, "p1", (1,), "float32")]
    assert flat.parts(1) == [Shard(1, "p1", (5,), "float32"), Shard(2, "p2", (2,), "float32")]
    in_bf16 = flatten(parameters(5, 6, 2), 2, kept=kept, computed="bfloat16", use_orig_params=True)
    assert [piece.numel for piece in in_bf16.pieces] == [5, 3, 6, 2, 2]  # multiples of 8 elements


def test_what_fsdp1_cannot_flatten() -> None:
    with pytest.raises(LlmemError, match="one dtype"):
        flatten(parameters(3, 4), 2, kept={0: "float32", 1: "bfloat16"})
    mixed = [*parameters(3), Parameter(1, "frozen", (4,), "float32", 4, False, 1)]
    with pytest.raises(LlmemError, match="fsdp2"):
        flatten(mixed, 2, kept=dict.fromkeys(range(2), "float32"), use_orig_params=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hybrid_shard": 3}, "does not divide"),
        ({"reshard_after_forward": 4}, "true, false"),
        ({"offload": "optimizer"}, "use --offload all"),
        ({"dp_replicate_size": 8}, "use --strategy ddp"),
    ],
)
def test_impossible_options(fields: dict[str, object], said: str) -> None:
    spec = make_spec(model="gpt2", gpus=8, strategy="fsdp", **fields)
    with pytest.raises(LlmemError, match=said):
        options_of(spec)


def at_gathers(table: Lifetimes, trace: Trace, name: str) -> list[list[int]]:
    """Sizes on the pre-unshard stream while each of the first step's gathers of a unit is made."""
    found = []
    for op in range(len(trace.ops)):
        module = trace.modules[trace.ops.module[op]]
        if trace.ops.step[op] == 0 and (trace.op_name(op), module) == ("all_gather", name):
            mine = (table.stream == PRE_UNSHARD_STREAM) & (table.birth_op == op)
            found.append(table.nbytes[mine].tolist())
    return found


def test_offloaded_shards_are_copied_to_be_gathered() -> None:
    shard = WEIGHT // 2
    table, trace = sharded(toy_trace(), offload=True)
    assert not (table.category == Category.PARAMETER).any()
    assert at_gathers(table, trace, "blocks.0") == [[shard], [shard]]
    # in lower precision: the low shard first, then the copy from the host, which is gone sooner
    low = toy_trace(dtype=torch.bfloat16)
    low.masters = dict.fromkeys(low.masters, "float32")
    table, trace = sharded(low, computed="bfloat16", offload=True)
    assert at_gathers(table, trace, "blocks.0") == [[shard // 2, shard]] * 2
    staged = table.nbytes[table.stream == PRE_UNSHARD_STREAM]
    # per step 5 gathers, and the root, still gathered, before its backward: the copy nobody needs
    assert sorted(staged.tolist()) == [shard // 2] * 12 + [shard] * 12


def test_offloaded_gradients_stay_on_the_gpu_until_backward_ends() -> None:
    table, trace = sharded(toy_trace(), offload=True)
    # while the embedding's gradient is made: it, and the reduced shards of both blocks
    assert alive(table, trace, Category.GRADIENT, "mm", 7) == [WEIGHT // 2] * 2 + [WEIGHT]
    assert alive(table, trace, Category.GRADIENT, "add_", 0) == []


def test_hybrid_shards_are_cast_on_the_all_reduce_stream() -> None:
    trace = toy_trace(dtype=torch.bfloat16)
    trace.masters = dict.fromkeys(trace.masters, "float32")
    table, _ = sharded(trace, computed="bfloat16", hybrid=True)
    assert table.nbytes[table.stream == ALL_REDUCE_STREAM].tolist() == [WEIGHT // 2] * 6


def test_trained_leaves_are_units_under_adapters() -> None:
    trace = toy_trace()
    full = make_spec(model="gpt2", gpus=2, strategy="fsdp")
    assert wrapped_modules(trace, full) == ["blocks.0", "blocks.1"]
    lora = make_spec(model="gpt2", gpus=2, strategy="fsdp", method="lora")
    assert wrapped_modules(trace, lora)[2:] == ["embed", "blocks.0.linear", "blocks.1.linear"]


# -- the real one ----------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131,
    "hidden_size": 26, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 13,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "original parameters in bf16": {"bf16": True, "use_orig_params": True},
    "accumulation without resharding": {
        "gradient_accumulation_steps": 2, "reshard_after_forward": False,
    },
    "LoRA in bf16": {"bf16": True, "method": "lora", "gradient_checkpointing": True},
    # frozen blocks keep their inputs and the gradients of them until backward ends
    "LoRA, reentrant checkpointing": {
        "method": "lora", "gradient_checkpointing": True, "as_transformers": "4.45",
    },
}  # fmt: skip


@pytest.mark.frameworks
def test_real_processes_hold_what_is_predicted() -> None:
    shape: dict[str, Any] = {"per_device_train_batch_size": 2, "seq_length": 19}
    specs = [
        make_spec(model=LLAMA, param_dtype="fp32", gpus=2, strategy="fsdp", **shape, **fields)
        for fields in CASES.values()
    ]
    for name, record in zip(CASES, measure_all(specs, timeout_s=240), strict=True):
        rows = [r for r in validate(record) if r.metric in ("peak", "first", "steady")]
        assert {row.rank for row in rows} == {0, 1}
        for row in rows:  # 256 bytes: scalars that a process holds, in a model of 140 KB
            assert abs(row.predicted - row.measured) <= max(256, 0.001 * row.measured), name
