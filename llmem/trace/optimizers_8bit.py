"""bitsandbytes' optimizers on meta: the states they keep, nothing computed.

Read in bitsandbytes 0.50.2, optim/optimizer.py (``Optimizer8bit.get_state_buffer``,
``Optimizer1State.init_state``, ``Optimizer2State.init_state``), optim/ademamix.py and
``create_dynamic_map`` of functional.py; the block size is 256 since 0.44. The update is one kernel
that writes parameter and states in place and allocates nothing (csrc/kernels.cu).
transformers/trainer_optimizer.py ``_get_bitsandbytes_optimizer`` says what a name stands for, and
trainer.py ``create_optimizer`` which parameters stay in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.optim_names import BITSANDBYTES

BLOCK = 256
"""Elements that share one absmax (fp32)."""

CODES = 256
"""fp32 entries of a quantization map; an optimizer has one for each state."""

MIN_8BIT_SIZE = 4096
"""A parameter with fewer elements keeps its states in fp32."""

MIN_PAGED_SIZE = 100_000
"""States of a parameter with fewer elements are not paged."""

_LIBRARY = torch.library.Library("llmem", "FRAGMENT")
_LIBRARY.define("optimizer_update(Tensor(a!) parameter, Tensor gradient, Tensor[] states) -> ()")
_LIBRARY.impl("optimizer_update", lambda parameter, gradient, states: None, "Meta")


@dataclass(frozen=True)
class Kind:
    """What a name of ``TrainingArguments.optim`` asks of bitsandbytes."""

    algorithm: str
    bits: int
    paged: bool

    @property
    def name(self) -> str:
        """As bitsandbytes calls the class with these arguments."""
        return f"{'Paged' if self.paged else ''}{self.algorithm}{self.bits}bit"


def kind_of(optim: str) -> Kind | None:
    """None if ``optim`` is not one of bitsandbytes'.

    >>> kind_of("paged_adamw_8bit")
    Kind(algorithm='AdamW', bits=8, paged=True)
    """
    if optim not in BITSANDBYTES:
        return None
    names = {"adamw": "AdamW", "lion": "Lion", "rmsprop": "RMSprop", "ademamix": "AdEMAMix"}
    algorithm = next(name for part, name in names.items() if part in optim)
    return Kind(algorithm, 8 if "8bit" in optim else 32, "paged" in optim)


def build(parameters: Iterable[Any], kind: Kind, *, lr: float, cuda: bool) -> torch.optim.Optimizer:
    """bitsandbytes' own optimizer, or its stand-in where the parameters are on meta.

    ``cuda``: whose choices count; on a CPU nothing is paged. Raises LlmemError where the library
    is needed and not installed.
    """
    groups = list(parameters)
    if groups and isinstance(groups[0], dict):
        groups = [{**group, "params": list(group["params"])} for group in groups]
    first = groups[0]["params"][0] if groups and isinstance(groups[0], dict) else groups[0]
    if first.is_meta:
        stand_in: type[States] = type(kind.name, (States,), {})
        return stand_in(groups, kind, cuda=cuda)
    try:
        library: Any = import_module("bitsandbytes.optim")
    except ImportError as error:
        raise LlmemError(
            f"{kind.name} needs bitsandbytes to run for real; run: pip install bitsandbytes"
        ) from error
    options: dict[str, Any] = {"lr": lr, "optim_bits": kind.bits}
    if kind.algorithm != "RMSprop":  # the only one that has no paged form
        options["is_paged"] = kind.paged
    made: torch.optim.Optimizer = getattr(library, kind.algorithm)(groups, **options)
    return made


def keep_embeddings_in_32_bits(model: torch.nn.Module, optimizer: Any) -> None:
    """As Trainer does with 8-bit optimizers: the states of every ``nn.Embedding`` are fp32."""
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    if isinstance(optimizer, States):
        optimizer.in_32_bits.update(id(module.weight) for module in embeddings)
        return
    manager = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in embeddings:
        manager.register_module_override(module, "weight", {"optim_bits": 32})


class States(torch.optim.Optimizer):
    """One or two states per parameter: fp32, or uint8 codes with an absmax for each block.

    AdamW and AdEMAMix have two states (AdEMAMix's first is two averages), Lion and RMSprop one.
    """

    def __init__(self, parameters: Iterable[Any], kind: Kind, *, cuda: bool) -> None:
        super().__init__(parameters, {})
        self.in_32_bits: set[int] = set()
        """Ids of the parameters whose states are fp32 whatever their size."""
        self._kind = kind
        self._paged = kind.paged and cuda
        self._maps: list[torch.Tensor] = []

    @property
    def _averages(self) -> list[int]:
        """How many averages each state holds."""
        return {"AdamW": [1, 1], "AdEMAMix": [2, 1]}.get(self._kind.algorithm, [1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = self._new(parameter)
                parameter.data = parameter.data.contiguous()
                parameter.grad = parameter.grad.contiguous()
                states = [t for t in self.state[parameter].values() if isinstance(t, torch.Tensor)]
                torch.ops.llmem.optimizer_update(parameter, parameter.grad, states)

    def _new(self, parameter: torch.Tensor) -> dict[str, Any]:
        small = parameter.numel() < MIN_8BIT_SIZE
        if self._kind.bits == 32 or small or id(parameter) in self.in_32_bits:
            return {"step": 0, **self._buffers(parameter, torch.float32)}
        device = parameter.device
        if not self._maps:
            self._maps = [
                torch.empty(CODES, dtype=torch.float32, device=device) for _ in self._averages
            ]
        blocks = -(-parameter.numel() // BLOCK)
        state: dict[str, Any] = {"step": 0, **self._buffers(parameter, torch.uint8)}
        for number, (averages, codes) in enumerate(zip(self._averages, self._maps, strict=True), 1):
            shape = (blocks,) if averages == 1 else (averages, blocks)
            state[f"qmap{number}"] = codes
            state[f"absmax{number}"] = torch.zeros(shape, dtype=torch.float32, device=device)
        return state

    def _buffers(self, parameter: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Managed memory (paged) is no allocation of the GPU: one element on the host, expanded."""
        paged = self._paged and parameter.numel() >= MIN_PAGED_SIZE
        found = {}
        for number, averages in enumerate(self._averages, 1):
            shape = parameter.shape if averages == 1 else (averages, *parameter.shape)
            if paged:
                found[f"state{number}"] = torch.empty(1, dtype=dtype, device="cpu").expand(shape)
            elif averages == 1:
                found[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
            else:
                found[f"state{number}"] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return found
