"""The step and the forward as torch.fx graphs."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

from experiments.real_cpu.models import MODELS
from llmem import models
from llmem.errors import LlmemError
from llmem.trace.fx import forward_fx

from .net import CLASSES, F32, ROWS, WIDTH, Net, plain, run

aten = torch.ops.aten


def of(graph: fx.GraphModule, kind: str) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == kind]


def test_step_by_hand(net: Net) -> None:
    graph = run(plain, net).to_fx()
    graph.graph.lint()
    body, head = of(graph, "placeholder")
    assert (body.name, body.meta["shape"]) == ("body_weight", (WIDTH, WIDTH))
    assert head.meta["nbytes"] == CLASSES * WIDTH * F32
    ops = of(graph, "call_function")
    assert [node.target for node in ops] == [
        aten.empty, aten.mm, aten.relu, aten.mm, aten.sum,
        aten.ones_like, aten.mm, aten.mm, aten.threshold_backward, aten.mm,
        aten.add_, aten.add_,
    ]  # fmt: skip
    batch, first, relu, second, total, *_ = ops
    assert set(first.args) == {batch, body}
    assert set(second.args) == {relu, head}
    assert total.args == (second,)
    assert (first.meta["module"], first.meta["phase"]) == ("body", "forward")
    assert [node.meta["nbytes"] for node in ops[:5]] == [
        ROWS * WIDTH * F32, ROWS * WIDTH * F32, ROWS * WIDTH * F32, ROWS * CLASSES * F32, F32,
    ]  # fmt: skip
    # The weights are written by the optimizer, from their gradients.
    update_body, update_head = ops[-2:]
    assert set(update_body.args) == {body, ops[9]}
    assert set(update_head.args) == {head, ops[6]}
    (survivors,) = of(graph, "output")[0].args
    assert {update_body, update_head} <= set(survivors)


def test_step_frees_all_that_it_makes_but_what_lives_on(net: Net) -> None:
    trace = run(plain, net, steps=2)
    graph = trace.to_fx()
    ops = of(graph, "call_function")
    assert len(ops) == len(trace.ops)
    assert sum(node.meta["nbytes"] for node in ops) == int(
        trace.lifetimes.nbytes[trace.lifetimes.birth_op >= 0].sum()
    )
    freed = [row for node in ops for row in node.meta["frees"]]
    assert len(freed) == len(set(freed)) == int((trace.lifetimes.death_op >= 0).sum())


def test_forward_by_hand(net: Net) -> None:
    graph = forward_fx(net, {"x": torch.empty(ROWS, WIDTH, device="meta")})
    graph.graph.lint()
    (x,) = of(graph, "placeholder")
    ops = of(graph, "call_function")
    names = [node.target for node in ops]
    assert names == [
        aten.t.default, aten.mm.default, aten.relu.default,
        aten.t.default, aten.mm.default, aten.sum.default,
    ]  # fmt: skip
    assert [tuple(node.meta["val"].shape) for node in ops] == [
        (WIDTH, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH),
        (WIDTH, CLASSES), (ROWS, CLASSES), (),
    ]  # fmt: skip
    weights = of(graph, "get_attr")
    assert [node.target for node in weights] == ["body.weight", "lm_head.weight"]
    assert graph.get_parameter("body.weight") is net.body.weight
    assert weights[0].meta["val"].requires_grad
    assert ops[1].args == (x, ops[0])
    assert list(ops[1].meta["nn_module_stack"]) == ["body"]
    assert ops[2].meta["nn_module_stack"] == {}
    assert of(graph, "output")[0].args[0] is ops[-1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom", "mixtral", "t5"])
def test_forward_of_transformers_models(name: str) -> None:
    model: Any = models.build(models.resolve(MODELS[name]), device="meta")
    model.config.use_cache = False
    ids = torch.empty(2, 11, dtype=torch.int64, device="meta")
    graph = forward_fx(model, {"input_ids": ids, "labels": ids})
    graph.graph.lint()
    assert all("val" in node.meta for node in graph.graph.nodes if node.op != "output")
    weights = [node.target for node in of(graph, "get_attr") if "weight" in node.target]
    used = {id(graph.get_parameter(name)) for name in weights}
    assert used >= {id(p) for n, p in model.named_parameters() if n.endswith("weight")}
    loss = of(graph, "output")[0].args[0]
    assert loss.meta["val"].shape == ()
    stacks = [list(node.meta["nn_module_stack"]) for node in of(graph, "call_function")]
    inner = max(stacks, key=len)
    assert all(after.startswith(before) for before, after in pairwise(inner))


def test_several_outputs_are_taken_apart() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, (WIDTH,))

    graph = forward_fx(Norm(), {"x": torch.empty(ROWS, WIDTH, device="meta")}, gpu="cpu")
    whole, *parts = of(graph, "call_function")
    assert whole.target is aten.native_layer_norm.default
    assert [tuple(t.shape) for t in whole.meta["val"]] == [(ROWS, WIDTH), (ROWS, 1), (ROWS, 1)]
    assert [(p.target, p.args) for p in parts] == [(operator.getitem, (whole, i)) for i in range(3)]


def test_value_that_meta_lacks_is_told_in_one_sentence() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(LlmemError, match="the forward of Branch cannot be traced to fx"):
        forward_fx(Branch(), {"x": torch.empty(3, device="meta")})
