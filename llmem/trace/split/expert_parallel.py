"""Expert parallelism: a rank holds whole experts, and tokens travel to them.

transformers' own code does it (``transformers/distributed/expert_parallel.py``, 5.24): the model's
``ep_plan`` shards the experts' weights along the dimension of experts, and ``AllToAllEP`` brings
them their tokens: (token, expert) pairs are sorted by expert into a send buffer, exchanged by an
all-to-all, go through this rank's experts, come back by a second all-to-all and are put in order,
weighted and summed. Two plans use it:

``transformers``  the ranks share one batch (``DistributedConfig(tp_size=N, ep_size=N)``, with ``--tp
                  N`` for its tensor-parallel rest, else with that whole): each sends a slice of its
                  tokens, and the slices' results are gathered.
``alltoall``      every rank has a batch of its own and sends all of its tokens (``fsdp_size=N,
                  ep_size=N``; DeepSpeed-MoE and torchtitan do the same).

How many tokens a rank receives depends on what the router learned. ``routing_balance`` is an
average rank's number over the busiest one's; the rank that is traced is the busiest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.spec import RunSpec


def check_expert_parallel(spec: RunSpec) -> None:
    """Raises LlmemError if ``spec.ep`` does not go with the rest of the run."""
    if spec.ep == 1:
        if spec.routing_balance != 1.0:
            raise LlmemError("--routing-balance is of expert-parallel ranks; add --ep N")
        return
    for option, given in (
        ("--tp of another degree", spec.tp not in (1, spec.ep)), ("--pp", spec.pp > 1),
        (f"--tp-plan {spec.tp_plan}", spec.tp > 1 and spec.tp_plan != "transformers"),
        ("--cp", spec.cp > 1),
        (f"--method {spec.method}", spec.method != "full"),
        ("--task generate", spec.task == "generate"),
    ):  # fmt: skip
        if given:
            raise LlmemError(f"--ep with {option} is not supported; leave one of them out")
    if spec.ep_plan == "alltoall" and (spec.gpus, spec.strategy, spec.tp) != (
        spec.ep, "none", 1
    ):
        raise LlmemError(
            "--ep-plan alltoall is known where all GPUs share one set of experts; give --gpus "
            f"{spec.ep} --strategy none without --tp, or --ep-plan transformers"
        )
    if spec.routing_balance * spec.ep < 1:
        raise LlmemError(
            f"--routing-balance {spec.routing_balance:g} sends the busiest of {spec.ep} ranks more "
            f"tokens than there are; give at least {1 / spec.ep:g}"
        )


def shard_experts(model: Any, spec: RunSpec, notes: list[str]) -> None:
    """Leave each rank its experts and hook them, in the current process group.

    Raises LlmemError for models without experts, or whose experts ``spec.ep`` does not divide.
    """
    if hasattr(model, "_expand_parallel_plan") and not getattr(model, "ep_plan", None):
        raise LlmemError(f"transformers has no ep_plan for {type(model).__name__}; leave --ep out")
    try:
        from transformers.distributed.expert_parallel import (
            EPImplementationInterface,
            apply_expert_parallelism,
        )

        plan = model._expand_parallel_plan(dict(model.ep_plan))
        EPImplementationInterface.register(_NAME, partial(_assumed_routing(), spec.routing_balance))
        experts, batches = _meshes(spec)
        apply_expert_parallelism(model, experts, batches, plan, ep_implementation=_NAME)
    except (ImportError, AttributeError) as error:
        raise LlmemError(
            "--ep needs transformers 5.24 or later, whose ep_plan exchanges tokens; "
            f"{installed('transformers')} is installed ({error})"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise LlmemError(
            f"transformers refuses --ep {spec.ep}: {str(error).splitlines()[0].rstrip('.')}"
        ) from None
    notes += _said(model, spec)


def _said(model: Any, spec: RunSpec) -> list[str]:
    whose = "the same batch on every rank" if spec.ep_plan == "transformers" else (
        "a batch of its own on every rank; gradients of what is no expert are reduced in place"
    )  # fmt: skip
    even = "as many tokens as any other" if spec.routing_balance == 1 else (
        f"{1 / spec.routing_balance:.3g} times the tokens of an average rank"
    )  # fmt: skip
    return [
        f"expert parallelism: transformers' ep_plan of {type(model).__name__} on {spec.ep} ranks, "
        f"tokens exchanged by all-to-all, {whose} (--ep-plan {spec.ep_plan})",
        f"routing: this rank's experts receive {even} (--routing-balance {spec.routing_balance:g})",
    ]


def _meshes(spec: RunSpec) -> tuple[Any, Any]:
    """The mesh of the ranks that share a set of experts, and that of those that share a batch."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (dist.get_world_size() // spec.ep, spec.ep)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    with torch.profiler.record_function("host:device mesh"):
        experts = init_device_mesh(device, sizes, mesh_dim_names=("replica", "ep"))
        if spec.ep_plan == "transformers":
            return experts["ep"], experts["ep"]
        alone = init_device_mesh(device, (sizes[0] * sizes[1], 1), mesh_dim_names=("fsdp", "tp"))
        return experts["ep"], alone["tp"]


