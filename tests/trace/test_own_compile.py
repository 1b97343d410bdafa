"""A model that calls torch.compile itself, and updates in backward, while its blocks are compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llmem.lifetimes import Category, Phase
from llmem.spec import RunSpec, make_spec
from llmem.trace.run import trace_spec

WIDTH, TOKENS, BLOCKS = 64, 32, 2


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos().exp().sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sin().cos()  # type: ignore[no-any-return]


class Model(nn.Module):
    config: SimpleNamespace

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=16, get_text_config=lambda: self.config)
        self._no_split_modules = ["Block"]
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.loss_of = torch.compile(loss_of) if own else loss_of

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=self.loss_of(x))


def spec_of(own: bool, **fields: Any) -> RunSpec:
    return make_spec(
        model=lambda: Model(own=own), per_device_train_batch_size=1, seq_length=TOKENS,
        optim="adamw_torch", max_grad_norm=0.0, compile=True, compile_scope="blocks", steps=1, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(("own", "made"), [(False, 3), (True, 0)])
def test_torch_compile_in_the_models_own_code(own: bool, made: int) -> None:
    """The eager loss makes sin, cos and exp; the compiled one is a kernel that makes its sum alone."""
    trace = trace_spec(spec_of(own))
    table, ops = trace.lifetimes, trace.ops
    born = table.birth_op[(table.nbytes == 4 * WIDTH * TOKENS) & (table.birth_op >= 0)]
    outside = [trace.modules[ops.module[op]] == "" for op in born if ops.phase[op] == Phase.FORWARD]
    assert sum(outside) == made


def test_an_optimizer_in_backward_starts_without_states() -> None:
    """It steps in the rehearsal too, of which nothing is left."""
    trace = trace_spec(spec_of(False, optimizer_in_backward=True))
    table = trace.lifetimes
    states = table.nbytes[table.category == Category.OPTIMIZER_STATE]
    weight, embedding = 4 * WIDTH * WIDTH, 4 * 16 * WIDTH
    assert sorted(states[states > 8].tolist()) == 2 * [embedding] + 2 * BLOCKS * [weight]
