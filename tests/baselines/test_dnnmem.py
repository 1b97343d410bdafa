"""The DNNMem-like walk on graphs of a few ops, byte by byte."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from llmem.baselines import BaselineInput, run
from llmem.baselines.base import MIB
from llmem.baselines.dnnmem import peak_of

from .tiny import tiny_llama

KIB = 1024


class Chain(nn.Module):
    """x [64, 64] -> linear -> gelu -> linear -> sum, all weights 64 x 64: 16 KiB in fp32 each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x))).sum()


def trace(module: nn.Module, *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(module)(*inputs)


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_chain_by_hand() -> None:
    graph = trace(on_meta(Chain), torch.zeros(64, 64, device="meta"))
    # Three outputs of 16 KiB and the loss. The most is live when the second product's backward has
    # made the gradients of its weight and of gelu's output, beside the one of its own output.
    assert peak_of(graph, 4) == {
        "weights": 32 * KIB,
        "inputs": 16 * KIB,
        "outputs": 48 * KIB,
        "output_gradients": 32 * KIB,
        "weight_gradients": 16 * KIB,
    }


def test_precision_is_uniform() -> None:
    graph = trace(on_meta(Chain), torch.zeros(64, 64, device="meta"))
    four, two = peak_of(graph, 4), peak_of(graph, 2)
    assert {k: v // 2 for k, v in four.items()} == two


class Tied(nn.Module):
    """An embedding [16, 64] whose weight is also the head, and a mask that no gradient enters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 64)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids).masked_fill((ids > 3).unsqueeze(-1), 0.0)
        return self.head(hidden).sum()


def test_tied_weights_count_once_and_views_are_free() -> None:
    graph = trace(on_meta(Tied), torch.zeros(4, 32, dtype=torch.int64, device="meta"))
    peak = peak_of(graph, 4)
    # The most is live in the mask's backward: embedded and masked states, 32 KiB each, and their
    # gradients. Logits are gone, and so is the boolean mask; the transposed weight and the viewed
    # states own nothing; the weight's gradient came with the head's backward.
    assert peak == {
        "weights": 4 * KIB,
        "inputs": KIB,  # 128 int64
        "outputs": 64 * KIB,
        "output_gradients": 64 * KIB,
        "weight_gradients": 4 * KIB,
    }


def test_small_tensors_take_512_bytes() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    graph = trace(on_meta(Scale), torch.zeros(3, device="meta"))
    # At the backward of the sum: product and loss, and a gradient of each.
    assert peak_of(graph, 4) == {
        "weights": 512, "inputs": 512, "outputs": 1024, "output_gradients": 1024,
    }


class Causal(nn.Module):
    """A causal LM as torch.export wants it: two tensors in, the loss out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def llama_graph() -> tuple[fx.GraphModule, nn.Module, Any]:
    model, config = tiny_llama(hidden_size=64, intermediate_size=256, vocab_size=128)
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    return torch.export.export(Causal(model), (ids, ids), strict=False).module(), model, config


def test_llama_with_and_without_checkpointing() -> None:
    graph, model, config = llama_graph()
    inp = BaselineInput(model, config, "tiny", 2, 16, graph=graph, base_bytes=0)
    plain = run("dnnmem", inp)
    checkpointed = run(
        "dnnmem",
        BaselineInput(
            model, config, "tiny", 2, 16, graph=graph, base_bytes=0, gradient_checkpointing=True
        ),
    )
    assert plain.bytes == sum(plain.parts.values())
    assert plain.parts["allocator_buffer"] == 64 * MIB
    sizes = [p.numel() * 4 for p in model.parameters()] + [b.numel() * 4 for b in model.buffers()]
    weights = sum(-(-size // 512) * 512 for size in sizes)
    # The traced graph leaves out a buffer that forward never reads (the original frequencies).
    assert 0 <= weights - plain.parts["weights"] <= 512
    hidden = 2 * 16 * 64 * 4
    assert plain.parts["outputs"] > 20 * hidden > checkpointed.parts["outputs"]
    assert checkpointed.bytes < plain.bytes
    mixed = BaselineInput(model, config, "tiny", 2, 16, graph=graph, base_bytes=0, mixed=True)
    halved = run("dnnmem", mixed).parts["outputs"] / plain.parts["outputs"]
    assert 0.5 <= halved < 0.51


def test_several_gpus_are_refused() -> None:
    model, config = tiny_llama()
    answer = run("dnnmem", BaselineInput(model, config, "tiny", 1, 4, gpus=2))
    assert answer.bytes is None
    assert "one GPU" in str(answer.why_not)
