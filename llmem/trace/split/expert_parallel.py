"""Expert parallelism: a rank holds whole experts, and tokens travel to them.

transformers' own code does it (``transformers/distributed/expert_parallel.py``, 5.24): the model's
``ep_plan`` shards the experts' weights along the dimension of experts, and ``AllToAllEP`` brings
them their tokens: (token, expert) pairs are sorted by expert into a send buffer, exchanged by an
all-to-all, go through this rank's experts, come back by a second all-to-all and are put in order,
weighted and summed. Two plans use it:

``transformers``  the ranks share one batch (``DistributedConfig(tp_size=N, ep_size=N)``, with ``--tp
                  N`` for its tensor-parallel rest, else with that whole): each sends a slice of its
                  tokens, and the slices' results are gathered.
``alltoall``      every rank has a batch of its own and sends all of its tokens (``fsdp_size=M,
                  ep_size=N``; DeepSpeed-MoE and torchtitan do the same). A data-parallel engine works
                  on all M ranks with what is no expert, and on the M / N that hold the same experts.

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
from llmem.trace.split.process_group import make_mesh


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
        (f"--method {spec.method}", spec.method not in ("full", "lora")),
        (f"--quantization {spec.quantization}", spec.quantization != "none"),
        ("--task generate", spec.task == "generate"),
    ):  # fmt: skip
        if given:
            raise LlmemError(f"--ep with {option} is not supported; leave one of them out")
    if spec.ep_plan == "alltoall":
        _check_own_batches(spec)
    if spec.routing_balance * spec.ep < 1:
        raise LlmemError(
            f"--routing-balance {spec.routing_balance:g} sends the busiest of {spec.ep} ranks more "
            f"tokens than there are; give at least {1 / spec.ep:g}"
        )


def _check_own_batches(spec: RunSpec) -> None:
    if spec.tp > 1:
        raise LlmemError(
            "--ep-plan alltoall with --tp is not supported; leave --tp out, or use --ep-plan transformers"
        )
    if spec.strategy == "fsdp2" and spec.shard_ranks % spec.ep:
        raise LlmemError(
            f"--ep {spec.ep} does not divide the {spec.shard_ranks} ranks that share a copy of the model; "
            "use a divisor"
        )


def shard_experts(model: Any, spec: RunSpec, notes: list[str]) -> None:
    """Leave each rank its experts and hook them, in the current process group.

    Raises LlmemError for models without experts, or whose experts ``spec.ep`` does not divide.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # peft's, changed in place
    if hasattr(model, "_expand_parallel_plan") and not getattr(model, "ep_plan", None):
        raise LlmemError(f"transformers has no ep_plan for {type(model).__name__}; leave --ep out")
    _check_adapters(model)
    try:
        from transformers.distributed.expert_parallel import (
            EPImplementationInterface,
            apply_expert_parallelism,
        )

        plan = model._expand_parallel_plan(dict(model.ep_plan))
        EPImplementationInterface.register(_NAME, partial(_assumed_routing(), spec.routing_balance))
        experts, batches = _meshes(spec)
        apply_expert_parallelism(model, experts, batches, plan, ep_implementation=_NAME)
        _remember_replicas(model, experts)
        if spec.strategy == "ddp" and spec.tp == 1:
            _as_plain_tensors(model)
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


def _check_adapters(model: torch.nn.Module) -> None:
    """transformers' plan looks for the experts' weights where peft's wrapper of a parameter lies."""
    wrapped = [name for name, module in model.named_modules() if hasattr(module, "parameter_name")]
    if wrapped:
        raise LlmemError(
            f"--ep with adapters on parameters of experts ({wrapped[0]}) is not supported: transformers' "
            "ep_plan does not know them; leave target_parameters out"
        )


def split_experts(model: torch.nn.Module) -> list[str]:
    """Names of the modules of experts that ``shard_experts`` split."""
    return [name for name, module in model.named_modules() if _is_split(module)]


def _is_split(module: torch.nn.Module) -> bool:
    """transformers' own mark, of ``MoEParamShard``."""
    return getattr(module, "_is_expert_parallel", False) is True


def _remember_replicas(model: torch.nn.Module, experts: Any) -> None:
    for module in filter(_is_split, model.modules()):
        module._llmem_expert_mesh = experts._get_root_mesh()


def replicas_of_experts(model: torch.nn.Module) -> Any:
    """The mesh of the ranks that hold the same experts as this one ("efsdp" in transformers).

    With a first dimension where the model has copies (HSDP).
    """
    root: Any = next(filter(_is_split, model.modules()))._llmem_expert_mesh
    return root["copy", "replica"] if root["copy"].size() > 1 else root["replica"]


def _as_plain_tensors(model: torch.nn.Module) -> None:
    """DistributedDataParallel takes no DTensors: the experts of a rank become tensors of their own."""
    for module in filter(_is_split, model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole: Any = parameter
            part = torch.nn.Parameter(whole.to_local().detach(), requires_grad=whole.requires_grad)
            module.register_parameter(name, part)


def cast_inputs_of_experts(model: torch.nn.Module, dtype: str) -> None:
    """Act out ``MixedPrecisionPolicy(cast_forward_inputs=True)`` of the experts' own FSDP2 unit.

    Routing weights in fp32, as Mixtral's router gives them, reach the experts in ``dtype``.
    """
    wanted = getattr(torch, dtype)

    def cast(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(wanted) if x.is_floating_point() else x for x in inputs)

    for module in filter(_is_split, model.modules()):
        module.register_forward_pre_hook(cast)


def _said(model: Any, spec: RunSpec) -> list[str]:
    whose = "the same batch on every rank"
    if spec.ep_plan == "alltoall":
        whose = "a batch of its own on every rank"
        if spec.strategy == "none":
            whose += "; gradients of what is no expert are reduced in place"
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

    world = dist.get_world_size()
    hybrid = spec.strategy == "fsdp2" and spec.ep_plan == "alltoall"
    copies = max(1, world // spec.shard_ranks) if hybrid else 1
    sizes = (copies, world // copies // spec.ep, spec.ep)
    experts = make_mesh(sizes, ("copy", "replica", "ep"))["ep"]
    if spec.ep_plan == "transformers":
        return experts, experts
    return experts, make_mesh((world, 1), ("fsdp", "tp"))["tp"]


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
