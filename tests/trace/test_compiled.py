"""torch.compile on meta: what Inductor's programs allocate, counted by hand, and what is refused."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Phase, Trace
from llmem.measure import measure, validate
from llmem.spec import make_spec
from llmem.trace.run import trace_spec

from ..conftest import TINY

F32 = 4
WIDTH, HIDDEN, TOKENS, BLOCKS = 64, 256, 32, 2
IN, INNER = F32 * TOKENS * WIDTH, F32 * TOKENS * HIDDEN
"""Bytes of what enters and leaves a block, and of what its first matrix makes."""


class Block(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class FromNumbers(Block):
    """It makes a tensor of numbers, and one more to index with (caches of T5, heads of Falcon)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        none = torch.tensor([], device=x.device)
        return torch.cat([none, super().forward(x)[:, :, [0]].flatten()]).view(1, -1, 1) + x


class Counting(Block):
    """Its code depends on how often it was called, and Dynamo's with it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Model(nn.Module):
    config: SimpleNamespace

    def __init__(self, block: type[Block] = Block, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=16, get_text_config=lambda: self.config)
        self._no_split_modules = [block.__name__]
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(block(hidden) for _ in range(BLOCKS))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.sum())


def on_meta(*args: Any, **kwargs: Any) -> Model:
    with torch.device("meta"):
        return Model(*args, **kwargs)


def traced(model: nn.Module | None = None, **fields: Any) -> Trace:
    model = model or on_meta()
    given = {"compile": True, "compile_scope": "blocks", "gpu": "a100-80gb"} | fields
    if not given["compile"]:
        del given["compile_scope"]
    return trace_spec(make_spec(
        model=lambda: model, per_device_train_batch_size=1, seq_length=TOKENS, optim="sgd",
        max_grad_norm=0.0, steps=1, **given,
    ))  # fmt: skip


def saved(trace: Trace) -> list[int]:
    """Bytes of the activations that are alive when backward starts."""
    table = trace.lifetimes
    start = next(tick for tick, phase, _ in trace.phase_ticks if phase is Phase.BACKWARD)
    alive = (table.birth < start) & (table.death > start) & (table.category == Category.ACTIVATION)
    return sorted(table.nbytes[alive & (table.nbytes > F32)].tolist())


@pytest.fixture(scope="module")
def blocks() -> Trace:
    return traced()


def test_products_are_saved_and_the_activation_is_not(blocks: Trace) -> None:
    """Eager saves what both first matrices make, silu's result and the last one's input.

    Compiled, silu's result never exists; the last matrix's input is saved, as backward multiplies it.
    """
    inputs = BLOCKS * [IN]  # the embedding's result and the first block's
    assert saved(traced(compile=False)) == inputs + 4 * BLOCKS * [INNER]
    assert saved(blocks) == inputs + 3 * BLOCKS * [INNER]


def made_in(trace: Trace, phase: Phase, module: str) -> list[tuple[str, int]]:
    """Module and bytes of each storage that the programs of ``module`` make in ``phase``."""
    table, ops = trace.lifetimes, trace.ops
    return [
        (trace.modules[ops.module[op]].removeprefix(module), int(nbytes))
        for op, nbytes, category in zip(
            table.birth_op, table.nbytes, table.category, strict=True
        )
        if op >= 0
        and ops.phase[op] == phase
        and category != Category.WORKSPACE
        and trace.modules[ops.module[op]].startswith(module)
    ]


def test_one_program_serves_both_blocks_and_each_counts_as_its_own(blocks: Trace) -> None:
    assert any("each layer" in said and ": 1 graph;" in said for said in blocks.assumptions)
    for number in range(BLOCKS):
        assert made_in(blocks, Phase.FORWARD, f"blocks.{number}.") == [
            ("gate", INNER), ("up", INNER), ("up", INNER), ("down", IN),
        ]  # fmt: skip


def test_backward_makes_three_gradients_of_matrices(blocks: Trace) -> None:
    """The gradient of the last one's input, then that of ``up``'s result, which is new.

    That of ``gate``'s result takes the former's place, the sum of both parts of the input's
    gradient that of one of them.
    """
    weight = F32 * WIDTH * HIDDEN
    assert made_in(blocks, Phase.BACKWARD, "blocks.0.") == [
        ("down", weight), ("down", INNER), ("up", INNER), ("up", weight), ("up", IN),
        ("gate", weight), ("gate", IN),
    ]  # fmt: skip


def test_rows_are_padded_on_a_gpu_alone() -> None:
    """1,033 floats a row: Inductor pads to 128 bytes what stays inside of a program."""
    plain, padded = F32 * TOKENS * 1033, F32 * ((TOKENS - 1) * 1056 + 1033)
    for gpu, sizes in (("cpu", {plain}), ("a100-80gb", {plain, padded})):
        table = traced(on_meta(hidden=1033), gpu=gpu).lifetimes
        assert set(table.nbytes.tolist()) & {plain, padded} == sizes


def test_nothing_of_it_leaks_into_an_eager_trace(blocks: Trace) -> None:
    before = traced(compile=False)
    traced()
    after = traced(compile=False)
    for column in ("nbytes", "birth", "death", "module"):
        np.testing.assert_array_equal(
            getattr(before.lifetimes, column), getattr(after.lifetimes, column)
        )
    assert before.assumptions == after.assumptions


@pytest.mark.parametrize("policy", ["full", "op"])
def test_the_users_module_comes_back(policy: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": 1}))
    layer: Any = model.model.layers[0]
    traced(model, gradient_checkpointing=True, checkpoint_policy=policy)
    assert "forward" not in vars(layer)
    assert layer.gradient_checkpointing is True


def test_tensors_made_of_numbers_are_traced(blocks: Trace) -> None:
    """Here torch.tensor makes no fake tensor on meta; the program is otherwise that of ``Block``."""
    assert saved(traced(on_meta(FromNumbers))) == saved(blocks)


def test_a_model_that_is_compiled_again_later_is_refused() -> None:
    model = on_meta(Counting)
    with pytest.raises(LlmemError, match="compiles Model again in a later step"):
        traced(model)
    assert all("forward" not in vars(block) for block in model.blocks)


def test_a_compilers_failure_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from llmem.trace.compiled.backend import Backend

    def fail(*_: Any) -> Any:
        raise RuntimeError("\nno lowering for aten::x.\n  File ...")

    monkeypatch.setattr(Backend, "__call__", fail)
    with pytest.raises(LlmemError) as caught:
        traced()
    said = str(caught.value)
    assert "cannot compile Model (no lowering for aten::x); leave --compile out" in said
    assert "\n" not in said
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "generate"}, "--task generate"),
        ({"gpus": 2, "ep": 2}, "--ep"),
        ({"method": "qlora"}, "quantised weights"),
        ({"quantization": "int8"}, "quantised weights"),
        ({"liger": True}, "--liger"),
        ({"kernels": "foak"}, "--kernels foak"),
        ({"gpus": 2, "strategy": "zero3"}, "--strategy zero3"),
        ({"gpus": 2, "strategy": "fsdp2"}, "--compile-scope model goes with --strategy none, ddp"),
        ({"gpus": 2, "strategy": "fsdp2", "compile_scope": "regions"}, "--strategy fsdp2"),
        ({"gpus": 2, "strategy": "ddp", "bucket_cap_mb": 0.5}, "--bucket-cap-mb 0.5"),
        ({"gpus": 2, "tp": 2}, "--compile-scope blocks"),
        (
            {"gpus": 2, "pp": 2, "pp_schedule": "zbv", "micro_batches": 2,
             "per_device_train_batch_size": 2, "compile_scope": "blocks"},
            "--pp-schedule zbv",
        ),
        (
            {"compile_scope": "blocks", "gradient_checkpointing": True, "use_reentrant": True},
            "--no-use-reentrant",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(fields: dict[str, Any], said: str) -> None:
    given = {"seq_length": 16, "per_device_train_batch_size": 1, "steps": 1} | fields
    with pytest.raises(LlmemError, match=said):
        llmem.estimate(make_spec(model=TINY, compile=True, **given))


def test_what_was_traced_before_chooses_no_kernels() -> None:
    query = torch.empty(1, 2, 8, 16, device="meta", requires_grad=True)
    with enable_python_dispatcher():  # which remembers meta's own path
        F.scaled_dot_product_attention(query, query, query)
    given = {"per_device_train_batch_size": 1, "seq_length": 16, "steps": 1, "param_dtype": "bf16"}
    spec = make_spec(model=TINY, compile=True, compile_scope="blocks", **given)
    traced = llmem.estimate(spec).trace
    names = {traced.op_name(op) for op in range(len(traced.ops))}
    assert any(name.startswith("_scaled_dot_product") for name in names)


@pytest.mark.slow
@pytest.mark.frameworks
def test_a_real_compiled_run_has_the_predicted_peak() -> None:
    """Inductor's own C++ kernels under the profiler, but for scalars that CPU kernels make."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor's CPU kernels need a C++ compiler, and there is none")
    spec = make_spec(
        model={**TINY, "num_hidden_layers": 1}, per_device_train_batch_size=2, seq_length=16,
        param_dtype="fp32", compile=True, compile_scope="blocks",
    )  # fmt: skip
    rows = validate(measure(spec, device="cpu"))
    [peak] = [row for row in rows if row.metric == "peak"]
    assert abs(peak.predicted - peak.measured) < 100
