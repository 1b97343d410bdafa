"""Liger's losses of preference and policy training on meta: ORPO, CPO, SimPO, DPO, KTO, GRPO.

From linkedin/Liger-Kernel, src/liger_kernel/chunked_loss/ of 0.4.1 to 0.8.2:
fused_linear_preference.py, fused_linear_unpaired_preference.py, fused_linear_ppo.py. All run the
head over one sequence (or pair) at a time and make gradients in forward. The pass over a chunk is
compiled; of its ops only matrix products and the scatter of the labels' gradient are buffers of
their own (torch/_inductor/lowering.py: ``scatter_reduce_`` realises what it writes into; ``mm`` is
an external kernel), the rest is fused. B sequences, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

FP32 = torch.float32

VOCABULARY_CHUNK, TOKEN_CHUNK = 4096, 2048
"""Columns and rows of a block of logits (``_SELECTIVE_LOGPROB_*_CHUNK_SIZE``)."""


def paired(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None, scaled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerFusedLinear{ORPO,CPO,SimPO,DPO}Function``: x [B, S, H], chosen before rejected.

    ``reference`` (DPO): its hidden states and head. ``scaled``: the loss has another gradient
    than 1, so that the kept gradients are multiplied.
    """
    options = (2, reference, scaled)
    return _Chunked.apply(x, weight, target, None, options)  # type: ignore[no-any-return, no-untyped-call]


def unpaired(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor,
    bias: torch.Tensor | None = None, *,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None, scaled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerFusedLinearKTOFunction``, and the compiled ``LigerFusedLinearGRPOFunction``."""
    options = (1, reference, scaled)
    return _Chunked.apply(x, weight, target, bias, options)  # type: ignore[no-any-return, no-untyped-call]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor,
        bias: torch.Tensor | None, options: tuple[int, Any, bool],
    ) -> torch.Tensor:  # fmt: skip
        each, reference, ctx.scaled = options
        d_weight = torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        loss = torch.zeros((), device=x.device)

        def chunk(whole: torch.Tensor, start: int) -> torch.Tensor:
            second = x.shape[0] // 2 + start  # rejected sequences follow all chosen ones
            first = whole[start : start + 1]
            return first if each == 1 else torch.cat([first, whole[second : second + 1]])

        def added(start: int) -> torch.Tensor:
            part = chunk(x, start)
            other = None if reference is None else (chunk(reference[0], start), reference[1])
            d_part, d_head, d_offset = _compiled(part, weight, bias, other)
            d_weight.add_(d_head)
            if d_bias is not None and d_offset is not None:
                d_bias.add_(d_offset)
            return d_part

        d_parts = [added(start) for start in range(max(1, x.shape[0] // each))]
        ctx.save_for_backward(torch.cat(d_parts), d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_input, d_weight, d_bias = ctx.saved_tensors
        if ctx.scaled:
            d_input, d_weight = d_input * grads[0], d_weight * grads[0]
            d_bias = None if d_bias is None else d_bias * grads[0]
        return d_input, d_weight, None, d_bias, None


def _compiled(
    part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    reference: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Gradients of the loss of ``part`` [n, S, H], its logits [n·S, V] in its dtype.

    At most the logits, their gradient, and the fp32 scatter of the labels' gradient are there.
    """
    rows = part.reshape(-1, part.shape[-1])
    logits = rows @ weight.t()
    _largest, _sums = (logits.new_empty(rows.shape[0], dtype=FP32) for _ in "ab")
    if reference is not None:
        others = reference[0].reshape(-1, reference[0].shape[-1]) @ reference[1].t()
        del others
    scattered = torch.zeros_like(logits, dtype=FP32)
    d_logits = torch.empty_like(logits)
    del logits, scattered
    d_bias = None if bias is None else d_logits.sum(dim=0)
    d_weight = d_logits.t() @ rows
    return (d_logits @ weight).view(part.shape), d_weight, d_bias


def grpo(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None, scaled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``LigerFusedLinearGRPOFunction`` from 0.8 on: x [B, S, H] to the loss.

    Log-probabilities of the sampled tokens are made from blocks of 4096 columns of the vocabulary;
    gradients of a sequence are fp32 sums, the head's [V, H] too.
    """
    return _Grpo.apply(x, weight, target, reference, scaled)  # type: ignore[no-any-return, no-untyped-call]


class _Grpo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reference: Any,
        scaled: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.scaled = scaled
        loss = torch.zeros((), dtype=FP32, device=x.device)
        d_weight = torch.zeros_like(weight)

        def added(index: int) -> torch.Tensor:
            rows = x[index].contiguous()
            if reference is not None:
                _other = _log_probabilities(reference[0][index], reference[1])
            _own = _log_probabilities(rows, weight)
            sums = _block_gradients(rows, weight)
            d_rows, d_head = sums[0].to(x.dtype), sums[1].to(weight.dtype)
            del sums
            d_weight.add_(d_head)
            return d_rows.unsqueeze(0)

        d_parts = [added(index) for index in range(x.shape[0])]
        ctx.save_for_backward(torch.cat(d_parts), d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_input, d_weight = ctx.saved_tensors
        if ctx.scaled:
            d_input, d_weight = d_input * grads[0], d_weight * grads[0]
        return d_input, d_weight, None, None, None


def _blocks(rows: torch.Tensor, weight: torch.Tensor) -> Any:
    """(first row, first column, rows [r, H], columns [c, H], fp32 logits [r, c]) of every block."""
    for row in range(0, rows.shape[0], TOKEN_CHUNK):
        part = rows[row : row + TOKEN_CHUNK]
        for column in range(0, weight.shape[0], VOCABULARY_CHUNK):
            columns = weight[column : column + VOCABULARY_CHUNK]
            yield row, column, part, columns, (part @ columns.to(part.dtype).t()).float()


def _log_probabilities(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """fp32 log-probabilities and log-sum-exp [S], a running sum over blocks."""
    made = tuple(torch.empty(rows.shape[0], dtype=FP32, device=rows.device) for _ in "ab")
    for _, _, _, _, logits in _blocks(rows, weight):
        largest = logits.amax(dim=-1)
        exponentials = torch.exp(logits - largest.unsqueeze(-1))
        exponentials.sum(dim=-1)
    return made


def _block_gradients(
    rows: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 gradients of rows [S, H] and weight [V, H]."""
    d_rows = torch.zeros(rows.shape, dtype=FP32, device=rows.device)
    d_weight = torch.zeros(weight.shape, dtype=FP32, device=weight.device)
    for row, column, part, columns, logits in _blocks(rows, weight):
        shifted = torch.exp(logits - logits.new_empty(logits.shape[0], 1))
        d_logits = shifted * 1.0
        d_rows[row : row + TOKEN_CHUNK].add_(d_logits @ columns.float())
        d_weight[column : column + VOCABULARY_CHUNK].add_(d_logits.t() @ part.float())
    return d_rows, d_weight
