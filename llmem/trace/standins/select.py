"""Which stand-ins act for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile
from llmem.spec import RunSpec
from llmem.trace import standins
from llmem.trace.quantize import quantization_of
from llmem.trace.standins import flash_attn, foak, liger


def fuses_adapters(spec: RunSpec) -> bool:
    """Whether LoRA's products are fused (fms-acceleration, on 4-bit weights)."""
    bits = quantization_of(spec) in ("nf4", "fp4")
    return spec.kernels != "model" and spec.method in ("lora", "qlora") and bits


@contextmanager
def stand_ins_for(
    spec: RunSpec, model: torch.nn.Module, device: DeviceProfile, note: Callable[[str], None]
) -> Iterator[None]:
    """The registered stand-ins, flash-attn, and Liger where ``spec`` asks for it.

    ``spec.liger`` is what ``apply_liger_kernel_to_*`` does by default, its loss included;
    ``spec.loss == "liger"`` is the loss alone; ``spec.kernels`` are fms-acceleration's. Raises
    LlmemError if that cannot be.
    """
    wants_loss = spec.liger or spec.loss == "liger"
    fused = spec.kernels != "model"
    if fused and not device.is_cuda:
        raise LlmemError("fms-acceleration's kernels run on GPUs only; leave out --kernels")
    if fused and (spec.liger or spec.loss != "full"):
        raise LlmemError(f"--kernels {spec.kernels} brings its own loss; leave out --liger and --loss")
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
            assumed = stack.enter_context(liger.kernels(model, device))
            note("Liger: norms, RoPE, MLPs as its Trainer patch has them (linkedin/Liger-Kernel 0.8)")
            for sentence in assumed:
                note(sentence)
        if wants_loss:
            note(stack.enter_context(liger.loss(model, by_default=spec.loss != "liger")))
        if fused:
            stack.enter_context(
                foak.kernels(model, spec.kernels, adapters=fuses_adapters(spec), note=note)
            )
        yield
