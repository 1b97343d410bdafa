"""One benchmarked op, and how the benchmark measures it.

linkedin/Liger-Kernel, benchmark/scripts/utils.py (``_test_memory``, ``run_memory_benchmark``): the
measured function runs ten times with the peak counter reset before each, gradients are never
cleared, so from the second time on they are there. What the setup made stays alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmem.gpu.devices import DeviceProfile

META = torch.device("meta")
Config = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A row's configuration: the swept value ``x``, the fixed ones, the device and the date."""

    x: int
    config: Config
    device: DeviceProfile
    date: str
    provider: str

    @property
    def dtype(self) -> torch.dtype:
        name = self.config.get("dtype", "torch.float32").removeprefix("torch.")
        return getattr(torch, name)

    def size(self, *names: str) -> int:
        """The value under the first of ``names`` that is given, else the swept one."""
        given = (self.config[name] for name in names if self.config.get(name) is not None)
        return int(next(given, self.x))


@dataclass
class Case:
    """``forward`` makes the output, ``backward`` runs from it; ``keep`` holds what lives on.

    ``always_full``: the script measures forward and backward together whatever the mode says.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    keep: tuple[Any, ...] = ()
    always_full: bool = False

    def full(self) -> None:
        output = self.forward()
        self.backward(output)


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=META, requires_grad=grad)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, device=META)


def from_noise(output: torch.Tensor) -> None:
    """Backward from a fresh random gradient, the graph kept."""
    output.backward(torch.randn_like(output), retain_graph=True)


def from_loss(output: torch.Tensor) -> None:
    output.backward()


def from_kept_loss(output: torch.Tensor) -> None:
    output.backward(retain_graph=True)


def from_fixed(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Backward from a gradient that the setup made."""
    return lambda output: output.backward(gradient, retain_graph=True)


def cublas_workspaces() -> None:
    """Leave behind what cuBLAS keeps for the process: one workspace for each of its two threads.

    Speed was measured before memory, backward passes included, so they are there from the start.
    """
    small = randn(1, 1, grad=True)
    (small @ small).sum().backward()


def measured_step(case: Callable[[], Case], mode: str) -> Callable[[], Any]:
    """A step to trace: its first call sets the benchmark up, each later one is a measured run."""
    made: list[Case] = []
    outputs: list[Any] = []

    def set_up() -> None:
        made.append(case())
        if mode == "backward" and not made[0].always_full:
            outputs.append(made[0].forward())
            outputs.append(torch.randn_like(outputs[0]))

    def step() -> None:
        if not made:
            set_up()
        elif outputs:
            outputs[0].backward(outputs[1], retain_graph=True)
        elif mode == "forward" and not made[0].always_full:
            made[0].forward()
        else:
            made[0].full()

    return step
