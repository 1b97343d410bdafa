"""Liger's other kernels: what each makes, keeps and holds at most, by hand.

Sizes are multiples of the allocator's 512 bytes where a peak is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import llmem
from llmem.lifetimes import Category, Trace
from llmem.timeline import replay
from llmem.trace.standins import (
    liger_activations,
    liger_losses,
    liger_moe,
    liger_norms,
    liger_ops,
    liger_positions,
    liger_preference,
)

SMS = 132  # H100
ROWS, WIDTH = 64, 256
WHOLE = ROWS * WIDTH * 2  # bf16
FP32 = torch.float32


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def traced(step: Callable[[], Any]) -> Trace:
    return llmem.trace(step, steps=1, gpu="h100-80gb")


def born(step: Callable[[], Any]) -> list[int]:
    """Bytes of every storage that the step makes, workspaces of cuBLAS left out."""
    table = traced(step).lifetimes
    return table.nbytes[table.category != Category.WORKSPACE].tolist()


def peak(step: Callable[[], Any]) -> int:
    """Most bytes that the step adds to what is there before."""
    trace = traced(step)
    keep = trace.lifetimes.category != Category.WORKSPACE
    return int(replay(trace.lifetimes.take(keep)).allocated.max())


def leaf(source: torch.Tensor) -> torch.Tensor:
    """The same storage without a gradient of its own yet."""
    return source.detach().requires_grad_()


def saved(output: torch.Tensor) -> int:
    """Bytes that the function behind ``output`` keeps for backward."""
    kept = {t.untyped_storage()._cdata: t for t in output.grad_fn.saved_tensors if t is not None}  # type: ignore[union-attr]
    return sum(t.numel() * t.element_size() for t in kept.values())


def test_residual_and_norm_keep_their_sum_and_share_a_gradient() -> None:
    x, residual, weight = tensor(ROWS, WIDTH), tensor(ROWS, WIDTH), tensor(WIDTH)
    out, _total = liger_norms.fused_add_rms_norm(x, residual, weight, sm_count=SMS)
    assert saved(out) == WHOLE + WIDTH * 2 + ROWS * 4

    def step(in_place: bool) -> None:
        both = liger_norms.fused_add_rms_norm(
            leaf(x), leaf(residual), leaf(weight), sm_count=SMS, in_place=in_place
        )
        torch.autograd.backward(both, [torch.empty_like(both[0]) for _ in "ab"])

    partial = SMS * WIDTH * 4
    assert born(lambda: step(False)).count(partial) == 1
    assert peak(lambda: step(False)) - peak(lambda: step(True)) == WHOLE


@pytest.mark.parametrize("cutile", [False, True])
def test_group_norm_keeps_two_statistics_per_group(cutile: bool) -> None:
    """4 samples of 32 channels in 8 groups; cuTile sums parameter gradients over samples."""
    x, weight, bias = tensor(4, 32, 64), tensor(32), tensor(32)
    out = liger_norms.group_norm(x, weight, bias, 8, cutile=cutile)
    statistics = 4 * 8 * (4 if cutile else 2)
    assert saved(out) == 4 * 32 * 64 * 2 + 2 * 32 * 2 + 2 * statistics
    gradient = torch.empty_like(out)

    def step() -> None:
        liger_norms.group_norm(x, weight, bias, 8, cutile=cutile).backward(gradient)

    assert born(step).count(4 * 32 * 2) == (2 if cutile else 0)


def test_dyt_keeps_its_input_and_sums_per_sm() -> None:
    x, gamma, beta = tensor(ROWS, 2048), tensor(2048, dtype=FP32), tensor(2048, dtype=FP32)
    alpha = tensor(1, dtype=FP32)
    gradient = tensor(ROWS, 2048, grad=False)
    out = liger_norms.dyt(x, alpha, gamma, beta, sm_count=SMS)
    assert saved(out) == ROWS * 2048 * 2 + 4 + 2 * 2048 * 4
    for cutile, columns in ((False, 512), (True, 1024)):

        def step(cutile: bool = cutile) -> None:
            made = liger_norms.dyt(x, alpha, gamma, beta, sm_count=SMS, cutile=cutile)
            made.backward(gradient)

        sizes = born(step)
        assert sizes.count(SMS * 2048 * 4) == 2
        assert sizes.count(SMS * (2048 // columns) * 4) == 1


def test_poly_norm_writes_over_the_gradient() -> None:
    x, weight, bias = tensor(ROWS, WIDTH), tensor(3, dtype=FP32), tensor(1, dtype=FP32)[0]
    out = liger_norms.poly_norm(x, weight, bias, sm_count=SMS)
    assert saved(out) == WHOLE + 12 + ROWS * 3 * 4

    def step(in_place: bool) -> None:
        made = liger_norms.poly_norm(leaf(x) * 1, weight, bias, sm_count=SMS, in_place=in_place)
        made.backward(torch.empty_like(made))

    assert born(lambda: step(False)).count(WHOLE) - born(lambda: step(True)).count(WHOLE) == 1


def test_gate_and_up_in_one_tensor_go_back_into_it() -> None:
    y = tensor(ROWS, 2 * WIDTH)
    assert saved(liger_activations.gated_together(y)) == 2 * WHOLE
    gradient = tensor(ROWS, WIDTH, grad=False)

    def step(in_place: bool) -> None:
        liger_activations.gated_together(leaf(y) * 1, in_place=in_place).backward(gradient)

    assert peak(lambda: step(True)) == 3 * WHOLE + 2 * WHOLE  # y * 1, the output; y's gradient
    assert born(lambda: step(False)).count(2 * WHOLE) == 3
    assert born(lambda: step(True)).count(2 * WHOLE) == 2


@pytest.mark.parametrize("act", [liger_activations.softmax, liger_activations.relu_squared])
def test_one_in_one_out_one_kept(act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = tensor(ROWS, WIDTH)
    assert saved(act(x)) == WHOLE
    gradient = tensor(ROWS, WIDTH, grad=False)
    assert born(lambda: act(x).backward(gradient)) == [WHOLE, WHOLE]


def test_sparsemax_sorts_in_fp32() -> None:
    """The output, an fp32 copy, its sorted values and their int64 places."""
    x = tensor(ROWS, WIDTH)
    assert saved(liger_activations.sparsemax(x)) == WHOLE
    assert peak(lambda: liger_activations.sparsemax(x)) == 2 * WHOLE * (1 + 1 + 2)


def test_multi_token_attention_keeps_scores_and_probabilities() -> None:
    scores, weight, bias = tensor(2, 4, 32, 32), tensor(4, 4, 3, 3), tensor(4)
    out = liger_activations.multi_token_attention(scores, weight, bias, padding=1)
    each, parameters = 2 * 4 * 32 * 32 * 2, (4 * 4 * 9 + 4) * 2
    assert saved(out) == 2 * each + parameters
    wide = [t.detach().float().requires_grad_() for t in (scores, weight, bias)]
    sparse = liger_activations.multi_token_attention(*wide, padding=1, sparse=True)
    assert saved(sparse) == 2 * (2 * each + parameters)  # sparsemax's two outputs are one

    def step(cutile: bool) -> None:
        liger_activations.multi_token_attention(
            leaf(scores), leaf(weight), leaf(bias), padding=1, cutile=cutile
        ).backward(torch.empty_like(scores))

    # masked, probabilities, mixed, output; the output's gradient; then its mask's, that of the
    # probabilities, two products, a difference and the gradient of the scores
    assert born(lambda: step(False)).count(each) == 4 + 1 + 6
    assert born(lambda: step(True)).count(each) < 4 + 1 + 6


def test_a_tiled_mlp_holds_one_shard() -> None:
    up, down = tensor(4 * WIDTH, WIDTH), tensor(WIDTH, 4 * WIDTH)
    x = tensor(1, ROWS, WIDTH)

    def mlp(rows: torch.Tensor) -> torch.Tensor:
        return liger_activations.relu_squared(rows @ up.t()) @ down.t()

    tiled = liger_activations.tiled(mlp, x, 4)
    assert saved(tiled) == WHOLE
    gradient = torch.empty_like(tiled)
    sizes = born(lambda: liger_activations.tiled(mlp, x, 4).backward(gradient))
    assert 4 * WHOLE not in sizes  # never the inner width of all rows
    # a shard's inner rows are as large as x: two tensors forward, four again with backward
    assert sizes.count(WHOLE) == 4 * 2 + 4 * 4 + 2  # and the output and the gradient of x
    assert up.grad is not None


def test_rotary_embeddings_turn_in_place() -> None:
    q, k = (tensor(1, 32, heads, 64, grad=False) for heads in (4, 2))
    frequencies = tensor(1, 32, 32, dtype=torch.complex64, grad=False)
    assert born(lambda: liger_positions.llama4_rope(q, k, frequencies)) == []
    across = tensor(1, 32, 32, dtype=torch.complex64, grad=False).transpose(1, 2)
    assert born(lambda: liger_positions.llama4_rope(q, k, across)) == [32 * 32 * 8]
    three = tensor(3, 1, 32, 64, grad=False)
    assert born(
        lambda: liger_positions.qwen2vl_mrope(q.transpose(1, 2), k.transpose(1, 2), three, three)
    ) == []  # fmt: skip


def test_experts_keep_the_up_projection_only() -> None:
    """128 tokens, 2 of 4 experts each: 256 rows of width 64."""
    x, gate_up, down = tensor(128, WIDTH), tensor(4, 128, WIDTH), tensor(4, WIDTH, 64)
    chosen, weights = tensor(128, 2, dtype=torch.int32, grad=False), tensor(128, 2)
    out = liger_moe.fused_moe(x, gate_up, down, chosen, weights)
    inputs = (128 * WIDTH + 4 * 128 * WIDTH + 4 * WIDTH * 64) * 2
    tables = 5 * 4 + 2 * 4 * 4 + 3 * 256 * 4  # starts, two lists of 4 tiles, three of 256 rows
    assert saved(out) == inputs + 256 * 128 * 2 + 256 * 2 + tables
    rows = 256 * WIDTH * 2  # what the experts make, forward and backward; and as large: x's share
    sizes = born(
        lambda: liger_moe.fused_moe(*map(leaf, (x, gate_up, down)), chosen, leaf(weights))
        .sum().backward()
    )  # fmt: skip
    assert sizes.count(rows) == 2 + 1  # and the gradient of down, [4, 256, 64]
    assert liger_moe.tiles(256, 4) == 4 and liger_moe.tiles(257, 4) == 8


TOKENS, VOCABULARY = 64, 1024
LOGITS = TOKENS * VOCABULARY * 4


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(TOKENS, VOCABULARY, dtype=FP32), tensor(TOKENS, VOCABULARY, dtype=FP32, grad=False)


def test_divergences_keep_one_tensor() -> None:
    x, target = pair()
    assert saved(liger_losses.kl_div(x, target)) == LOGITS
    assert saved(liger_losses.jsd(x, target)) == LOGITS
    assert saved(liger_losses.tvd(x, target)) == LOGITS


@pytest.mark.parametrize(
    ("loss", "plain", "scaled"),
    [
        (liger_losses.kl_div, 2, 3),  # made, (scaled,) divided by the rows
        (liger_losses.jsd, 2, 3),  # every entry's loss, the gradient (, scaled)
        (liger_losses.tvd, 1, 2),  # the gradient (, scaled)
    ],
)
def test_divergences_make(loss: Callable[..., torch.Tensor], plain: int, scaled: int) -> None:
    x, target = pair()
    assert born(lambda: loss(leaf(x), target).backward()).count(LOGITS) == plain
    assert born(lambda: loss(leaf(x), target, scaled=True).backward()).count(LOGITS) == scaled


def test_fused_linear_jsd_holds_the_loss_of_every_entry() -> None:
    x, weight = tensor(TOKENS, WIDTH), tensor(VOCABULARY, WIDTH)
    other = tensor(TOKENS, WIDTH, grad=False)
    out = liger_losses.fused_linear_jsd(x, weight, other, weight.detach())
    assert saved(out) == (TOKENS + VOCABULARY) * WIDTH * 2
    assert liger_ops.chunk_rows(TOKENS, WIDTH, VOCABULARY) == 16
    sizes = born(lambda: liger_losses.fused_linear_jsd(x, weight, other, weight.detach()))
    assert sizes.count(LOGITS) == 1
    assert 16 * VOCABULARY * 4 in sizes and TOKENS * VOCABULARY * 2 not in sizes


def test_vocabulary_in_shards_keeps_fp32_exponentials() -> None:
    logits, target = tensor(32, 2, VOCABULARY), tensor(32, 2, dtype=torch.int64, grad=False)
    losses = liger_losses.vocab_parallel_cross_entropy(logits, target)
    assert losses.shape == (32, 2)
    assert saved(losses) == LOGITS + TOKENS * 4 + TOKENS * 8


def test_cross_entropy_per_row_scales_into_another_tensor() -> None:
    logits, target = tensor(TOKENS, VOCABULARY), tensor(TOKENS, dtype=torch.int64, grad=False)
    assert liger_ops.cross_entropy(logits, target, per_row=True).shape == (TOKENS,)
    for per_row, made in ((False, 0), (True, 1)):

        def step(per_row: bool = per_row) -> None:
            rows = leaf(logits) * 1
            liger_ops.cross_entropy(rows, target, per_row=per_row).sum().backward()

        assert born(step).count(LOGITS // 2) == 2 + made  # the product and its gradient


SEQUENCES, LENGTH = 4, 96
BF16_LOGITS = LENGTH * VOCABULARY * 2


def test_preference_losses_go_pair_by_pair() -> None:
    """Two sequences' logits and their gradient in bf16, and the fp32 scatter of the labels'."""
    x, weight = tensor(SEQUENCES, LENGTH, WIDTH), tensor(VOCABULARY, WIDTH)
    target = tensor(SEQUENCES, LENGTH, dtype=torch.int64, grad=False)
    out = liger_preference.paired(x, weight, target)
    assert saved(out) == (SEQUENCES * LENGTH + VOCABULARY) * WIDTH * 2
    sizes = born(lambda: liger_preference.paired(x, weight, target))
    assert sizes.count(2 * BF16_LOGITS) == 2 * 2 and sizes.count(4 * BF16_LOGITS) == 2
    single = born(lambda: liger_preference.unpaired(x, weight, target))
    assert single.count(2 * BF16_LOGITS) == 4
    assert single.count(BF16_LOGITS) == 4 * 2 + 1  # the gradient of x is as large


def test_a_reference_model_is_done_before_the_gradient() -> None:
    x, weight = tensor(SEQUENCES, LENGTH, WIDTH), tensor(VOCABULARY, WIDTH)
    target = tensor(SEQUENCES, LENGTH, dtype=torch.int64, grad=False)
    reference = (x.detach(), weight.detach())
    alone = peak(lambda: liger_preference.paired(x, weight, target))
    both = peak(lambda: liger_preference.paired(x, weight, target, reference=reference))
    assert both - alone == 2 * LENGTH * WIDTH * 2  # the pair's hidden states; no logits


def test_grpo_sums_the_gradient_of_the_head_in_fp32() -> None:
    x, weight = tensor(2, LENGTH, WIDTH), tensor(VOCABULARY, WIDTH)
    target = tensor(2, LENGTH, dtype=torch.int64, grad=False)
    out = liger_preference.grpo(x, weight, target)
    assert saved(out) == (2 * LENGTH + VOCABULARY) * WIDTH * 2
    sizes = born(lambda: liger_preference.grpo(x, weight, target))
    assert sizes.count(VOCABULARY * WIDTH * 4) >= 2  # one for each sequence
