"""SDPA's choice of kernel: one test for each rule; on the CPU against torch itself."""

import itertools
from typing import Any

import pytest

from llmem.errors import LlmemError
from llmem.gpu.devices import get_device
from llmem.gpu.scratch import TensorMeta
from llmem.gpu.sdpa import SdpaChoice, choose_sdpa, choose_sdpa_cpu

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def meta(*shape: int, dtype: str = "bfloat16", stride: tuple[int, ...] | None = None) -> TensorMeta:
    return TensorMeta(shape, dtype, SIZES[dtype], stride)


def choose(gpu: str = "a100", *, q: tuple[int, ...] = (2, 8, 128, 64), kv: tuple[int, ...] = (),
           v: tuple[int, ...] = (), dtype: str = "bfloat16", **options: Any) -> SdpaChoice:
    settings: dict[str, Any] = {
        "mask": None, "dropout_p": 0.0, "is_causal": True, "enable_gqa": False,
        "requires_grad": True, "torch_version": (2, 8), "device": get_device(gpu)}
    settings.update(options)
    kv = kv or q
    return choose_sdpa(meta(*q, dtype=dtype), meta(*kv, dtype=dtype), meta(*(v or kv), dtype=dtype),
                       **settings)


def test_flash_first() -> None:
    assert choose() == SdpaChoice("flash", {})


def test_fp32_takes_efficient() -> None:
    choice = choose(dtype="float32")
    assert choice.backend == "efficient"
    assert "float32" in choice.why["flash"]


def test_mask_refuses_flash() -> None:
    choice = choose(mask=meta(2, 1, 128, 128), is_causal=False)
    assert choice.backend == "efficient" and "mask" in choice.why["flash"]


@pytest.mark.parametrize(("gpu", "dtype", "backend"), [
    ("v100", "float16", "efficient"), ("v100", "float32", "efficient"), ("v100", "bfloat16", "math"),
    ("t4", "float16", "efficient"), ("t4", "bfloat16", "math"), ("rtx4090", "bfloat16", "flash"),
    ("rtx5090", "float16", "flash"), ("b200", "bfloat16", "flash"), ("a100", "float64", "math"),
])
def test_dtype_and_generation(gpu: str, dtype: str, backend: str) -> None:
    assert choose(gpu, dtype=dtype).backend == backend


@pytest.mark.parametrize(("gpu", "version", "env", "backend"), [
    ("h100", (2, 5), {}, "flash"), ("h100", (2, 9), {}, "flash"), ("h100", (2, 10), {}, "flash"),
    ("h100", (2, 11), {}, "cudnn"), ("h200", (2, 13), {}, "cudnn"), ("b200", (2, 13), {}, "cudnn"),
    ("a100", (2, 13), {}, "flash"), ("rtx5090", (2, 13), {}, "flash"),
    ("h100", (2, 13), {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}, "flash"),
])
def test_cudnn_first_by_version(gpu: str, version: tuple[int, int], env: dict[str, str],
                                backend: str) -> None:
    assert choose(gpu, torch_version=version, env=env).backend == backend


@pytest.mark.parametrize(("options", "reason"), [
    ({"dropout_p": 0.1}, "1/16"),
    ({"q": (2, 8, 128, 256)}, "beyond 128"),
    ({"deterministic": True}, "deterministic"),
    ({"mask": meta(2, 1, 128, 128), "mask_requires_grad": True, "is_causal": False}, "gradient"),
    ({"mask": meta(3, 1, 128, 128), "is_causal": False}, "broadcast"),
    ({"kv": (2, 8, 1, 64), "is_causal": False}, "single key"),
    ({"q": (2, 8, 128, 60)}, "multiples of 8"),
    ({"q": (2, 8, 128, 64), "dtype": "float32"}, "float16"),
    ({"q": (70000, 1, 8, 64)}, "65,535"),
])
def test_cudnn_refusals(options: dict[str, Any], reason: str) -> None:
    choice = choose("h100", torch_version=(2, 13), **options)
    assert choice.backend != "cudnn" and reason in choice.why["cudnn"]


def test_cudnn_takes_masks_groups_dropout_in_sixteenths_and_192_128() -> None:
    new: dict[str, Any] = {"torch_version": (2, 13)}
    assert choose("h100", mask=meta(128, 128), is_causal=False, **new).backend == "cudnn"
    assert choose("h100", kv=(2, 2, 128, 64), enable_gqa=True, **new).backend == "cudnn"
    assert choose("h100", dropout_p=0.125, **new).backend == "cudnn"
    assert choose("h100", q=(2, 8, 128, 192), v=(2, 8, 128, 128), **new).backend == "cudnn"


@pytest.mark.parametrize(("gpu", "head", "dropout", "grad", "backend"), [
    ("rtx4090", 192, 0.0, True, "flash"), ("rtx4090", 200, 0.0, True, "efficient"),
    ("rtx4090", 224, 0.0, True, "efficient"), ("rtx4090", 256, 0.0, True, "flash"),
    ("rtx4090", 256, 0.1, True, "efficient"), ("rtx4090", 224, 0.0, False, "flash"),
    ("rtx3090", 224, 0.0, True, "efficient"), ("rtx5090", 224, 0.0, True, "efficient"),
    ("a100", 224, 0.1, True, "flash"), ("a100", 264, 0.0, True, "efficient"),
])
def test_flash_head_size_limits(gpu: str, head: int, dropout: float, grad: bool,
                                backend: str) -> None:
    choice = choose(gpu, q=(1, 4, 64, head), dropout_p=dropout, requires_grad=grad)
    assert choice.backend == backend


