"""Which modules FSDP wraps, on models small enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmem.errors import LlmemError
from llmem.parallel.fsdp.wrapping import wrapped_names
from llmem.parallel.units import units_of
from llmem.spec import RunSpec, make_spec
from tests.parallel.toy import Toy, toy_trace


def spec(strategy: str = "fsdp", **fields: Any) -> RunSpec:
    return make_spec(model="gpt2", gpus=2, strategy=strategy, **fields)


def test_classes_by_name() -> None:
    wrap = {"fsdp_transformer_layer_cls_to_wrap": ("Block",)}
    assert wrapped_names(Toy(), spec(**wrap)) == ["blocks.0", "blocks.1"]
    assert wrapped_names(Toy(), spec(fsdp_transformer_layer_cls_to_wrap=())) == []
    both = spec(fsdp_transformer_layer_cls_to_wrap=("Block", "ModuleList"))
    assert wrapped_names(Toy(), both) == ["blocks", "blocks.0", "blocks.1"]


def test_an_unknown_class_is_answered_with_those_that_exist() -> None:
    with pytest.raises(LlmemError, match="can name Block, Linear, ModuleList"):
        wrapped_names(Toy(), spec(fsdp_transformer_layer_cls_to_wrap=("LlamaLayer",)))


def test_sizes_as_fsdp1_counts_them() -> None:
    # each linear has 36 parameters, the blocks together 72, all of it 108
    leaves = ["embed", "blocks.0.linear", "blocks.1.linear"]
    assert wrapped_names(Toy(), spec(fsdp_min_num_params=36)) == leaves
    # 37: no linear is large enough, nor is a block; the list that holds 72 is never wrapped
    assert wrapped_names(Toy(), spec(fsdp_min_num_params=37)) == []


@pytest.mark.parametrize("least", [1, 20, 36, 50, 90, 120])
def test_sizes_as_torch_wraps_them(least: int) -> None:
    """torch's own recursion, with a wrapper that only marks."""
    from functools import partial

    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    class Marked(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.inner = module

    model = torch.nn.Sequential(torch.nn.Linear(9, 4), Toy(), torch.nn.Sequential(Toy(), Toy()))
    expected = wrapped_names(model, spec(fsdp_min_num_params=least))
    policy = partial(size_based_auto_wrap_policy, min_num_params=least)
    _recursive_wrap(model, policy, Marked, set(), set(), only_wrap_children=True)  # type: ignore[arg-type]
    names = [n for n, m in model.named_modules() if isinstance(m, Marked)]
    assert [n.replace(".inner", "") for n in names] == expected


def test_sizes_with_which_accelerates_fsdp2_fails() -> None:
    with pytest.raises(LlmemError, match="refuses the container blocks"):
        wrapped_names(Toy(), spec("fsdp2", fsdp_min_num_params=50))
    assert wrapped_names(Toy(), spec("fsdp2", fsdp_min_num_params=72)) == []


def test_a_weight_of_two_units_is_refused() -> None:
    model = Toy()
    model.blocks[1].linear.weight = model.embed.weight
    with pytest.raises(LlmemError, match="are one weight"):
        wrapped_names(model, spec(fsdp_transformer_layer_cls_to_wrap=("Block",)))


def test_a_units_backward_is_around_those_inside_it() -> None:
    trace = toy_trace(steps=1)
    units = {u.name: u for u in units_of(trace, ["blocks", "blocks.0", "blocks.1"])}
    inner = [units[f"blocks.{i}"].backward[0][0] for i in range(2)]
    # "blocks" is never called, so it is no unit of the result; its blocks are
    assert "blocks" not in units and inner[1].end <= inner[0].start


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"strategy": "zero3", "fsdp_min_num_params": 9}, "use --strategy fsdp or fsdp2"),
        (
            {"fsdp_min_num_params": 9, "fsdp_transformer_layer_cls_to_wrap": ("A",)},
            "exclude each other",
        ),
    ],
)
def test_contradictions(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LlmemError, match=said):
        spec(**fields)
