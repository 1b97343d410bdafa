"""Accumulators and workspaces of the fused attention kernels: flash, memory-efficient, cuDNN.

B batch, H query heads, G key/value heads, M query positions, N key positions, K and V head sizes.
"""

from __future__ import annotations

from llmem.gpu.devices import DeviceProfile
from llmem.gpu.scratch_base import (
    BRIEF,
    DURING,
    HALF,
    Call,
    Scratch,
    TensorMeta,
    ceil_div,
    round_up,
)

_FLASH = "flash_attn/flash_api.cpp (FlashAttention 2.5-2.8, torch 2.2-2.14)"
_EFFICIENT = "transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h"


def _head_rounded(head_dim: int) -> int:
    """Head size of flash's accumulators: to a multiple of 32 up to 128, of 64 beyond."""
    size = round_up(head_dim, 8)
    return round_up(size, 32 if size <= 128 else 64)


# --- flash -------------------------------------------------------------------------------------


def _num_splits(work: int, slots: int, key_blocks: int) -> int:
    """`num_splits_heuristic`: key splits of a forward pass whose blocks do not fill the GPU.

    `work` is B·H·ceil(M/64), `slots` twice the number of SMs. The fewest splits within 85% of the
    best wave efficiency; a count that leaves the blocks per split unchanged is skipped.
    """
    if work >= 0.8 * slots:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits > 1 and ceil_div(key_blocks, splits) == ceil_div(key_blocks, splits - 1):
            continue
        waves = work * splits / slots
        efficiency[splits] = waves / ceil_div(work * splits, slots)
    best = max(efficiency.values(), default=0.0)
    return next((s for s, value in efficiency.items() if value >= 0.85 * best), 1)


def flash_forward_scratch(batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int,
                          head_dim: int, device: DeviceProfile, *,
                          dropout_p: float = 0.0) -> list[Scratch]:
    """Partial outputs of split keys in a dense flash forward pass (`set_params_splitkv`).

    fp32 [splits, B, H, M] and [splits, B, H, M, K rounded]; none when the blocks fill the GPU, as
    they do in training, and none with dropout. One query over grouped heads is turned into a block
    of H/G queries per key head first (`seqlenq_ngroups_swapped`).
    """
    if dropout_p > 0 or seq_k == 0:
        return []
    if seq_q == 1 and heads > kv_heads and head_dim % 8 == 0:
        seq_q, heads = heads // kv_heads, kv_heads
    block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    splits = _num_splits(batch * heads * ceil_div(seq_q, 64), 2 * device.sm_count,
                         ceil_div(seq_k, block))
    if splits <= 1:
        return []
    rows = splits * batch * heads * seq_q * 4
    source = f"{_FLASH}: set_params_splitkv"
    return [Scratch(rows, DURING, source), Scratch(rows * _head_rounded(head_dim), DURING, source)]


def flash_backward_scratch(rows_q: int, rows_k: int, heads: int, kv_heads: int, head_dim: int,
                           itemsize: int, *, batch: int, varlen: bool = False,
                           deterministic_splits: int = 1) -> list[Scratch]:
    """softmax_d, dq_accum and, for grouped heads, dk and dv expanded to all query heads.

    `rows_q`, `rows_k`: M and N of a dense batch, the total tokens of a packed one (`varlen`).
    softmax_d is fp32 [B, H, M rounded to 128] and dq_accum fp32 [B, M rounded, H, K rounded]
    (`mha_bwd`); packed, the rows are total + 128·B (`mha_varlen_bwd`). Deterministic backward
    repeats dq_accum ceil(SMs / (B·H)) times.
    """
    padded = rows_q + 128 * batch if varlen else batch * round_up(rows_q, 128)
    source = f"{_FLASH}: {'mha_varlen_bwd' if varlen else 'mha_bwd'}"
    accum = deterministic_splits * padded * heads * _head_rounded(head_dim) * 4
    found = [Scratch(padded * heads * 4, DURING, source), Scratch(accum, DURING, source)]
    if heads != kv_heads:
        keys = rows_k if varlen else batch * rows_k
        expanded = keys * heads * round_up(head_dim, 8) * itemsize
        found += [Scratch(expanded, DURING, f"{source}: {name}_expanded") for name in ("dk", "dv")]
    return found