def test_flash_pads_odd_head_sizes_but_efficient_does_not() -> None:
    assert choose(q=(1, 4, 64, 100)).backend == "flash"
    masked = choose(q=(1, 4, 64, 100), mask=meta(64, 64), is_causal=False)
    assert masked.backend == "math" and "multiples of 8" in masked.why["efficient"]


def test_efficient_alignment_by_generation() -> None:
    assert choose("a100", q=(1, 4, 64, 60), dtype="float32").backend == "efficient"
    assert choose("a100", q=(1, 4, 64, 62), dtype="float32").backend == "math"
    assert choose("v100", q=(1, 4, 64, 62), dtype="float32").backend == "efficient"
    assert choose("v100", q=(1, 4, 64, 60), dtype="float16").backend == "math"


def test_causal_with_different_lengths_refuses_flash() -> None:
    choice = choose(q=(1, 4, 64, 64), kv=(1, 4, 128, 64))
    assert choice.backend == "efficient" and "is_causal" in choice.why["flash"]
    assert choose(q=(1, 4, 64, 64), kv=(1, 4, 128, 64), is_causal=False).backend == "flash"


def test_value_head_size_of_its_own() -> None:
    choice = choose(q=(1, 4, 64, 192), v=(1, 4, 64, 128))
    assert choice.backend == "efficient" and "equal" in choice.why["flash"]


def test_grouped_heads() -> None:
    grouped: dict[str, Any] = {"q": (1, 8, 64, 64), "kv": (1, 2, 64, 64)}
    assert choose(**grouped, enable_gqa=True).backend == "flash"
    assert choose(**grouped).backend == "math"
    assert choose(q=(1, 8, 64, 64), kv=(1, 3, 64, 64), enable_gqa=True).backend == "math"
    masked: dict[str, Any] = {**grouped, "enable_gqa": True, "mask": meta(64, 64),
                              "is_causal": False}
    assert choose(**masked, torch_version=(2, 13)).backend == "math"
    assert choose(**masked, torch_version=(2, 14)).backend == "efficient"
    single: dict[str, Any] = {"q": (1, 8, 64, 64), "kv": (1, 1, 64, 64)}
    assert choose(**single, torch_version=(2, 13)).backend == "math"
    assert choose(**single, torch_version=(2, 14)).backend == "flash"


def test_batch_rank_empty_and_stride() -> None:
    assert choose(q=(2, 4, 64, 64), kv=(1, 4, 64, 64)).backend == "math"
    assert choose(q=(4, 64, 64)).backend == "math"
    assert choose(q=(1, 4, 0, 64)).backend == "math"
    odd = meta(1, 4, 64, 64, stride=(16384, 4096, 1, 64))
    flat = meta(1, 4, 64, 64)
    choice = choose_sdpa(odd, flat, flat, mask=None, dropout_p=0.0, is_causal=True,
                         enable_gqa=False, requires_grad=True, device=get_device("a100"),
                         torch_version=(2, 8))
    assert choice.backend == "math" and "stride" in choice.why["flash"]


def test_forcing() -> None:
    assert choose(forced="math").backend == "math"
    assert choose(forced="cudnn").backend == "cudnn"
    assert choose(forced="efficient").backend == "efficient"
    with pytest.raises(LlmemError, match="mask"):
        choose(forced="flash", mask=meta(128, 128), is_causal=False)
    with pytest.raises(LlmemError, match="Unknown attention backend"):
        choose(forced="xformers")


CASES = list(itertools.product(
    ("float32", "bfloat16", "float64"), (0.0, 0.1), (None, (16, 16), (2, 1, 16, 16), (1, 16, 16)),
    (False, True), ((4, 4), (4, 2), (4, 1)), (8, 12)))


@pytest.mark.parametrize("transposed", [False, True])
def test_cpu_choice_is_torchs(transposed: bool) -> None:
    torch = pytest.importorskip("torch")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])

    def describe(tensor: Any) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), str(tensor.dtype)[6:], tensor.element_size(),
                          tuple(tensor.stride()))

    for dtype, dropout, mask_shape, gqa, (heads, kv), value_head in CASES:
        kind = getattr(torch, dtype)
        q = torch.zeros(2, heads, 16, 8, dtype=kind)
        k, v = (torch.zeros(2, kv, 16, size, dtype=kind) for size in (8, value_head))
        if transposed:
            q = torch.zeros(2, heads, 8, 16, dtype=kind).transpose(2, 3)
        mask = None if mask_shape is None else torch.zeros(mask_shape, dtype=kind)
        real = torch._fused_sdp_choice(q, k, v, mask, dropout, False, enable_gqa=gqa)
        ours = choose_sdpa_cpu(
            describe(q), describe(k), describe(v), mask=None if mask is None else describe(mask),
            dropout_p=dropout, is_causal=False, enable_gqa=gqa, requires_grad=False,
            torch_version=(major, minor))
        assert {0: "math", 1: "flash"}[real] == ours.backend, (dtype, dropout, mask_shape, gqa, kv)
