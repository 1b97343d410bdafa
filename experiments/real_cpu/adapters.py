"""Every kind of adapter, predicted against real steps on CPU: ``python -m experiments.real_cpu.adapters``.

The same step is traced on meta and run under the same recorder; the table gives trained parameters
and says by how many bytes the real peak of live storage differs, and where the two part.
"""

from __future__ import annotations

import argparse
from typing import Any

from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from llmem.spec import RunSpec, make_spec
from llmem.trace.run import trace_spec

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"lora_r": 5, "lora_target_modules": "all-linear", "lora_dropout": 0.1},
    "rslora, biases": {"use_rslora": True, "lora_bias": "all"},
    "dora": {"use_dora": True, "lora_r": 5},
    "lora and head": {"modules_to_save": ("lm_head",)},
    "lora and tokens": {"peft_config": {"peft_type": "LORA", "trainable_token_indices": [3, 5, 7]}},
    "pissa": {"peft_config": {"peft_type": "LORA", "init_lora_weights": "pissa", "r": 4}},
    "mica": {"peft_config": {"peft_type": "LORA", "init_lora_weights": "mica", "r": 4}},
    "trainable_tokens": {
        "peft_config": {"peft_type": "TRAINABLE_TOKENS", "token_indices": [3, 5, 7]}
    },
    "ia3": {},
    "loha": {},
    "lokr": {},
    "oft": {},
    "boft": {},
    "vera": {"lora_r": 7},
    "adalora": {},
    "prefix_tuning": {"num_virtual_tokens": 7},
    "prompt_tuning": {"num_virtual_tokens": 7},
    "p_tuning": {"num_virtual_tokens": 7},
    "ln_tuning": {},
    "hra": {},
    "randlora": {},
    "tinylora": {},
    "gralora": {},
    "delora": {},
    "pvera": {},
    "osf": {},
    "beft": {},
    "deft": {},
    "glora": {},
    "hira": {},
    "lily": {},
    "peanut": {},
    "unilora": {},
    "cartridge": {"num_virtual_tokens": 16},
    "psoft": {"peft_config": {"peft_type": "PSOFT", "r": 8}},
    "vblora": {"peft_config": {"peft_type": "VBLORA", "vector_length": 16, "num_vectors": 16}},
    "c3a": {"peft_config": {"peft_type": "C3A", "block_size": 16}},
    "fourierft": {"peft_config": {"peft_type": "FOURIERFT", "n_frequency": 100}},
    "miss": {"peft_config": {"peft_type": "MISS", "r": 8}},
    "road": {"peft_config": {"peft_type": "ROAD", "group_size": 8}},
    "adaption_prompt": {
        "peft_config": {"peft_type": "ADAPTION_PROMPT", "adapter_len": 10, "adapter_layers": 2}
    },
}
"""What is asked of each; a name that is no method of its own is LoRA."""


def spec_of(adapter: str, model: str = "llama", **more: Any) -> RunSpec:
    """The run named by a key of ``ADAPTERS`` and one of ``MODELS``, for CPU kernels."""
    fields = dict(ADAPTERS[adapter])
    if "peft_config" not in fields:
        method = adapter if " " not in adapter and adapter not in ("dora",) else "lora"
        fields["method"] = method
    return make_spec(
        model=MODELS[model], per_device_train_batch_size=3, seq_length=23, gpu="cpu",
        **{"param_dtype": "fp32", "optim": "adamw_torch_single", **fields, **more},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["llama", "gpt2"], choices=list(MODELS))
    parser.add_argument("--adapters", nargs="*", default=list(ADAPTERS), choices=list(ADAPTERS))
    parser.add_argument("--dtypes", nargs="*", default=["fp32", "bf16"])
    arguments = parser.parse_args()
    rows = equal = 0
    for model in arguments.models:
        for adapter in arguments.adapters:
            for dtype in arguments.dtypes:
                try:
                    spec = spec_of(adapter, model, param_dtype=dtype)
                    trained = sum(p.numel for p in trace_spec(spec).parameters if p.trainable)
                    found = against_recorder(spec)
                except Exception as error:
                    print(f"{model:8} {adapter:18} {dtype}  {type(error).__name__}: {error}"[:300])
                    continue
                print(f"{model:8} {adapter:18} {dtype} {trained:8,} {found.predicted:10,} "
                      f"{found.real - found.predicted:+7,}  {found.difference}", flush=True)  # fmt: skip
                rows += 1
                equal += found.real == found.predicted
    print(f"{rows} runs: peak equal to the byte in {equal}")


if __name__ == "__main__":
    main()
