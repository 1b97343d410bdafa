"""Which runs are compared: every model with eight ways to train it."""

from __future__ import annotations

from typing import Any

from experiments.real_cpu.models import MODELS
from llmem.spec import RunSpec, make_spec

BATCH, TOKENS = 3, 23

CASES: dict[str, dict[str, Any]] = {
    "sdpa fp32 sgd": {"attn_implementation": "sdpa", "optim": "sgd"},
    "eager fp32 adamw-foreach": {"attn_implementation": "eager", "optim": "adamw_torch_foreach"},
    "sdpa fp32 adamw-single ckpt": {
        "attn_implementation": "sdpa",
        "optim": "adamw_torch_single",
        "gradient_checkpointing": True,
    },
    "eager fp32 sgd ckpt": {
        "attn_implementation": "eager",
        "optim": "sgd",
        "gradient_checkpointing": True,
    },
    "sdpa bf16 adamw-foreach": {
        "attn_implementation": "sdpa",
        "optim": "adamw_torch_foreach",
        "param_dtype": "bf16",
    },
    "eager bf16 adamw-single ckpt": {
        "attn_implementation": "eager",
        "optim": "adamw_torch_single",
        "param_dtype": "bf16",
        "gradient_checkpointing": True,
    },
    "sdpa fp32 lora adamw-single": {
        "attn_implementation": "sdpa",
        "optim": "adamw_torch_single",
        "method": "lora",
    },
    "eager bf16 lora adamw-foreach ckpt": {
        "attn_implementation": "eager",
        "optim": "adamw_torch_foreach",
        "param_dtype": "bf16",
        "method": "lora",
        "gradient_checkpointing": True,
    },
}
"""What differs between the runs of a model; parameters are fp32 unless said."""

def has_sdpa(model: str) -> bool:
    """Whether transformers has SDPA attention for the class; without it every case runs eagerly."""
    import transformers

    return bool(getattr(transformers, MODELS[model]["architectures"][0])._supports_sdpa)


def spec_of(model: str, case: str) -> RunSpec:
    """The run named by a key of ``MODELS`` and one of ``CASES``, for CPU kernels."""
    fields = {"param_dtype": "fp32", **CASES[case]}
    if not has_sdpa(model):
        fields["attn_implementation"] = "eager"
    if fields.get("method") == "lora":
        fields |= {"lora_r": 5, "lora_target_modules": "all-linear"}
    return make_spec(
        model=MODELS[model],
        per_device_train_batch_size=BATCH,
        seq_length=TOKENS,
        gpu="cpu",
        **fields,
    )
