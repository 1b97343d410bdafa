"""Which context-parallel ranks do the same work (``llmem.trace.split.context_parallel``)."""

from __future__ import annotations

from llmem.spec import RunSpec


def kinds(spec: RunSpec) -> list[tuple[int, ...]]:
    """Context-parallel ranks grouped by which blocks of keys they see, rank 0's first.

    Under torch's balanced loop rank r attends with all its queries to half of each of r blocks, and
    with half its queries to the others. The first rank has only the second sort, the last only the
    first; those between have both and are taken to be as rank 1 is. Under Ulysses all are alike.

    >>> from llmem.spec import make_spec
    >>> kinds(make_spec(model="m", gpus=8, strategy="fsdp2", cp=4))
    [(0,), (1, 2), (3,)]
    """
    everyone = tuple(range(spec.cp))
    if spec.cp == 1 or spec.cp_comm == "ulysses":
        return [everyone]
    return [part for part in (everyone[:1], everyone[1:-1], everyone[-1:]) if part]


def said(members: tuple[int, ...]) -> list[str]:
    """What is assumed about ranks ``members``, of which the first is traced."""
    if len(members) < 2 or members[0] == 0:
        return []
    return [f"context parallelism: ranks {members[0]} to {members[-1]} taken to be as rank 1"]
