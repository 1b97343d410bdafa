"""A pipeline stage under FSDP2, as torchtitan applies it: layers first, then the stage."""

from __future__ import annotations

from typing import Any

from llmem.errors import LlmemError
from llmem.spec import RunSpec
from llmem.trace.split.process_group import sharing


def data_mesh(spec: RunSpec, ranks: Any) -> Any:
    """The mesh of the replicas of this rank's stages, a part of that of all ``ranks`` (``rank_mesh``)."""
    if spec.dp_replicate_size or spec.hybrid_shard:
        raise LlmemError("--hybrid-shard with --pp cannot be measured; leave one of them out")
    return sharing(ranks)
