"""gloo whose worker threads never hold the engine's own buffers.

ProcessGroupGloo keeps a collective's tensors in a queue of its own threads and lets go of them when
the thread gets to it: a buffer that the engine has dropped dies later, at a random moment, on a
thread that the profiler does not see. NCCL has no such threads. This process group runs each
collective of gloo on copies, waits, and copies back; what it copies is allocated inside a
``gloo:`` range, so that a record can leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.futures import Future

NAME = "gloo_on_copies"
Tensors = list[torch.Tensor]

if TYPE_CHECKING:
    # torch calls a Python group with one form of each method; the stub's class overloads them.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup


class GlooOnCopies(_ProcessGroup):
    """A process group with the collectives that DDP, FSDP, DTensor and DeepSpeed call."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier(*_given(opts)).wait()
        return _done([])

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._in_place(tensors, lambda c: self._gloo.allreduce(c, *_given(opts)))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._in_place(tensors, lambda c: self._gloo.allreduce_coalesced(c, *_given(opts)))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._in_place(tensors, lambda c: self._gloo.broadcast(c, *_given(opts)))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._in_place(tensors, lambda c: self._gloo.reduce(c, *_given(opts)))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        return self._copied(
            [t for row in outputs for t in row],
            inputs,
            lambda o, i: self._gloo.allgather(_rows(o, outputs), i, *_given(opts)),
        )

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self._copied(
            [output], [input], lambda o, i: self._gloo._allgather_base(o[0], i[0], *_given(opts))
        )

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input, opts)
        return _done([])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        return self._copied(
            outputs,
            [t for row in inputs for t in row],
            lambda o, i: self._gloo.reduce_scatter(o, _rows(i, inputs), *_given(opts)),
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        return self._copied(
            [output],
            [input],
            lambda o, i: self._gloo._reduce_scatter_base(o[0], i[0], *_given(opts)),
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input, opts)
        return _done([])

    # Their names since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        return self._copied(
            [output],
            [input],
            lambda o, i: self._gloo.alltoall_base(
                o[0], i[0], output_sizes, input_sizes, *_given(opts)
            ),
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        return self._copied(
            [t for row in outputs for t in row],
            inputs,
            lambda o, i: self._gloo.gather(_rows(o, outputs), i, *_given(opts)),
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        return self._copied(
            outputs,
            [t for row in inputs for t in row],
            lambda o, i: self._gloo.scatter(o, _rows(i, inputs), *_given(opts)),
        )

    def _in_place(self, tensors: Tensors, run: Callable[[Tensors], Any]) -> Any:
        self._copied(tensors, tensors, lambda copies, _: run(copies))
        return _done(tensors)

    def _copied(
        self, outputs: Tensors, inputs: Tensors, run: Callable[[Tensors, Tensors], Any]
    ) -> Any:
        """Run a collective on copies of ``inputs`` and ``outputs``, then fill ``outputs``."""
        with torch.profiler.record_function(f"gloo:{NAME}"), torch.no_grad():
            copies = [tensor.detach().clone() for tensor in outputs]
            given = [tensor.detach().clone() for tensor in inputs]
            run(copies, given).wait()
            for tensor, copy in zip(outputs, copies, strict=True):
                tensor.detach().copy_(copy)
        return _done([])


def register() -> str:
    """Make the process group known to torch.distributed; returns the name of its backend."""
    if NAME.upper() not in dist.Backend.backend_list and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, GlooOnCopies, devices=["cpu"])
    return NAME


def hide_from_dynamo() -> None:
    """Dynamo does not look into the group, which as NCCL's would be no Python code."""
    for name, method in list(vars(GlooOnCopies).items()):
        if callable(method) and not name.startswith("__"):
            setattr(GlooOnCopies, name, torch.compiler.disable(method))


def _given(opts: Any) -> Iterable[Any]:
    return () if opts is None else (opts,)


def _rows(flat: Tensors, like: list[Tensors]) -> list[Tensors]:
    """``flat`` cut into rows of the lengths of ``like``."""
    rest = iter(flat)
    return [[next(rest) for _ in row] for row in like]


def _done(result: Tensors) -> Any:
    """Work that is complete, with ``result`` as its future's value (DDP's reducer reads it)."""
    future: Future[Tensors] = Future()
    future.set_result(result)
    c10d: Any = _distributed_c10d  # whose stub lacks the function
    return c10d._create_work_from_future(future)
