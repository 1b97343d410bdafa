"""Which ops autocast casts, and how, on CUDA and on a CPU.

The lists of aten/src/ATen/autocast_mode.h and autocast_mode.cpp. Which ops have an autocast kernel
at all depends on torch's version and is asked of the installed one; of those, the ops that are
named nowhere below run in fp32. tests/trace/test_autocast.py asks every real kernel.
"""

from __future__ import annotations

from enum import Enum


class Policy(Enum):
    """What autocast does to the floating-point arguments of an op."""

    LOWER = "lower_precision_fp"
    """All become the lower precision; casts of fp32 leaves are cached."""
    FP32 = "fp32"
    """All become fp32."""
    FP32_RESULT = "fp32_set_opt_dtype"
    """Arguments stay; the op is told to compute and answer in fp32 unless told otherwise."""
    FP32_NORM = "fp32_append_dtype"
    """As FP32_RESULT, by calling the overload that takes a dtype."""
    PROMOTE = "promote"
    """All become the widest of their types."""
    BANNED = "banned"
    """Raises: the op is unsafe in lower precision."""


_CUDA = {
    Policy.LOWER: """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
        cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
        addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention
    """,
    Policy.FP32_RESULT: """
        prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int
        log_softmax.Dimname cumprod cumprod.dimname cumsum cumsum.dimname linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList sum.dim_DimnameList
    """,
    Policy.FP32_NORM: "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    Policy.PROMOTE: """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """,
    Policy.BANNED: "binary_cross_entropy",
}

_CPU = {
    Policy.LOWER: """
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm
        bmm conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul
        mkldnn_rnn_layer mm prelu scaled_dot_product_attention
    """,
    Policy.PROMOTE: "cat index_copy stack",
}


def policy_of(op: str, device: str) -> Policy:
    """The policy of an op that has an autocast kernel for ``device`` ("cuda" or "cpu").

    >>> policy_of("bmm", "cuda"), policy_of("exp", "cuda")
    (<Policy.LOWER: 'lower_precision_fp'>, <Policy.FP32: 'fp32'>)
    """
    return _TABLES[device].get(op, Policy.FP32)


def _table(lists: dict[Policy, str]) -> dict[str, Policy]:
    return {op: policy for policy, ops in lists.items() for op in ops.split()}


_TABLES = {"cuda": _table(_CUDA), "cpu": _table(_CPU)}
