"""The scratch table: literal sizes from allocator histories, and hand-computed ones from sources."""

import subprocess
import sys
from typing import Any

import pytest

from llmem.gpu.devices import get_device
from llmem.gpu.scratch import (
    BRIEF,
    DURING,
    PERSISTENT,
    Scratch,
    TensorMeta,
    has_scratch,
    scratch,
)
from llmem.gpu.scratch_attention import flash_backward_scratch, flash_forward_scratch
from llmem.gpu.scratch_blas import cublas_workspace
from llmem.gpu.scratch_reduce import reduce_buffers

A100, H100, B200 = (get_device(name) for name in ("a100", "h100", "b200"))
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8, "bool": 1}
MIB = 2**20


def meta(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorMeta:
    return TensorMeta(shape, dtype, SIZES[dtype], stride)


def run(op: str, *inputs: Any, out: TensorMeta | None = None, device: Any = A100,
        env: dict[str, str] | None = None, **options: Any) -> list[Scratch]:
    return scratch(op, inputs, [out] if out else [], device, env=env or {}, **options)


def sizes(found: list[Scratch], when: str | None = None) -> list[int]:
    return [s.nbytes for s in found if when in (None, s.when)]


# --- cuBLAS ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "version", "config", "nbytes"), [
    ("a100", (2, 8), "", 8_519_680),  # 8.125 MiB, the "leak" of pytorch#95668
    ("rtx4090", (2, 13), "", 8_519_680),
    ("h100", (2, 6), "", 33_554_432),  # in an allocator log of torch 2.6 on H100
    ("b200", (2, 11), "", 8_519_680),
    ("b200", (2, 12), "", 33_554_432),
    ("rtx5090", (2, 13), "", 33_554_432),
    ("h100", (2, 8), ":4096:8", 4096 * 8 * 1024),
    ("a100", (2, 8), ":16:8", 16 * 8 * 1024),
    ("a100", (2, 8), ":4096:2:16:8", 8_519_680),
    ("a100", (2, 8), ":0:0", 0),
    ("a100", (2, 8), "rubbish", 8_519_680),
])
def test_cublas_workspace(gpu: str, version: tuple[int, int], config: str, nbytes: int) -> None:
    assert cublas_workspace(get_device(gpu), {"CUBLAS_WORKSPACE_CONFIG": config}, version) == nbytes


def test_matmul_workspace_is_per_thread_and_stream() -> None:
    call = ("mm", meta(8, 4), meta(4, 16))
    forward, backward, side = run(*call), run(*call, thread="autograd"), run(*call, stream=7)
    assert [s.when for s in forward] == [PERSISTENT]
    assert len({forward[0].key, backward[0].key, side[0].key}) == 3
    assert run("bmm", meta(2, 8, 4), meta(2, 4, 16))[0].key == forward[0].key


