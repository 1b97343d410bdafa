"""Which kernel `scaled_dot_product_attention` takes, decided from shapes alone.

The rules are those of aten/native/transformers/cuda/sdp_utils.cpp (`_fused_sdp_choice_cuda`) and
sdp_utils_cpp.{h,cpp} (CPU), torch 2.5 to 2.14, for dense tensors [batch, heads, positions, head].
Each rule is a function named after the check it mirrors and returns why a backend is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.gpu.scratch_base import HALF, TensorMeta

BACKENDS = ("flash", "efficient", "cudnn", "math")


@dataclass(frozen=True)
class SdpaChoice:
    """The kernel taken, and for each one that was tried before it why it was not."""

    backend: str
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Params:
    """`sdp_params` of sdp_utils_cpp.h and what it reads from its surroundings."""

    query: TensorMeta
    key: TensorMeta
    value: TensorMeta
    mask: TensorMeta | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    requires_grad: bool
    mask_requires_grad: bool
    torch_version: tuple[int, int]
    capability: tuple[int, int] = (0, 0)
    deterministic: bool = False

    @property
    def dtype(self) -> str:
        return self.query.dtype


_Check = Callable[[_Params], "str | None"]


# --- checks shared by the fused kernels ----------------------------------------------------------


def _tensor_shapes(p: _Params) -> str | None:
    ranks = {len(t.shape) for t in (p.query, p.key, p.value)}
    return None if ranks == {4} else "query, key and value must have four dimensions"


def _nonzero_sequence_lengths(p: _Params) -> str | None:
    empty = p.query.shape[2] == 0 or p.key.shape[2] == 0
    return "a sequence length is zero" if empty else None


def _last_dim_stride_is_one(p: _Params, *, singleton: bool, cpu: bool = False) -> str | None:
    """check_last_dim_stride_equals_1_dense<ignore_singleton_dim>; a mask's stride counts on GPU."""
    dense = all(t.strides[-1] == 1 for t in (p.query, p.key, p.value))
    if not (dense or (singleton and p.query.shape[-1] == 1)):
        return "the last dimension of query, key or value has a stride other than 1"
    if not cpu and p.mask is not None and p.mask.strides[-1] != 1:
        return "the last dimension of the mask has a stride other than 1"
    return None


def _same_dtype(p: _Params, allowed: tuple[str, ...]) -> str | None:
    dtypes = {p.query.dtype, p.key.dtype, p.value.dtype}
    if dtypes == {p.dtype} and p.dtype in allowed:
        return None
    return f"needs query, key and value in {' or '.join(allowed)}, got {', '.join(sorted(dtypes))}"


def _batch_and_heads(p: _Params, *, gqa: bool, same_kv: bool = True) -> str | None:
    """check_batch_size_and_num_heads_dense<supports_gqa, requires_same_num_heads>."""
    heads, kv, v = (t.shape[1] for t in (p.query, p.key, p.value))
    if not p.query.shape[0] == p.key.shape[0] == p.value.shape[0]:
        return "batch sizes of query, key and value differ"
    if p.enable_gqa and gqa:
        if same_kv and kv != v:
            return "key and value have different numbers of heads"
        if heads % kv or (not same_kv and heads % v):
            return f"{heads} query heads are no multiple of {kv} key heads"
        return None
    if heads == kv == v:
        return None
    if gqa and kv == v == 1 and p.torch_version >= (2, 14):
        return None  # one key head is broadcast (pytorch#191085)
    return f"numbers of heads differ ({heads}, {kv}, {v})" + (
        " and grouped heads are not supported" if p.enable_gqa else " without enable_gqa")


def _mask_shape(p: _Params) -> str | None:
    """check_attn_mask_shape: broadcastable, of two or four dimensions, without a gradient."""
    if p.mask is None:
        return None
    if p.mask_requires_grad:
        return "the mask requires a gradient"
    batch, heads, rows = p.query.shape[:3]
    want = (batch, heads, rows, p.key.shape[2])
    shape = p.mask.shape
    fits = len(shape) in (2, 4) and all(
        size in (1, target) for size, target in zip(shape, want[-len(shape):], strict=True))
    return None if fits else f"mask of shape {shape} does not broadcast to {want}"


# --- flash ---------------------------------------------------------------------------------------


def _no_mask(p: _Params) -> str | None:
    return "an attention mask is given" if p.mask is not None else None


def _head_dim_flash(p: _Params) -> str | None:
    """check_head_dim_size_flash: equal and at most 256; odd sizes are padded to 8 by SDPA."""
    sizes = {t.shape[-1] for t in (p.query, p.key, p.value)}
    if len(sizes) > 1 or max(sizes) > 256:
        return f"head sizes must be equal and at most 256, got {sorted(sizes)}"
    return None


