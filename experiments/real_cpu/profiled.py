"""A training step on CPU as ``torch.profiler`` saw it: every allocation and free, bare of any mode.

Nothing of the recorder is active here, so autograd works in place wherever it does in a user's
run. The profiler reports the allocations of the CPU allocator, kernel scratch included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from llmem.spec import RunSpec
from llmem.trace.build import prepare
from llmem.trace.run import frees_by_reference_count, quiet


@dataclass(frozen=True)
class Block:
    """One allocation: bytes, start and end (ns; end is None if it outlives the profile).

    ``ops`` are the ops running when it was made, outermost first; ``within`` are those of them
    that were still the same call when the block was freed.
    """

    nbytes: int
    born: int
    died: int | None
    ops: tuple[str, ...]
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What the steps allocated on top of the bytes that were there before."""

    before: int
    blocks: list[Block]

    def peak(self, ignored: frozenset[int] = frozenset()) -> tuple[int, int]:
        """(bytes, ns) of the maximum, leaving out the blocks whose index is in ``ignored``."""
        moves = [
            (when, sign * block.nbytes)
            for index, block in enumerate(self.blocks)
            if index not in ignored
            for when, sign in ((block.born, 1), (block.died, -1))
            if when is not None
        ]
        moves.sort()
        curve = np.cumsum([nbytes for _, nbytes in moves])
        top = int(np.argmax(curve))
        return self.before + int(curve[top]), moves[top][0]

    def scratch(self, recorded: set[str]) -> frozenset[int]:
        """Indices of blocks made and freed inside one call of an op named in ``recorded``.

        A recorder sees such a call as one op, so what lives and dies inside is its kernel's own.
        """
        return frozenset(i for i, b in enumerate(self.blocks) if not recorded.isdisjoint(b.within))

    def alive(self, when: int) -> list[int]:
        """Indices of the blocks alive at ``when`` (ns)."""
        return [
            index
            for index, block in enumerate(self.blocks)
            if block.born <= when and (block.died is None or block.died > when)
        ]


def profile_spec(spec: RunSpec, steps: int = 2) -> Profile:
    """Run ``steps`` real steps of ``spec`` on CPU under the profiler."""
    prepared = prepare(spec, device="cpu", cuda=False)
    before = _storage_bytes([*prepared.model.parameters(), *prepared.model.buffers()])
    with quiet(), frees_by_reference_count():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(steps):
                prepared.step()
        return Profile(before, _blocks(profiler))


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass
class _Call:
    name: str
    start: int
    end: int
    thread: int


def _blocks(profiler: Any) -> list[Block]:
    """Pair allocations with frees by address, and both with the ops around them."""
    moves: list[Any] = []
    calls: list[_Call] = []
    _walk(profiler.profiler.kineto_results.experimental_event_tree(), moves, calls)
    moves.sort(key=lambda node: node.start_time_ns)
    around = _around(moves, calls)
    blocks: list[Block] = []
    open_blocks: dict[int, int] = {}
    for move, stack in zip(moves, around, strict=True):
        fields = move.extra_fields
        when = move.start_time_ns
        if fields.alloc_size > 0:
            open_blocks[fields.ptr] = len(blocks)
            names = tuple(call.name for call in stack)
            blocks.append(Block(fields.alloc_size, when, None, names))
        elif (index := open_blocks.pop(fields.ptr, None)) is not None:
            block = blocks[index]
            within = tuple(call.name for call in stack if call.start <= block.born)
            blocks[index] = replace(block, died=when, within=within)
    return blocks


def _walk(nodes: list[Any], moves: list[Any], calls: list[_Call]) -> None:
    stack = list(nodes)
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.typed[0].name == "Allocation":
            moves.append(node)
        elif node.name.startswith("aten::"):
            name = node.name.removeprefix("aten::")
            calls.append(_Call(name, node.start_time_ns, node.end_time_ns, node.start_tid))


def _around(moves: list[Any], calls: list[_Call]) -> list[list[_Call]]:
    """For each move, the calls of its thread that were running then, outermost first."""
    calls.sort(key=lambda call: (call.start, -call.end))
    open_calls: dict[int, list[_Call]] = {}
    found: list[list[_Call]] = []
    at = 0
    for move in moves:
        while at < len(calls) and calls[at].start <= move.start_time_ns:
            open_calls.setdefault(calls[at].thread, []).append(calls[at])
            at += 1
        stack = open_calls.setdefault(move.start_tid, [])
        stack[:] = [call for call in stack if call.end >= move.start_time_ns]
        found.append(list(stack))
    return found
