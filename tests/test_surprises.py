"""What surprises people in practice must come out by itself.

Sources: accelerate issues 2624, 2674 and 3979 (fp32 masters under FSDP), torch.optim's foreach
temporaries (a P-sized square root), pytorch issue threads on whole-block gathers of MoE layers.
"""

from __future__ import annotations

import numpy as np
import pytest

import llmem
from llmem.estimate import Rank
from llmem.lifetimes import Category, Phase

MODEL = "llama-3.2-1b"
PARAMETERS = 1_235_814_400
COMMON = {"model": MODEL, "per_device_train_batch_size": 1, "seq_length": 64,
          "gradient_checkpointing": True, "gpu": "a100-80gb"}  # fmt: skip


def test_foreach_adamw_makes_the_optimizer_step_the_peak() -> None:
    """bf16: 2 + 2 + 4 bytes per parameter, and 2 more while the step runs."""
    worst = llmem.estimate(optim="adamw_torch", **COMMON).worst
    assert worst.peak_at.phase == "optimizer"
    assert worst.peak.requested / PARAMETERS == pytest.approx(10, rel=0.01)


def optimizer_peak(worst: Rank) -> int:
    """Requested bytes at most while the second step's optimizer runs."""
    start = next(
        tick
        for tick, phase, step in worst.table.trace.phase_ticks
        if phase is Phase.OPTIMIZER and step == 1
    )
    first, last = worst.timeline.span(start, 2**62)
    return int(worst.timeline.requested[first - 1 : last].max())


def test_fused_adamw_has_no_such_copy() -> None:
    foreach = optimizer_peak(llmem.estimate(optim="adamw_torch", **COMMON).worst)
    fused = optimizer_peak(llmem.estimate(optim="adamw_torch_fused", **COMMON).worst)
    assert (foreach - fused) / PARAMETERS == pytest.approx(2, rel=0.01)


def test_fsdp_with_bf16_on_two_gpus_needs_what_one_gpu_needs_without() -> None:
    """fp32 masters, gradients, two states and the foreach temporary: 20 bytes over two ranks."""
    two = llmem.estimate(
        optim="adamw_torch", bf16=True, gpus=2, strategy="fsdp2", **COMMON
    ).worst
    assert optimizer_peak(two) / PARAMETERS == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize(("gpus", "copies"), [(8, 1), (16, 2)])
def test_a_moe_block_is_gathered_whole(gpus: int, copies: int) -> None:
    """FSDP2 gathers all experts of a block, though each token uses two of eight.

    The experts are one parameter, sharded by expert: sixteen ranks pad eight experts to sixteen.
    """
    result = llmem.estimate(
        model="mixtral-8x7b", per_device_train_batch_size=1, seq_length=64, gpus=gpus,
        strategy="fsdp2", gradient_checkpointing=True, gpu="h100",
    )  # fmt: skip
    table, trace = result.worst.table.lifetimes, result.worst.table.trace
    block = sum(p.nbytes for p in trace.parameters if p.name.startswith("model.layers.3."))
    module = trace.modules.index("model.layers.3")
    gathers = table.take(
        (table.category == Category.COMMUNICATION)
        & (table.module == module)
        & (np.array([trace.op_name(int(o)) for o in table.birth_op]) == "all_gather")
    )
    assert block == pytest.approx(2.9e9, rel=0.02)
    assert int(gathers.nbytes.max()) == pytest.approx(copies * block, rel=0.02)
