"""A Trainer callback: what llmem predicts when training starts, what torch counted when it ends.

    trainer = Trainer(..., callbacks=[MemoryCallback(seq_length=2048)])

The prediction is made from the Trainer's own arguments and model; it takes seconds, once, on the
first process. On a GPU the measured peaks stand beside it at the end; elsewhere there is nothing to
measure and the callback says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from llmem.errors import LlmemError
from llmem.interop import compile_config
from llmem.interop.fsdp_config import trainer_fsdp

if TYPE_CHECKING:
    from llmem.estimate import Estimate

logger = logging.getLogger(__name__)

class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the predicted peak at the start and the measured one at the end.

    ``seq_length``: tokens per sequence, default ``args.max_length`` where the arguments have it
    (TRL). ``fields`` are further RunSpec fields. With ``stop=True`` training that will not fit the
    named ``gpu`` raises LlmemError before its first step; otherwise a failed prediction is a warning.
    """

    def __init__(self, seq_length: int | None = None, *, stop: bool = False, **fields: Any) -> None:
        self.seq_length = seq_length
        self.stop = stop
        self.fields = fields
        self.estimate: Estimate | None = None
        self.measured: dict[str, int] = {}
        """``allocated`` and ``reserved`` peaks in bytes of this process, after training on a GPU."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        try:
            self.estimate = self._predict(args, kwargs["model"])
        except LlmemError as error:
            if self.stop:
                raise
            logger.warning("llmem cannot predict this run: %s", error)
            return
        peak = self.estimate.worst.peak
        logger.warning(
            "llmem predicts a peak of %.2f GiB allocated, %.2f GiB reserved",
            peak.allocated / 2**30, peak.reserved / 2**30,
        )  # fmt: skip
        fit = self.estimate.fit
        if self.stop and fit is not None and not fit.fits:
            raise LlmemError(f"{fit.sentence}; change the arguments or leave stop=True out")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import torch

        if not state.is_world_process_zero or self.estimate is None:
            return
        if not torch.cuda.is_available():
            logger.warning("llmem: no GPU here, so nothing was measured")
            return
        self.measured = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        for level, measured in self.measured.items():
            predicted = getattr(self.estimate.worst.peak, level)
            logger.warning(
                "llmem: %s peak predicted %.2f GiB, measured %.2f GiB (%+.2f%%)",
                level, predicted / 2**30, measured / 2**30, 100 * (predicted / measured - 1),
            )  # fmt: skip

    def _predict(self, args: Any, model: Any) -> Estimate:
        from llmem.estimate import estimate

        length = self.seq_length or getattr(args, "max_length", None)
        if length is None:
            raise LlmemError("the Trainer's arguments do not say it; give seq_length")
        return estimate(**{**fields_of(args, model), "seq_length": length, **self.fields})


def fields_of(args: Any, model: Any) -> dict[str, Any]:
    """RunSpec fields that ``TrainingArguments`` and a model say, its length of sequence excepted.

    Raises LlmemError for settings that no strategy of llmem stands for.
    """
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    config = {**inner.config.to_dict(), "architectures": [type(inner).__name__]}
    first = next(inner.parameters())
    dtypes = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    fields: dict[str, Any] = {
        "model": config,
        "param_dtype": dtypes.get(str(first.dtype)),
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "max_grad_norm": args.max_grad_norm,
        "gradient_checkpointing": args.gradient_checkpointing,
        "bf16": args.bf16,
        "fp16": args.fp16,
        "optim": str(getattr(args.optim, "value", args.optim)),
        "liger": bool(getattr(args, "use_liger_kernel", False)),
        "attn_implementation": inner.config._attn_implementation,
        "gpus": args.world_size,
        **_strategy(args),
        **compile_config.trainer_compile(
            {key: getattr(args, key, None) for key in compile_config.TRAINER}
        ),
    }
    if hasattr(model, "peft_config"):
        fields |= _adapters(model)
    kwargs = args.gradient_checkpointing_kwargs or {}
    if "use_reentrant" in kwargs:
        fields["use_reentrant"] = bool(kwargs["use_reentrant"])
    return fields


def _strategy(args: Any) -> dict[str, Any]:
    if args.deepspeed:
        from llmem.interop.config_files import deepspeed_fields

        return deepspeed_fields(args.deepspeed)
    if args.fsdp:
        config = args.fsdp_config or {}
        return trainer_fsdp(args.fsdp, config, bf16=args.bf16, fp16=args.fp16)[0]
    return {"strategy": "ddp"} if args.world_size > 1 else {}


def _adapters(model: Any) -> dict[str, Any]:
    config = next(iter(model.peft_config.values()))
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    return {"method": kind, "peft_config": config.to_dict()}