def _flash_hardware(p: _Params) -> str | None:
    ok = (8, 0) <= p.capability <= (12, 1)
    return None if ok else f"needs compute capability 8.0 to 12.1, got {_dotted(p.capability)}"


def _flash_backward_head_dim(p: _Params) -> str | None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 (sm12x: torch 2.7)."""
    small = (8, 6) <= p.capability <= (8, 9) or (
        p.torch_version >= (2, 7) and (12, 0) <= p.capability <= (12, 1))
    head = p.query.shape[-1]
    if not (p.requires_grad and small) or head <= 192 or (head > 224 and p.dropout_p == 0):
        return None
    return f"no backward for head size {head} on compute capability {_dotted(p.capability)}"


def _flash_causal_square(p: _Params) -> str | None:
    if p.is_causal and p.query.shape[2] != p.key.shape[2]:
        return "is_causal with different query and key lengths"
    return None


def _low_precision(p: _Params) -> str | None:
    """check_dtypes_low_precision: fp16, and bf16 from compute capability 8.0."""
    return _same_dtype(p, HALF if p.capability >= (8, 0) else ("float16",))


_FLASH: tuple[_Check, ...] = (
    _tensor_shapes, _no_mask, _head_dim_flash, _flash_hardware, _flash_backward_head_dim,
    _flash_causal_square, _low_precision,
    lambda p: _batch_and_heads(p, gqa=True), _nonzero_sequence_lengths,
    lambda p: _last_dim_stride_is_one(p, singleton=True),
)


# --- memory-efficient ----------------------------------------------------------------------------


def _efficient_hardware(p: _Params) -> str | None:
    ok = (5, 0) <= p.capability <= (12, 1)
    return None if ok else f"needs compute capability 5.0 to 12.1, got {_dotted(p.capability)}"


def _gemm_alignment(p: _Params) -> int:
    """minimum_gemm_alignment: elements that CUTLASS loads at once."""
    half = p.dtype in HALF
    tensor_cores = p.capability >= (8, 0) or (p.capability >= (7, 0) and half)
    alignment = 4 if p.capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _head_dim_efficient(p: _Params) -> str | None:
    """check_head_dim_size_mem_efficient."""
    q, k, v = (t.shape[-1] for t in (p.query, p.key, p.value))
    alignment = _gemm_alignment(p)
    if q == k and q > 0 and v > 0 and q % alignment == 0 and v % alignment == 0:
        return None
    return f"head sizes must be multiples of {alignment}, equal for query and key: {q}, {k}, {v}"


def _efficient_dtype(p: _Params) -> str | None:
    wide = ("float16", "float32", "bfloat16")
    return _same_dtype(p, wide if p.capability >= (8, 0) else wide[:2])


_EFFICIENT: tuple[_Check, ...] = (
    _efficient_hardware, _tensor_shapes, _head_dim_efficient, _nonzero_sequence_lengths,
    lambda p: _last_dim_stride_is_one(p, singleton=False),
    lambda p: _batch_and_heads(p, gqa=p.torch_version >= (2, 14)),  # pytorch#191085
    _efficient_dtype,
)


# --- cuDNN ---------------------------------------------------------------------------------------


def _deterministic(p: _Params) -> str | None:
    return "deterministic algorithms are asked for" if p.deterministic else None


def _cudnn_dropout(p: _Params) -> str | None:
    exact = p.dropout_p * 16 == int(p.dropout_p * 16)
    return None if exact else "dropout is no multiple of 1/16"


def _cudnn_shapes(p: _Params) -> str | None:
    """check_cudnn_tensor_shapes; (192, 128) on sm90 and sm10x with cuDNN 9.11 (torch 2.11).

    256 needs cuDNN beyond 9.22 and a matching frontend, which no torch up to 2.14 ships.
    """
    batch, heads, rows, head = p.query.shape
    keys, value_head = p.key.shape[2], p.value.shape[-1]
    if max(batch, heads) > 65535:
        return "batch size or number of heads beyond 65,535"
    server = p.capability == (9, 0) or p.capability[0] == 10
    limit = 192 if server and (head, value_head) == (192, 128) and p.torch_version >= (2, 11) else 128
    if max(head, value_head) > limit:
        return f"head size {max(head, value_head)} beyond {limit}"
    if head % 8 or value_head % 8:
        return "head sizes must be multiples of 8"
    if keys == 1:
        return "a single key position"
    if p.dropout_p and rows == 1:
        return "dropout with a single query position"
    return None


_CUDNN: tuple[_Check, ...] = (
    _tensor_shapes, _deterministic, _low_precision, _mask_shape, _flash_hardware, _cudnn_dropout,
    _nonzero_sequence_lengths, lambda p: _last_dim_stride_is_one(p, singleton=True),
    lambda p: _batch_and_heads(p, gqa=True, same_kv=False), _cudnn_shapes,
)

_CHECKS = {"flash": _FLASH, "efficient": _EFFICIENT, "cudnn": _CUDNN, "math": ()}


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _refusal(p: _Params, checks: tuple[_Check, ...]) -> str | None:
    """The first reason against a backend."""
    return next((reason for check in checks if (reason := check(p))), None)


def _prefers_cudnn(p: _Params, env: Mapping[str, str]) -> bool:
    """check_prefer_cudnn_attention: sm90 and sm10x with cuDNN beyond 9.15.

    In the source since torch 2.10; the wheels bundle such a cuDNN since 2.11. 2.5.0 preferred
    cuDNN on sm90, 2.5.1 took it back (pytorch#138522): 2.5 means 2.5.1 here. 2.9 was meant to but
    its wheels were compiled against cuDNN 9.8 (pytorch#165801).
    """
    if env.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return p.torch_version >= (2, 11) and p.capability[0] in (9, 10)


def _pick(p: _Params, order: tuple[str, ...], checks: Mapping[str, tuple[_Check, ...]],
          forced: str | None) -> SdpaChoice:
    if forced is not None:
        if forced not in checks:
            raise LlmemError(f"Unknown attention backend {forced!r}: "
                             f"choose one of {', '.join(checks)}.")
        reason = _refusal(p, checks[forced])
        if reason:
            raise LlmemError(f"The attention backend {forced!r} cannot run here ({reason}): "
                             "leave the choice open or change the model's settings.")
        return SdpaChoice(forced)
    why: dict[str, str] = {}
    for backend in order:
        reason = _refusal(p, checks[backend])
        if reason is None:
            return SdpaChoice(backend, why)
        why[backend] = reason
    raise AssertionError("math takes everything")


def choose_sdpa(query: TensorMeta, key: TensorMeta, value: TensorMeta, *,
                mask: TensorMeta | None, dropout_p: float, is_causal: bool, enable_gqa: bool,
                requires_grad: bool, device: DeviceProfile, torch_version: tuple[int, int],
                forced: str | None = None, mask_requires_grad: bool = False,
                deterministic: bool = False,
                env: Mapping[str, str] = MappingProxyType({})) -> SdpaChoice:
    """The kernel on `device`: "flash", "efficient", "cudnn" or "math".

    Tried in the order flash, efficient, math; cuDNN comes first where torch prefers it and is
    otherwise only taken when `forced`. Without strides in the TensorMeta tensors are contiguous;
    `requires_grad` means that grad mode is on and an input requires it. Raises LlmemError when a
    forced backend cannot run.
    """
    params = _Params(query, key, value, mask, dropout_p, is_causal, enable_gqa, requires_grad,
                     mask_requires_grad, torch_version, device.compute_capability, deterministic)
    order: tuple[str, ...] = ("flash", "efficient", "math")
    if _prefers_cudnn(params, env):
        order = ("cudnn", *order)
    return _pick(params, order, _CHECKS, forced)


# --- CPU -----------------------------------------------------------------------------------------


def _no_dropout(p: _Params) -> str | None:
    return "dropout is not zero" if p.dropout_p > 0 else None


def _head_dim_cpu(p: _Params) -> str | None:
    sizes = {t.shape[-1] for t in (p.query, p.key, p.value)}
    return None if len(sizes) == 1 else f"head sizes differ: {sorted(sizes)}"


_CPU: dict[str, tuple[_Check, ...]] = {
    "flash": (
        _no_dropout, _tensor_shapes, lambda p: _batch_and_heads(p, gqa=True), _mask_shape,
        _head_dim_cpu, _nonzero_sequence_lengths,
        lambda p: _last_dim_stride_is_one(p, singleton=False, cpu=True),
        lambda p: _same_dtype(p, ("float32", "float64", "bfloat16", "float16")),
    ),
    "math": (),
}


def choose_sdpa_cpu(query: TensorMeta, key: TensorMeta, value: TensorMeta, *,
                    mask: TensorMeta | None, dropout_p: float, is_causal: bool, enable_gqa: bool,
                    requires_grad: bool, torch_version: tuple[int, int],
                    forced: str | None = None, mask_requires_grad: bool = False) -> SdpaChoice:
    """The kernel on the CPU: "flash" (`_scaled_dot_product_flash_attention_for_cpu`) or "math".

    `use_flash_attention_cpp` of sdp_utils_cpp.cpp. Raises LlmemError when a forced one cannot run.
    """
    params = _Params(query, key, value, mask, dropout_p, is_causal, enable_gqa, requires_grad,
                     mask_requires_grad, torch_version)
    return _pick(params, ("flash", "math"), _CPU, forced)
