"""The products of bitsandbytes with quantised weights on meta: copies, temporaries, saved tensors.

From bitsandbytes 0.50.2: ``autograd/_functions.py`` (MatMul4Bit, MatMul8bitLt, MatMul8bitFp),
``backends/cuda/ops.py`` and ``backends/default/ops.py``. A gradient reaches the input and the bias,
never the weights. B batch, S tokens, M = B·S rows, K input and N output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from llmem.errors import LlmemError

FP16, FP32 = torch.float16, torch.float32

OUTLIER_COLUMNS = 7
"""Input features that hold a value of 6 or more, in a product. Which do depends on the data: for
models up to 13 B parameters at most 7 dimensions do (LLM.int8(), arXiv 2208.07339, section 3.2)."""

FUSED_ROWS = 4
"""Up to so many rows one kernel multiplies packed weights, whatever the GPU and the shape
(``_GEMM_4BIT_CUSTOM_FLOOR_M``). Up to 1,536 it depends on both; the dequantised copy is assumed."""


@dataclass(frozen=True)
class Habits:
    """What depends on the version of bitsandbytes and on the device.

    ``fused``: since 0.50 forward dequantises to the computed dtype, or multiplies packed weights;
    before, to the dtype that was quantised, and then casts. ``compute_dtype_from_input``: until
    0.46 the first fp32 or bf16 input decides in what a 4-bit layer computes, whatever was asked.
    ``saves_input``: until 0.43.1 a 4-bit product keeps its input for backward, and never reads it.
    """

    cuda: bool = True
    fused: bool = True
    compute_dtype_from_input: bool = False
    saves_input: bool = False

    @classmethod
    def of(cls, version: str | None, *, int8: bool, cuda: bool) -> Habits:
        """Those of ``version`` (None: 0.50). Raises LlmemError if it is not known."""
        if version is None:
            return cls(cuda)
        parts = version.split(".")
        if len(parts) < 2 or not all(part.isdecimal() for part in parts):
            raise LlmemError(f"'{version}' is no version of bitsandbytes; write it as 0.45")
        found = tuple(map(int, parts))
        oldest = (0, 45) if int8 else (0, 43)
        if found < oldest:
            raise LlmemError(
                f"what bitsandbytes {version} did is not known here; use {oldest[0]}.{oldest[1]} "
                "or later"
            )
        return cls(
            cuda,
            fused=found >= (0, 50),
            compute_dtype_from_input=found < (0, 47),
            saves_input=(0, 43, 0) <= found < (0, 43, 2),  # "0.43" is its last patch
        )


@dataclass(frozen=True)
class Nested:
    """Statistics of statistics: absmax fp32 [blocks / 256], code fp32 [256], offset fp32 []."""

    absmax: torch.Tensor
    code: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class QuantState:
    """Statistics of 4-bit weights [N, K] of ``dtype``: absmax [N·K / 64] and code fp32 [16].

    absmax is fp32, or uint8 where it is quantised itself (``nested``).
    """

    absmax: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    quant_type: str
    code: torch.Tensor
    nested: Nested | None = None

    def tensors(self) -> list[torch.Tensor]:
        nested = self.nested
        more = [nested.absmax, nested.code, nested.offset] if nested is not None else []
        return [self.absmax, *more, self.code]


@dataclass
class Int8State:
    """What ``MatmulLtState`` holds: int8 weights CB [N, K], fp32 SCB [N], the last outliers' idx."""

    CB: torch.Tensor
    SCB: torch.Tensor
    threshold: float
    idx: torch.Tensor | None = None
    has_fp16_weights: bool = False
    is_training: bool = True


def matmul_4bit(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    state: QuantState,
    habits: Habits,
) -> torch.Tensor:
    """x [..., K] times the transpose of the packed weights: [..., N] in x's dtype."""
    return _MatMul4bit.apply(x, packed, bias, state, habits)  # type: ignore[no-any-return, no-untyped-call]


