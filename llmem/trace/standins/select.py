"""Which stand-ins act for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.spec import RunSpec
from llmem.trace import standins
from llmem.trace.standins import flash_attn, liger


@contextmanager
def stand_ins_for(
    spec: RunSpec, model: torch.nn.Module, device: DeviceProfile, note: Callable[[str], None]
) -> Iterator[None]:
    """The registered stand-ins, flash-attn, and Liger where ``spec`` asks for it.

    ``spec.liger`` is what ``apply_liger_kernel_to_*`` does by default, its loss included;
    ``spec.loss == "liger"`` is the loss alone. Raises LlmemError if that cannot be.
    """
    wants_loss = spec.liger or spec.loss == "liger"
    if wants_loss and not device.is_cuda:
        raise LlmemError("Liger's kernels run on GPUs only; leave out --liger, or --gpu cpu")
    with ExitStack() as stack:
        stack.enter_context(standins.active())
        if spec.attn_implementation == flash_attn.NAME:
            stack.enter_context(flash_attn.active())
            note("flash-attn 2: " + (
                "unpadded and padded again in every layer, no token dropped (an upper bound)"
                if spec.padding
                else "variable length, one sequence per document"
                if spec.packed
                else "dense, without a mask"
            ))  # fmt: skip
        if spec.liger:
            stack.enter_context(liger.kernels(model, device))
            note("Liger: RMSNorm, RoPE and gated MLP (linkedin/Liger-Kernel 0.8)")
        if wants_loss:
            stack.enter_context(liger.loss(model))
            note("Liger: fused linear cross-entropy, no logits")
        yield