def _contiguous_copy(view: TensorMeta | None, source: str) -> list[Scratch]:
    if view is None or view.stride is None or view.is_contiguous:
        return []
    return [Scratch(view.nbytes, DURING, f"{source}: .contiguous()")]


def flash_forward(call: Call) -> list[Scratch]:
    """_scaled_dot_product_flash_attention(q [B,H,M,K], k, v, dropout_p, ...)."""
    query, key = call.tensor(0), call.tensor(1)
    if query is None or key is None:
        return []
    batch, heads, seq_q, head_dim = query.shape
    return flash_forward_scratch(batch, heads, key.shape[1], seq_q, key.shape[2], head_dim,
                                 call.device, dropout_p=call.scalar(3, 0.0))


def flash_backward(call: Call) -> list[Scratch]:
    """_scaled_dot_product_flash_attention_backward(grad [B,H,M,K], q, k, v, out, ...).

    ``_flash_attention_backward`` makes grad and out [B, M, H, K] contiguous.
    """
    grad, query, key, out = (call.tensor(index) for index in (0, 1, 2, 4))
    if query is None or key is None:
        return []
    batch, heads, seq_q, head_dim = query.shape
    copy = []
    for given in (grad, out):
        if given is not None and given.stride:
            copy += _contiguous_copy(given.transpose(1, 2), _FLASH)
    return copy + flash_backward_scratch(seq_q, key.shape[2], heads, key.shape[1], head_dim,
                                         query.itemsize, batch=batch)


def flash_packed_backward(call: Call) -> list[Scratch]:
    """_flash_attention_backward(grad, q, k, v, out, lse, cum_seq_q, ...).

    Packed [tokens, H, K] with cum_seq_q [B+1], else dense [B, M, H, K].
    """
    grad, query, key, starts = (call.tensor(index) for index in (0, 1, 2, 6))
    if query is None or key is None:
        return []
    copy = _contiguous_copy(grad, _FLASH)
    heads, head_dim = query.shape[-2:]
    if starts is not None:
        return copy + flash_backward_scratch(
            query.shape[0], key.shape[0], heads, key.shape[-2], head_dim, query.itemsize,
            batch=starts.shape[0] - 1, varlen=True)
    return copy + flash_backward_scratch(query.shape[1], key.shape[1], heads, key.shape[-2],
                                         head_dim, query.itemsize, batch=query.shape[0])


# --- memory-efficient ----------------------------------------------------------------------------


def efficient_forward(call: Call) -> list[Scratch]:
    """_scaled_dot_product_efficient_attention(q, k, v, bias, ...): an fp32 copy of a wide output.

    `kNeedsOutputAccumulatorBuffer` (kernel_forward.h): the kernels for head sizes beyond 128 cannot
    keep the output in registers; half types then accumulate in fp32 [B, M, H, V].
    """
    query, value = call.tensor(0), call.tensor(2)
    if query is None or value is None or query.dtype not in HALF:
        return []
    batch, heads, seq_q, head_dim = query.shape
    if max(head_dim, value.shape[-1]) <= 128:
        return []
    source = "mem_eff_attention/kernel_forward.h: kNeedsOutputAccumulatorBuffer"
    return [Scratch(batch * heads * seq_q * value.shape[-1] * 4, DURING, source)]


