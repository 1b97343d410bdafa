"""Names of optimizers, as in ``TrainingArguments.optim``; nothing here needs torch."""

from __future__ import annotations

import difflib

TORCH = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_foreach",
    "adamw_torch_single",
    "adam",
    "sgd",
    "sgd_momentum",
    "adafactor",
    "adafactor_torch",
    "rmsprop",
    "adagrad",
)
"""Traced as they are. ``adamw_torch`` is torch's AdamW as torch chooses its implementation (foreach
on CUDA), ``adamw_torch_foreach`` all parameters at once, ``adamw_torch_single`` the loop over
parameters (whatever the device), ``adam`` is ``torch.optim.Adam``, ``sgd_momentum`` is SGD with
momentum 0.9, ``adafactor`` is transformers' and ``adafactor_torch`` torch's."""

BITSANDBYTES = (
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
)
"""Of bitsandbytes; ``adamw_8bit`` is another name of ``adamw_bnb_8bit``."""

OPTIMIZERS = (*TORCH, *BITSANDBYTES)

_NOT_MODELLED = {
    "galore": "projects gradients by a decomposition made at run time",
    "apollo": "projects gradients to a rank of its own",
    "lomo": "updates parameters inside backward with kernels of its own",
    "adalomo": "updates parameters inside backward with kernels of its own",
    "grokadamw": "is a package of its own",
    "schedule": "is a package of its own",
    "stable": "is a package of its own",
    "adamw_anyprecision": "is a package of its own (torchdistx)",
    "adamw_torch_8bit": "is torchao's",
    "adamw_torch_4bit": "is torchao's",
    "adamw_torch_xla": "runs on XLA devices",
    "adamw_torch_npu": "runs on NPUs",
}
"""How names of ``TrainingArguments.optim`` begin that are not known here, and what they are."""


def unknown_optimizer(name: str) -> str:
    """One sentence about a name that is not in ``OPTIMIZERS``, with what to use instead."""
    for start, what in _NOT_MODELLED.items():
        if name.startswith(start):
            return f"optimizer '{name}' {what}, which is not modelled; use adamw_torch or adafactor"
    near = difflib.get_close_matches(name, OPTIMIZERS, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(OPTIMIZERS)}"
    return f"unknown optimizer '{name}': {hint}"