def test_disabled_workspace_allocates_nothing() -> None:
    assert run("mm", meta(8, 4), meta(4, 16), env={"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == []


@pytest.mark.parametrize(("version", "env", "own"), [
    ((2, 6), {}, [(MIB, DURING)]),
    ((2, 8), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, []),
    ((2, 9), {}, [(MIB, PERSISTENT)]),
    ((2, 11), {"CUBLASLT_WORKSPACE_SIZE": "4096"}, [(4 * MIB, PERSISTENT)]),
    ((2, 12), {}, []),
    ((2, 13), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, [(MIB, PERSISTENT)]),
])
def test_cublaslt_workspace_of_a_linear_with_bias(
        version: tuple[int, int], env: dict[str, str], own: list[tuple[int, str]]) -> None:
    found = run("addmm", meta(16), meta(8, 4), meta(4, 16), out=meta(8, 16), env=env,
                torch_version=version)
    assert found[0].key == ("cublas_workspace", "main", 0)
    assert [(s.nbytes, s.when) for s in found[1:]] == own


def test_addmm_with_a_matrix_needs_no_cublaslt() -> None:
    found = run("addmm", meta(8, 16), meta(8, 4), meta(4, 16), out=meta(8, 16),
                torch_version=(2, 6))
    assert len(found) == 1


def test_operands_that_cublas_cannot_read_are_copied() -> None:
    transposed = meta(4, 8, stride=(1, 4))
    strided = meta(4, 8, stride=(16, 2))
    assert len(run("mm", transposed, meta(8, 3))) == 1
    assert sizes(run("mm", strided, meta(8, 3)), DURING) == [4 * 8 * 4]


# --- reductions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "reduced", "acc", "expected"), [
    # gradient of a norm's weight: sum over 2,048 tokens of 1,024 channels (torch 2.11, H100)
    (meta(4, 512, 1024), (0, 1), 4, (16_777_216, 32)),
    # the same over channels of a tensor laid out channels last (torch 2.6, H100)
    (meta(4, 128, 2560, stride=(128, 1, 512)), (2,), 4, (10_485_760, 16)),
    # log-softmax by hand: sum and maximum over a vocabulary of 10,000 in that layout
    (meta(4, 128, 10000, stride=(128, 1, 512)), (2,), 4, (41_156_608, 16)),
    (meta(4, 128, 10000, stride=(128, 1, 512)), (2,), 16, (164_626_432, 16)),
])
def test_reduction_buffers_of_allocator_logs(
        tensor: TensorMeta, reduced: tuple[int, ...], acc: int, expected: tuple[int, int]) -> None:
    assert reduce_buffers(tensor, reduced, acc, H100) == expected


def test_reductions_in_one_block_need_nothing() -> None:
    assert reduce_buffers(meta(4, 512, 1024), (2,), 4, H100) == (0, 0)
    assert reduce_buffers(meta(2048), (0,), 4, H100) == (0, 0)  # the mean of the loss in that log
    assert reduce_buffers(meta(1), (0,), 4, H100) == (0, 0)


def test_reduction_to_a_scalar() -> None:
    # 512 threads a block, 131,072 values each; 132 SMs hold 2048 / 512 = 4 blocks each: 528 partial
    # sums of 4 bytes (at least 131,072 / 256 = 512, at most 131,072 / 16 = 8,192)
    assert reduce_buffers(meta(8192, 8192), (0, 1), 4, H100) == (528 * 4, 4)


def test_reduction_arguments() -> None:
    tensor = meta(4, 512, 1024)
    expected = [16_777_216, 32]
    assert sizes(run("sum", tensor, [0, 1], out=meta(1024), device=H100)) == expected
    assert sizes(run("sum", tensor, [0, 1], True, out=meta(1, 1, 1024), device=H100)) == expected
    assert sizes(run("mean", tensor, (-3, -2), out=meta(1024), device=H100)) == expected
    assert run("sum", tensor, [2], out=meta(4, 512), device=H100) == []
    assert run("max", tensor, meta(4, 512, 1024), device=H100) == []  # element-wise maximum
    half = meta(4, 512, 1024, dtype="bfloat16")
    assert sizes(run("sum", half, [0, 1], out=half, device=H100)) == expected  # fp32 accumulation
    flat = meta(2048, 1024)
    assert sizes(run("max", flat, 0, out=meta(1024), device=H100)) == [4 * 16_777_216, 32]
    assert sizes(run("linalg_vector_norm", flat, 2, [0], out=meta(1024), device=H100)) == expected


def test_reduction_beyond_two_gib_is_split() -> None:
    tensor = meta(2**20, 1024, dtype="bfloat16")  # exactly 2 GiB: halves of 2^19 rows
    whole = run("sum", tensor, [0], out=meta(1024, dtype="bfloat16"), device=H100)
    half = reduce_buffers(meta(2**19, 1024, dtype="bfloat16"), (0,), 4, H100)
    assert sizes(whole) == [1024 * 4, *half]


# --- attention ---------------------------------------------------------------------------------------


def test_flash_backward_of_a_grouped_model() -> None:
    q, kv = meta(2, 32, 1000, 128, dtype="bfloat16"), meta(2, 8, 1000, 128, dtype="bfloat16")
    found = run("_scaled_dot_product_flash_attention_backward", q, q, kv, kv)
    assert sizes(found) == [
        2 * 32 * 1024 * 4,  # softmax_d, 1,000 positions rounded to 1,024
        2 * 1024 * 32 * 128 * 4,  # dq_accum
        2 * 1000 * 32 * 128 * 2, 2 * 1000 * 32 * 128 * 2,  # dk and dv of all query heads
    ]