def _backward_kernel(device: DeviceProfile, half: bool, width: int,
                     dropout: bool) -> tuple[int, int, bool]:
    """(queries per block, keys per block, dK and dV kept in registers): `dispatch_cutlassB`.

    The first generated kernel whose head size bound holds and whose shared memory fits: 128 x 128
    blocks need more than the 99 KiB of sm86, sm89 and sm12x. Lists: kernels/cutlassB.h, torch 2.1+.
    """
    capability = device.compute_capability
    if width <= 64:
        return 64, 64, half
    if width <= 128:
        if not half:
            return (128 if capability >= (8, 0) else 64), 64, False
        if capability in ((8, 6), (8, 9)) and width <= 96 and not dropout:
            return 128, 64, True
        if capability >= (8, 0):
            roomy = device.shared_memory_per_block >= 160 * 1024
            return (128, 128, True) if roomy else (64, 64, False)
        return 128, 64, True
    return (128 if half or capability >= (8, 0) else 64), 64, False


def efficient_backward(call: Call) -> list[Scratch]:
    """_scaled_dot_product_efficient_attention_backward(grad, q, k, v, bias, out, lse, ...).

    delta fp32 [B, H, M], computed by torch ops where the kernel does not (fp32: a product of the
    size of the output and its sum), and a workspace per head: dQ tiles with a 16-byte lock each,
    and, where dK and dV do not stay in registers, staging for the key splits
    (`Params::workspace_size`).
    """
    grad, query, key, value = (call.tensor(index) for index in range(4))
    if query is None or key is None or value is None:
        return []
    batch, heads, seq_q, head_dim = query.shape
    seq_k, value_dim = key.shape[2], value.shape[-1]
    half = query.dtype in HALF
    block_i, block_j, in_registers = _backward_kernel(
        call.device, half, max(head_dim, value_dim), call.scalar(9, 0.0) > 0)

    found = _contiguous_copy(grad.transpose(1, 2), _EFFICIENT) if grad and grad.stride else []
    rows = batch * heads * seq_q
    found.append(Scratch(rows * 4, DURING, f"{_EFFICIENT}: delta"))
    computes_delta = half and (in_registers or call.device.compute_capability != (7, 0))
    if not computes_delta:
        casts = 2 * rows * value_dim * 4 if half else 0
        found.append(Scratch(rows * value_dim * 4 + rows * 4 + casts, BRIEF,
                             f"{_EFFICIENT}: (grad_out * out).sum(-1)"))

    splits = ceil_div(seq_k, block_j)
    if batch * heads >= 256 and seq_k <= 2 * block_j:
        splits = 1
    per_head = 0
    if not in_registers:
        splits = min(splits, 200 // (batch * heads))
    splits = max(splits, 1)
    if not in_registers:
        per_head = splits * block_j * (round_up(head_dim, block_i) + round_up(value_dim, block_i))
    tiles = ceil_div(seq_q, block_i) * ceil_div(head_dim, block_j)
    per_head += tiles * (16 + 4 * block_i * block_j) // 4
    found.append(Scratch(batch * heads * round_up(per_head, 4) * 4, DURING,
                         f"{_EFFICIENT}: Params::workspace_size"))
    return found


# --- cuDNN -----------------------------------------------------------------------------------------


def cudnn_backward(call: Call) -> list[Scratch]:
    """_scaled_dot_product_cudnn_attention_backward(grad, q, k, v, ...): one workspace.

    cudnn-frontend (scaled_dot_product_flash_attention.h, cuDNN 9): softmax sum fp32 [B, H, M] and
    dQ accumulator fp32 [B, H, M, K]; for grouped heads dK and dV of all query heads besides, which
    the plan keeps. What else a plan asks for is not published: an estimate.
    """
    query, key, value = (call.tensor(index) for index in (1, 2, 3))
    if query is None or key is None or value is None:
        return []
    batch, heads, seq_q, head_dim = query.shape
    nbytes = batch * heads * seq_q * (head_dim + 1) * 4
    if key.shape[1] != heads:
        nbytes += batch * heads * key.shape[2] * (head_dim + value.shape[-1]) * query.itemsize
    return [Scratch(nbytes, DURING, "cudnn-frontend: SDPA_backward get_fe_workspace_size_node",
                    exact=False)]


TABLE = {
    "_scaled_dot_product_flash_attention": flash_forward,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_flash_attention_backward": flash_packed_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