# -- routing ---------------------------------------------------------------------------------------

_NAME = "llmem_assumed_routing"


def split_sizes(pairs: int, ranks: int, balance: float) -> tuple[list[int], list[int]]:
    """(token, expert) pairs sent to each rank, and received from each, by the busiest of them.

    Every rank has ``pairs``. The busiest sends itself as many as others send it; what remains goes
    to the others evenly.

    >>> split_sizes(8, 2, 1.0), split_sizes(8, 2, 0.8)
    (([4, 4], [4, 4]), ([5, 3], [5, 5]))
    """
    mine = min(pairs, ceil(pairs / ranks / balance))
    rest = pairs - mine
    others = [rest // (ranks - 1) + (place < rest % (ranks - 1)) for place in range(ranks - 1)]
    return [mine, *others], [mine] * ranks


def _assumed_routing() -> Callable[..., Any]:
    """The class of transformers' all-to-all with the assumed number of tokens for each rank."""
    from transformers.distributed.expert_parallel import AllToAllEP

    class AssumedRouting(AllToAllEP):  # type: ignore[misc]
        """Meta tensors have no counts, so they are answered; real tokens are dealt out in turn."""

        def __init__(self, balance: float, *args: Any) -> None:
            super().__init__(*args)
            self._balance = balance

        def __call__(self, hidden: Any, experts: torch.Tensor, weights: Any) -> Any:
            if not experts.is_meta:
                number = self.num_local_experts * self.ep_mesh.size()
                dealt = torch.arange(experts.numel(), device=experts.device) % number
                experts.data.copy_(dealt.view_as(experts))  # unseen by autograd, which kept them
                del dealt
            return super().__call__(hidden, experts, weights)

        def _dispatch_tokens(self, hidden: Any, experts: torch.Tensor, weights: Any) -> Any:
            if not experts.is_meta:
                return super()._dispatch_tokens(hidden, experts, weights)
            tokens = ceil(experts.shape[0] / self.tp_mesh.size())
            pairs = tokens * experts.shape[-1]
            with _counts_are(split_sizes(pairs, self.ep_mesh.size(), self._balance)):
                return super()._dispatch_tokens(hidden, experts, weights)

    return AssumedRouting


@contextmanager
def _counts_are(sizes: tuple[list[int], list[int]]) -> Iterator[None]:
    """``Tensor.tolist``, by which the split sizes reach the host, answers ``sizes``."""
    original = torch.Tensor.tolist
    torch.Tensor.tolist = lambda _: list(sizes)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.tolist = original  # type: ignore[method-assign]