@pytest.mark.parametrize(("head", "rounded"), [
    (64, 64), (72, 96), (80, 96), (96, 96), (128, 128), (136, 192), (192, 192), (256, 256)])
def test_flash_accumulator_head_size(head: int, rounded: int) -> None:
    found = flash_backward_scratch(128, 128, 1, 1, head, 2, batch=1)
    assert sizes(found) == [128 * 4, 128 * rounded * 4]


def test_flash_backward_packed_and_deterministic() -> None:
    q = meta(5000, 16, 64, dtype="bfloat16")
    starts = meta(4, dtype="int64")
    rows = 5000 + 128 * 3
    found = run("_flash_attention_backward", q, q, q, q, q, meta(16, 5000), starts, starts)
    assert sizes(found) == [rows * 16 * 4, rows * 16 * 64 * 4]
    assert sizes(flash_backward_scratch(128, 128, 4, 4, 64, 2, batch=1, deterministic_splits=27)
                 )[1] == 27 * 128 * 4 * 64 * 4


def test_flash_backward_copies_a_gradient_of_odd_layout() -> None:
    q = meta(1, 4, 128, 64, dtype="bfloat16")
    dense = meta(1, 4, 128, 64, dtype="bfloat16", stride=(32768, 64, 256, 1))  # [B, M, H, K]
    heads_first = meta(1, 4, 128, 64, dtype="bfloat16", stride=(32768, 8192, 64, 1))
    op = "_scaled_dot_product_flash_attention_backward"
    assert len(run(op, dense, q, q, q)) == 2
    assert sizes(run(op, heads_first, q, q, q))[0] == q.nbytes


def test_flash_forward_splits_keys_only_when_the_gpu_is_idle() -> None:
    assert flash_forward_scratch(2, 32, 8, 2048, 2048, 128, A100) == []
    assert flash_forward_scratch(1, 8, 8, 1, 4096, 128, A100, dropout_p=0.1) == []
    # one query, 8 heads: 8 blocks of work, 216 slots, 32 key blocks. 16 splits fill 128 / 216 of
    # one wave, 32 splits 256 / 216 of two: both 59%; 11 splits (41%) are below 85% of that
    found = flash_forward_scratch(1, 8, 8, 1, 4096, 128, A100)
    assert sizes(found) == [16 * 8 * 4, 16 * 8 * 128 * 4]
    # grouped: 32 query heads over 8 become 4 rows of 8 heads, the same amount of work
    grouped = flash_forward_scratch(1, 32, 8, 1, 4096, 128, A100)
    assert sizes(grouped) == [16 * 8 * 4 * 4, 16 * 8 * 4 * 128 * 4]


def test_efficient_backward_fp32() -> None:
    q = meta(10, 12, 128, 64)
    found = run("_scaled_dot_product_efficient_attention_backward", q, q, q, q, None, q,
                meta(10, 12, 128), None, None, 0.1)
    rows = 10 * 12 * 128
    # 64 x 64 blocks: 2 key splits, at most 200 // 120 = 1; dK and dV 64·(64 + 64) floats;
    # 2 tiles of dQ of 4,096 floats and a 16-byte lock
    per_head = 64 * 128 + 2 * (16 + 4 * 4096) // 4
    assert [(s.nbytes, s.when) for s in found] == [
        (rows * 4, DURING), (rows * 64 * 4 + rows * 4, BRIEF), (120 * per_head * 4, DURING)]


def test_efficient_backward_half_keeps_dk_and_dv_in_registers() -> None:
    q = meta(2, 8, 256, 128, dtype="float16")
    op = "_scaled_dot_product_efficient_attention_backward"
    rows = 2 * 8 * 256
    on_a100 = run(op, q, q, q, q)
    # 128 x 128 blocks: 2 x 1 tiles of 16,384 floats
    assert sizes(on_a100) == [rows * 4, 16 * 2 * (16 + 4 * 16384)]
    on_4090 = run(op, q, q, q, q, device=get_device("rtx4090"))
    # 99 KiB of shared memory: 64 x 64 blocks, dK and dV staged for 4 key splits
    per_head = 4 * 64 * (128 + 128) + 4 * 2 * (16 + 4 * 4096) // 4
    assert sizes(on_4090) == [rows * 4, 16 * per_head * 4]


