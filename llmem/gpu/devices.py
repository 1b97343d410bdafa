"""What is known about a GPU before it is rented: capacity, architecture, bytes outside the allocator.

Every figure is a `Figure`: the most likely bytes, a low and a high bound, and where it was read.
The facts are in `profiles/nvidia.json`; this module only reads and names them. Three notions of
"the memory of the card" differ and are kept apart:

- `smi_total`: what nvidia-smi prints as total (81,920 MiB on an A100-80GB);
- `capacity`: what the driver gives to CUDA (`cudaMemGetInfo` total,
  `torch.cuda.get_device_properties().total_memory`; 79.25 GiB there): what can run out;
- capacity minus `overhead(...)`: what is left for the caching allocator to reserve.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from llmem.errors import LlmemError

MIB = 2**20

# CUDA C++ programming guide, table "technical specifications per compute capability":
# resident threads per SM, and opt-in shared memory per block in KiB.
_MAX_THREADS_PER_SM = {(7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536,
                       (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}
_SHARED_KIB_PER_BLOCK = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99,
                         (9, 0): 227, (10, 0): 227, (12, 0): 99}


@dataclass(frozen=True)
class Figure:
    """A number of bytes with its bounds and its source."""

    value: int
    low: int
    high: int
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(f"bounds out of order: {self.low} <= {self.value} <= {self.high}")

    @classmethod
    def exactly(cls, value: int, source: str) -> Figure:
        """A figure without uncertainty, such as one the user measured."""
        return cls(value, value, value, source)

    def __add__(self, other: Figure) -> Figure:
        sources = [s for s in (self.source, other.source) if s]
        return Figure(self.value + other.value, self.low + other.low, self.high + other.high,
                      "; ".join(dict.fromkeys(sources)))


NOTHING = Figure.exactly(0, "")


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device. Sizes in bytes; `compute_capability` is (0, 0) on the CPU.

    `context` is the bare CUDA context with lazily loaded modules (default since CUDA 11.7);
    `handles` is what cuBLAS, cuDNN and the kernels loaded during a training step add to it, outside
    the caching allocator (their workspaces are inside it, see `llmem.gpu.scratch`).
    """

    name: str
    kind: str  # "cuda" or "cpu"
    capacity_figure: Figure  # zero on the CPU: host memory is not a property of the device
    smi_total: int | None
    compute_capability: tuple[int, int]
    sm_count: int
    context: Figure
    handles: Figure
    nccl_pair: Figure
    nccl_group: Figure

    @property
    def capacity(self) -> int:
        """Bytes that the driver gives to CUDA; 0 on the CPU, which has no limit of its own."""
        return self.capacity_figure.value

    @property
    def is_cuda(self) -> bool:
        """False for the CPU profile: no rounding, no context, no cuBLAS."""
        return self.kind == "cuda"

    @property
    def max_threads_per_sm(self) -> int:
        """Resident threads per SM (cudaDeviceProp.maxThreadsPerMultiProcessor)."""
        return _MAX_THREADS_PER_SM[self.compute_capability]

    @property
    def shared_memory_per_block(self) -> int:
        """Opt-in shared memory of a block, bytes (cudaDeviceProp.sharedMemPerBlockOptin)."""
        return 1024 * _SHARED_KIB_PER_BLOCK[self.compute_capability]

    def nccl(self, ranks: int) -> Figure:
        """Device bytes of one NCCL communicator of `ranks` ranks: none for a single rank."""
        if ranks <= 1 or not self.is_cuda:
            return NOTHING
        return self.nccl_pair if ranks == 2 else self.nccl_group

    def overhead(self, communicators: Iterable[int] = ()) -> Figure:
        """What nvidia-smi shows beyond reserved: context, handles, one communicator per entry.

        `communicators` holds the number of ranks of each (data, tensor, pipeline ... group).
        """
        return sum((self.nccl(ranks) for ranks in communicators), self.context + self.handles)

    def override(self, *, capacity: int | None = None, context: int | None = None,
                 handles: int | None = None, nccl: int | None = None) -> DeviceProfile:
        """The same device with measured bytes in place of the table's; they carry no uncertainty.

        `nccl` stands for each communicator of two ranks or more.
        """
        given = {"capacity_figure": capacity, "context": context, "handles": handles,
                 "nccl_pair": nccl, "nccl_group": nccl}
        changes: dict[str, Any] = {}
        for field, value in given.items():
            if value is None:
                continue
            if value < 0:
                raise LlmemError(f"The measured {field} of {self.name} cannot be negative ({value}): "
                                 "give it in bytes.")
            changes[field] = Figure.exactly(value, "given by the user")
        return replace(self, **changes)


CPU = DeviceProfile("cpu", "cpu", NOTHING, None, (0, 0), 0, NOTHING, NOTHING, NOTHING, NOTHING)


def _figure(entry: dict[str, Any]) -> Figure:
    value, low, high = (int(entry[key] * MIB) for key in ("value", "low", "high"))
    return Figure(value, low, high, entry["source"])


@cache
def _table() -> tuple[dict[str, DeviceProfile], dict[str, str]]:
    """Profiles by canonical name, and the canonical name of every normalised spelling."""
    text = resources.files("llmem.gpu").joinpath("profiles/nvidia.json").read_text("utf-8")
    facts = json.loads(text)
    pair, group = (_figure(facts["nccl"][key]) for key in ("pair_mib", "group_mib"))
    profiles, spellings = {"cpu": CPU}, {"cpu": "cpu"}
    for entry in facts["devices"]:
        name = entry["name"]
        major, minor = entry["compute_capability"]
        profiles[name] = DeviceProfile(
            name, "cuda", _figure(entry["capacity_mib"]), entry["smi_total_mib"] * MIB,
            (major, minor), entry["sm_count"], _figure(entry["context_mib"]),
            _figure(entry["handles_mib"]), pair, group)
        for spelling in (name, *entry["aliases"]):
            spellings[_normal(spelling)] = name
    return profiles, spellings


def _normal(name: str) -> str:
    """Lower case without separators and vendor words: `NVIDIA A100-SXM4-80GB` -> `a100sxm480gb`."""
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower().replace("_", "-"))
    return re.sub(r"[^a-z0-9]", "", words)


def list_devices() -> list[DeviceProfile]:
    """Every known device, the CPU first."""
    return list(_table()[0].values())


def get_device(name: str) -> DeviceProfile:
    """The profile called `name`, in any case and by any alias or by the name the driver gives.

    Raises LlmemError with the nearest names when it is unknown.
    """
    profiles, spellings = _table()
    wanted = _normal(name)
    if wanted in spellings:
        return profiles[spellings[wanted]]
    near = difflib.get_close_matches(wanted, spellings, n=5, cutoff=0.5)
    names = list(dict.fromkeys(spellings[n] for n in near)) or list(profiles)
    raise LlmemError(f"Unknown GPU {name!r}: did you mean {', '.join(names[:4])}? "
                     "`llmem gpus` lists them all.")
