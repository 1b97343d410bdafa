"""fms-acceleration's kernels: what each allocates, by hand, and what a model with them needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmem
from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, Category, Trace
from llmem.trace.standins import foak_lora, foak_ops
from llmem.trace.standins.bitsandbytes import quantize_4bit

TOKENS = 64


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def born(step: Any) -> list[int]:
    """Bytes of every storage that ``step`` makes, workspaces of cuBLAS left out."""
    table = llmem.trace(step, steps=1, gpu="a100-80gb").lifetimes
    return table.nbytes[table.category != Category.WORKSPACE].tolist()  # type: ignore[no-any-return]


def test_rms_norm_keeps_one_number_per_token_and_gives_its_weight_no_gradient() -> None:
    x, weight = tensor(1, TOKENS, 256), tensor(256)
    gradient = tensor(1, TOKENS, 256, grad=False)
    made = born(lambda: foak_ops.rms_norm(x, weight).backward(gradient))
    assert made == [TOKENS * 256 * 2, TOKENS * 4]  # the output; x.grad is what came in
    assert weight.grad is None


def test_rope_turns_heads_where_they_lie_and_copies_gradients_that_lie_otherwise() -> None:
    cos = sin = tensor(1, 32, 64, grad=False)
    q, k = (tensor(2, 32, heads, 64).transpose(1, 2) for heads in (4, 2))
    assert born(lambda: foak_ops.rope(q, k, cos, sin)) == []
    by_head = [tensor(2, heads, 32, 64, grad=False) for heads in (4, 2)]

    def step() -> None:
        torch.autograd.backward(foak_ops.rope(q, k, cos, sin), by_head)

    assert born(step)[:2] == [2 * 32 * 2 * 64 * 2, 2 * 32 * 4 * 64 * 2]


@pytest.mark.parametrize(("vocabulary", "chunks"), [(1000, 1), (70_000, 2)])
def test_cross_entropy_makes_vectors_only(vocabulary: int, chunks: int) -> None:
    logits = tensor(TOKENS, vocabulary, dtype=torch.float32)
    labels = tensor(TOKENS, dtype=torch.int64, grad=False)
    made = born(lambda: foak_ops.cross_entropy(logits, labels))
    assert made[:2] == [TOKENS * 4, chunks * TOKENS * 4]  # losses, log-sum-exp
    assert max(made) <= chunks * TOKENS * 8


def test_the_gradient_of_the_logits_takes_their_place() -> None:
    hidden, weight = tensor(TOKENS, 32), tensor(1000, 32)
    labels = tensor(TOKENS, dtype=torch.int64, grad=False)
    made = born(lambda: foak_ops.cross_entropy(hidden @ weight.t(), labels).backward())
    assert made.count(TOKENS * 1000 * 2) == 1


def layer(features: int, out: int, *, p: float, r: int = 4) -> foak_lora.Layer:
    packed, state = quantize_4bit(tensor(out, features, grad=False), "nf4", double=True)
    factors = tensor(r, features, dtype=torch.float32), tensor(out, r, dtype=torch.float32)
    dropout = torch.nn.Dropout(p) if p else torch.nn.Identity()
    return foak_lora.Layer(packed, state, *factors, 2.0, dropout)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_fused_products_keep_what_dropout_left_and_no_mask(p: float) -> None:
    """Of q, k and v: three outputs and, with dropout, three copies of x are alive after forward."""
    layers = [layer(256, out, p=p) for out in (256, 128, 128)]
    x, kept = tensor(1, TOKENS, 256), []

    def step() -> None:
        kept.append(foak_lora.products(x, layers))

    table = llmem.trace(step, steps=1, gpu="a100-80gb").lifetimes
    alive = (table.death == NEVER) & (table.category != Category.WORKSPACE)
    assert int(table.nbytes[alive].sum()) == TOKENS * 2 * (
        256 + 128 + 128 + (3 * 256 if p else 0)
    )


@pytest.mark.parametrize("count", [1, 3])
def test_of_several_products_the_gradient_of_the_input_is_written_over_it(count: int) -> None:
    """Outputs of another width: what is [T, K] and lives at the end is x, or a gradient of its own."""
    layers = [layer(256, 128, p=0.0) for _ in range(count)]
    x = tensor(1, TOKENS, 256)
    gradients = [tensor(1, TOKENS, 128, grad=False) for _ in range(count)]

    def step() -> None:
        torch.autograd.backward(foak_lora.products(x, layers), gradients)

    llmem.trace(step, steps=1, gpu="a100-80gb")
    assert x.grad is not None
    over = x.grad.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert over is (count > 1)
    a, b = layers[0].a.grad, layers[0].b.grad
    assert a is not None and b is not None
    assert (a.shape, b.shape, a.dtype) == ((4, 256), (128, 4), torch.float32)


def traced(**fields: Any) -> Trace:
    return llmem.estimate(
        model="llama-3.2-1b", per_device_train_batch_size=2, seq_length=128, gpu="a100-80gb",
        **fields,
    ).trace  # fmt: skip


def test_a_model_with_the_kernels_has_one_copy_of_the_logits_in_backward() -> None:
    plain, fused = traced(as_transformers="4.48"), traced(kernels="foak")
    for op in ("rsqrt", "_log_softmax"):
        assert op in plain.names and op not in fused.names
    fp32 = 2 * 127 * 128256 * 4  # logits without the last token's
    # In each of two steps: the copy, log-probabilities and a gradient of each; or the copy alone.
    assert (plain.lifetimes.nbytes == fp32).sum() == 2 * 4
    assert (fused.lifetimes.nbytes == fp32).sum() == 2


def test_foak_liger_makes_no_logits() -> None:
    fused = traced(kernels="foak-liger")
    assert not ({2 * 128 * 128256 * 2, 2 * 127 * 128256 * 4} & set(fused.lifetimes.nbytes.tolist()))
    assert "rsqrt" not in fused.names


def test_fused_adapters_are_whole_on_each_rank_of_fsdp() -> None:
    fields: dict[str, Any] = dict(
        model="llama-3.2-1b", per_device_train_batch_size=1, seq_length=64, method="qlora",
        bnb_4bit_quant_storage="bf16", prepare_kbit="none", bf16=True, gpus=4, strategy="fsdp",
        lora_target_modules=("q_proj", "k_proj", "v_proj", "o_proj"), optim="adamw_torch",
        as_transformers="4.45",
    )  # fmt: skip
    whole = llmem.estimate(kernels="foak", **fields)
    sharded = llmem.estimate(**fields)

    def states(result: Any) -> int:
        table = result.worst.table.lifetimes
        return int(table.nbytes[table.category == Category.OPTIMIZER_STATE].sum())

    adapters = 16 * 8 * (4 * 2048 + 2 * 2048 + 2 * 512)  # A of four, B of q and o, of k and v
    trained = [p for p in whole.trace.parameters if p.trainable]
    assert sum(p.numel for p in trained) == adapters
    assert {p.dtype for p in trained} == {"float32"}
    assert states(whole) - states(sharded) in range(adapters * 8 * 3 // 4, adapters * 8)
    assert any("LoRA's products" in note for note in whole.assumptions)


def test_kernels_are_refused_where_there_are_none() -> None:
    with pytest.raises(LlmemError, match="no kernels for model type 'gpt2'"):
        llmem.estimate(model="gpt2", seq_length=16, kernels="foak")
    with pytest.raises(LlmemError, match="GPUs only"):
        llmem.estimate(model="llama-3.2-1b", seq_length=16, kernels="foak", gpu="cpu")
    with pytest.raises(LlmemError, match="brings its own loss"):
        llmem.estimate(model="llama-3.2-1b", seq_length=16, kernels="foak", loss="liger")
