"""What FSDP1 and FSDP2 keep on the host when they offload: parameters, gradients, optimizer.

``CPUOffload(offload_params=True)`` and ``CPUOffloadPolicy()`` offload all of them; neither can
offload the optimizer alone. The step runs on the CPU, so that none of it is on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmem.errors import LlmemError
from llmem.lifetimes import Trace
from llmem.spec import RunSpec


def check_offload(spec: RunSpec) -> None:
    """Raises LlmemError for what FSDP cannot offload."""
    if spec.offload == "optimizer":
        raise LlmemError(
            f"{spec.strategy} offloads parameters, gradients and optimizer states together; use "
            "--offload all"
        )


def host_note(name: str, shards: Sequence[tuple[int, bool]], step: Trace) -> str:
    """A sentence for the assumptions; ``shards``: bytes of each, and whether it is trained.

    Gradients have the shards' dtype. ``step`` is the optimizer's, traced on the shards: its states
    are the same on the host.
    """
    mib = 2**20
    held = sum(nbytes for nbytes, _ in shards)
    gradients = sum(nbytes for nbytes, trained in shards if trained)
    states = int(step.optimizer.get("state_bytes", 0))
    return (
        f"{name}: {(held + gradients + states) / mib:,.1f} MiB of host memory on each rank: "
        f"parameters {held / mib:,.1f} and gradients {gradients / mib:,.1f} (pinned), optimizer "
        f"states {states / mib:,.1f}; clipping and the step run on the CPU"
    )