def test_efficient_forward_accumulates_wide_half_outputs() -> None:
    op = "_scaled_dot_product_efficient_attention"
    wide = meta(2, 4, 64, 160, dtype="float16")
    assert sizes(run(op, wide, wide, wide)) == [2 * 4 * 64 * 160 * 4]
    assert run(op, meta(2, 4, 64, 160), meta(2, 4, 64, 160), meta(2, 4, 64, 160)) == []
    narrow = meta(2, 4, 64, 128, dtype="float16")
    assert run(op, narrow, narrow, narrow) == []


def test_cudnn_backward_is_an_estimate() -> None:
    q = meta(2, 8, 512, 128, dtype="bfloat16")
    op = "_scaled_dot_product_cudnn_attention_backward"
    [found] = run(op, q, q, q, q, device=H100)
    assert found.nbytes == 2 * 8 * 512 * 129 * 4 and not found.exact
    kv = meta(2, 2, 512, 128, dtype="bfloat16")
    [grouped] = run(op, q, q, kv, kv, device=H100)
    assert grouped.nbytes == found.nbytes + 2 * 8 * 512 * 256 * 2


# --- indices, norms, lists ---------------------------------------------------------------------------


def test_embedding_backward_of_few_indices() -> None:
    assert run("embedding_dense_backward", meta(4, 768, 64), meta(4, 768, dtype="int64"),
               1000, -1, False) == []


def test_embedding_backward_of_many_indices() -> None:
    n, v, d = 16384, 1024, 4096
    found = run("embedding_dense_backward", meta(8, 2048, d), meta(8, 2048, dtype="int64"),
                v, -1, False)
    partial = n // 10 + v
    assert sizes(found, DURING) == [
        n * 8, n * 8, n * 8, 8, v * 8, v * 8, 8, partial * 8, partial * d * 4]
    assert found[2].nbytes == n * 8 and found[2].when == BRIEF  # arange, gone after the sort


def test_embedding_backward_grows_with_the_vocabulary_as_measured() -> None:
    """`nn.Embedding`, 16,384 tokens, D = 4,096, fp32 on A100: from V = 1,024 to 2,048 the peak grew
    by 83,910,656 bytes: four tensors of the weight's size and the scratch."""
    def total(v: int) -> int:
        return sum(sizes(run("embedding_dense_backward", meta(8, 2048, 4096),
                             meta(8, 2048, dtype="int64"), v, -1, False), DURING))

    assert total(2048) - total(1024) == 83_910_656 - 4 * 1024 * 4096 * 4
    # beyond the number of tokens only the weights grow: 17,419,450,368 - 16,345,708,544
    assert total(32768) - total(16384) == 17_419_450_368 - 16_345_708_544 - 4 * 16384 * 4096 * 4


def test_index_put_as_in_an_allocator_log() -> None:
    """The backward pass of `weight[ids]`, 4 x 512 ids, torch 2.11 on H100: a wrapped copy freed at
    once, linear index, sorted and original positions, range, then one byte for CUB."""
    found = run("_index_put_impl_", meta(10000, 1024), [meta(4, 512, dtype="int64")],
                meta(4, 512, 1024), True)
    assert sizes(found) == [16384, 16384, 16384, 16384, 16384, 1]
    assert [s.when for s in found] == [BRIEF, DURING, DURING, DURING, DURING, BRIEF]


def test_index_put_copies_values_of_odd_layout() -> None:
    # 4 x 128 ids and a gradient laid out channels first: 5,242,880 bytes more (torch 2.6, H100)
    found = run("index_put", meta(10000, 2560), [meta(4, 128, dtype="int64")],
                meta(4, 128, 2560, stride=(128, 1, 512)), True)
    assert sizes(found) == [4096, 4096, 5_242_880, 4096, 4096, 4096, 1]
    assert run("index_put", meta(10000, 8), [meta(4, dtype="int64")], meta(4, 8), False) == []
    assert run("index_put", meta(100), [meta(100, dtype="bool")], meta(3), True) == []


