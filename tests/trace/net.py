"""A net small enough to follow by hand, and how it is trained and traced."""

from __future__ import annotations

from collections.abc import Callable

import torch

import llmem
from llmem.lifetimes import Trace

F32 = 4
ROWS, WIDTH, CLASSES = 3, 5, 7


class Net(torch.nn.Module):
    """x [3, 5] -> body (5 -> 5) -> relu -> lm_head (5 -> 7) -> sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.lm_head = torch.nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.relu(self.body(x))).sum()


def run(
    make_step: Callable[[torch.nn.Module, torch.optim.Optimizer], Callable[[], None]],
    model: torch.nn.Module,
    steps: int = 1,
    momentum: float = 0.0,
) -> Trace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, foreach=False)
    step = make_step(model, optimizer)
    return llmem.trace(step, model=model, optimizer=optimizer, steps=steps, gpu="cpu")


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.empty(ROWS, WIDTH, device="meta")).backward()
        optimizer.step()

    return step