class _MatMul4bit(torch.autograd.Function):
    """Dequantises in forward and again in backward; saves neither x (today) nor the copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        state: QuantState,
        habits: Habits,
    ) -> torch.Tensor:
        ctx.state, ctx.packed = state, packed
        ctx.kept = x if habits.saves_input and any(ctx.needs_input_grad[:2]) else None
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = x.numel() // x.shape[-1]
        if habits.cuda and rows <= (FUSED_ROWS if habits.fused else 1):
            return x.new_empty((*x.shape[:-1], state.shape[0]))
        if not habits.fused:
            weight = dequantize_4bit(packed, state).to(x.dtype)
            return linear(x, weight, bias)
        if state.nested is not None:
            absmax = torch.empty_like(state.absmax, dtype=FP32)
            shifted = absmax + state.nested.offset  # noqa: F841  both live until the product is made
        return linear(x, x.new_empty(state.shape), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0]
        wanted_x, _, wanted_bias = ctx.needs_input_grad[:3]
        d_bias = grad.sum(0, dtype=ctx.bias_dtype) if wanted_bias else None
        if not wanted_x:
            return None, None, d_bias, None, None
        weight = dequantize_4bit(ctx.packed, ctx.state).to(grad.dtype)
        return torch.matmul(grad, weight), None, d_bias, None, None


def dequantize_4bit(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """The weights [N, K] in the dtype that was quantised; nested absmax goes through fp32."""
    if state.nested is not None:
        absmax = torch.empty_like(state.absmax, dtype=FP32)
        absmax += state.nested.offset
    return torch.empty(state.shape, dtype=state.dtype, device=packed.device)


def matmul_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: Int8State,
    habits: Habits,
) -> torch.Tensor:
    """x [..., K] times the transpose of int8 weights [N, K]: [..., N] in x's dtype."""
    kind: Any = _MatMul8bitLt if habits.cuda or not state.is_training else _MatMul8bitFp
    return kind.apply(x, weight, bias, state)  # type: ignore[no-any-return]


class _MatMul8bitLt(torch.autograd.Function):
    """Quantises x row by row, multiplies in int8 to int32, adds the outlier columns in x's dtype.

    Saves x (as it came, not its int8 copy) and the outlier columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: Int8State,
    ) -> torch.Tensor:
        given = x.shape
        rows = x.reshape(-1, given[-1]) if x.dim() == 3 else x
        quantised, scales, state.idx = _quantize_rows(rows.to(FP16), state.threshold)
        out, outliers = _mixed_product(rows, quantised, scales, state, bias)
        ctx.state, ctx.shape, ctx.dtype = state, given, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.kept = (outliers, rows) if any(ctx.needs_input_grad[:2]) else None
        return out.reshape(*given[:-1], state.CB.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward_int8(ctx, grads[0])


class _MatMul8bitFp(torch.autograd.Function):
    """What a CPU does in training: dequantise and multiply; saves x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: Int8State,
    ) -> torch.Tensor:
        copy = state.CB.to(x.dtype).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        out = linear(x, copy, bias)
        ctx.state, ctx.shape, ctx.dtype, ctx.kept = state, x.shape, x.dtype, x
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward_int8(ctx, grads[0])


def _backward_int8(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wanted_x, _, wanted_bias = ctx.needs_input_grad[:3]
    state: Int8State = ctx.state
    d_bias = grad.sum(0, dtype=ctx.bias_dtype) if wanted_bias else None
    if grad.dim() == 3:
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
    if not wanted_x:
        return None, None, d_bias, None
    weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
    d_x = torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape)
    return d_x, None, d_bias, None


def _quantize_rows(
    x: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp16 [M, K] to int8 [M, K], fp32 scales [M], and the int64 indices of outlier columns."""
    scales = torch.empty(x.shape[0], dtype=FP32, device=x.device)
    quantised = torch.empty_like(x, dtype=torch.int8)
    outliers = x.abs() >= threshold
    outliers.any()
    outliers.any(dim=0)
    count = min(OUTLIER_COLUMNS, x.shape[1])
    columns = torch.empty(count, 1, dtype=torch.int64, device=x.device).view(-1)  # of argwhere
    if x.shape[0] > 1:
        quantised[:, columns] = 0
    return quantised, scales, columns


def _mixed_product(
    x: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
    state: Int8State,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``int8_mixed_scaled_mm``: the product [M, N] in x's dtype, and the outlier columns of x."""
    outliers = x[:, state.idx].contiguous()
    columns = state.CB[:, state.idx].contiguous()
    weights = dequantize_int8(columns, state.SCB).to(x.dtype).t()
    del columns
    out = _scaled_product(quantised, scales, state, bias, x.dtype)
    return out.addmm(outliers, weights), outliers


def _scaled_product(
    quantised: torch.Tensor,
    scales: torch.Tensor,
    state: Int8State,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``int8_scaled_mm``: int32 [M, N], scaled to fp16, cast to ``dtype``."""
    product = torch.empty(
        quantised.shape[0], state.CB.shape[0], dtype=torch.int32, device=quantised.device
    )
    out = torch.empty_like(product, dtype=FP16)
    if bias is not None and bias.dtype != FP16:
        out.add_(bias)
    return out.to(dtype)


def dequantize_int8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] to fp32 [N, K], as ``int8_vectorwise_dequant``."""
    return weight * scale.view(-1, 1) * (1 / 127.0)