def test_sort_of_long_rows_is_an_estimate() -> None:
    assert run("sort", meta(4, 4096), -1, True) == []
    found = run("sort", meta(1, 32000), -1, True)
    assert sizes(found)[0] == 32000 * 8
    assert found[1].nbytes >= 32000 * 12 and not found[1].exact


def test_foreach_norm() -> None:
    tensors = [meta(65537), meta(10), meta(3, 3, dtype="float32")]
    assert sizes(run("_foreach_norm", tensors, 2)) == [3 * 2 * 4]
    assert run("_foreach_norm", []) == []


def test_layer_norm_backward_of_many_short_rows() -> None:
    def backward(rows: int, width: int, **options: Any) -> list[Scratch]:
        x, w = meta(rows, width), meta(width)
        return run("native_layer_norm_backward", x, x, [width], meta(rows, 1), meta(rows, 1), w, w,
                   [True, True, True], **options)

    assert backward(65536, 256) == []
    assert backward(100_000, 4096) == []  # 128 column blocks keep the GPU busy
    found = backward(100_000, 256)
    assert sizes(found, DURING) == [3125 * 256 * 4, 3125 * 256 * 4]  # ceil(100,000 / 32) blocks
    assert backward(100_000, 256, torch_version=(2, 6)) == []


def test_rms_norm_backward_has_no_bias() -> None:
    x, w = meta(100_000, 128), meta(128)
    found = run("_fused_rms_norm_backward", x, x, [128], meta(100_000, 1), w, [True, True])
    assert sizes(found, DURING) == [3125 * 128 * 4]


def test_group_norm() -> None:
    x, w = meta(8, 32, 10), meta(32)
    assert sizes(run("native_group_norm", x, w, w, 8, 32, 10, 4, 1e-5)) == [1024, 1024]
    assert run("native_group_norm", x, None, None, 8, 32, 10, 4, 1e-5) == []
    found = run("native_group_norm_backward", x, x, meta(8, 4), meta(8, 4), w, 8, 32, 10, 4,
                [True, True, True])
    assert sizes(found) == [1024, 1024, 128, 128, 1024]


def test_softmax_backward_multiplies_first() -> None:
    """`Tensor tmp = grad * output` in softmax_backward_cuda_out; seen in Liger's tvd rows."""
    grad, output = meta(4, 1000), meta(4, 1000)
    found = run("_softmax_backward_data", grad, output, -1, "float32", out=meta(4, 1000))
    assert sizes(found) == [4 * 1000 * 4]
    half = meta(4, 1000, dtype="bfloat16")
    assert sizes(run("_softmax_backward_data", half, half, -1, "bfloat16", out=half)) == [8000]
    assert not has_scratch("_log_softmax_backward_data")


# --- the table -----------------------------------------------------------------------------------------


def test_most_ops_have_none() -> None:
    assert run("add", meta(4), meta(4)) == []
    assert not has_scratch("_log_softmax") and has_scratch("mm")


def test_nothing_on_the_cpu() -> None:
    assert run("mm", meta(8, 4), meta(4, 16), device=get_device("cpu")) == []
    assert run("embedding_dense_backward", meta(8, 2048, 64), meta(8, 2048, dtype="int64"), 1024, -1,
               False, device=get_device("cpu")) == []


def test_every_entry_names_its_source() -> None:
    q = meta(1, 4, 128, 64)
    calls = [("mm", (meta(8, 4), meta(4, 16))), ("sum", (meta(4096, 1024), [0])),
             ("_scaled_dot_product_efficient_attention_backward", (q, q, q, q))]
    for op, inputs in calls:
        found = run(op, *inputs)
        assert found and all(s.source and s.nbytes > 0 for s in found)


def test_needs_no_torch() -> None:
    code = "import sys, llmem.gpu.scratch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
