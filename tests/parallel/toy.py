"""Two bias-free linear blocks and a head, small enough to add up by hand."""

from __future__ import annotations

import torch

import llmem
from llmem.lifetimes import Trace
from llmem.trace.run import DEFAULT_GPU

WIDTH = 6
ROWS = 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Toy(torch.nn.Module):
    """x [ROWS, WIDTH] -> block0 -> block1 -> head (WIDTH -> 1) -> sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def toy_trace(steps: int = 2, dtype: torch.dtype = torch.float32) -> Trace:
    """SGD over the toy on meta, ``steps`` steps, with the blocks as units."""
    with torch.device("meta"):
        model = Toy().to(dtype)
        x = torch.empty(ROWS, WIDTH, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    trace = llmem.trace(step, model=model, optimizer=optimizer, steps=steps, gpu=DEFAULT_GPU)
    trace.wrapped = ["blocks.0", "blocks.1"]
    trace.masters = {p.key: p.dtype for p in trace.parameters}
    return trace


def collectives(trace: Trace) -> list[tuple[str, str]]:
    """The first step's gathers and reductions: op and unit, in order."""
    return [
        (trace.op_name(op), trace.modules[trace.ops.module[op]])
        for op in range(len(trace.ops))
        if trace.ops.step[op] == 0 and trace.op_name(op) in ("all_gather", "reduce_scatter")
    ]
