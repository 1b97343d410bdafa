"""Adapters: peft's own, on a model whose weights need not exist.

``--method`` is the name of any ``peft.PeftType`` in lower case (and ``qlora``: LoRA on 4-bit
weights); settings are RunSpec's fields, or those of an adapter_config.json. peft makes adapters on
the host and moves each to the device of its layer, the meta device included, so dtypes and
``requires_grad`` are its own choice. What it leaves on the host goes to the device as Trainer's
``model.to(device)`` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, fields
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from llmem.errors import LlmemError
from llmem.models import max_positions
from llmem.spec import RunSpec

NOT_ON_META = {
    "adamss": "it clusters the singular vectors of the weights' values",
    "cpt": "it scales its embeddings by their values in every forward",
    "frod": "it decomposes the weights' values",
    "multitask_prompt_tuning": "its forward needs task_ids, which the batch here does not have",
    "poly": "its forward needs task_ids, which the batch here does not have",
    "shira": "which weights it trains depends on a random mask's values",
    "waveft": "it looks for the nonzero values of its spectrum in every forward",
    "xlora": "it mixes adapters that it loads, and nothing is loaded here",
}
"""Methods that cannot be traced without values, and why."""

NEVER_LOADED = (
    "arrow_config", "corda_config", "eva_config", "lora_ga_config", "megatron_config",
    "prompt_tuning_init_state_dict_path", "shadow_model",
)  # fmt: skip
"""Settings that have peft load adapters, weights, calibration data or a Python module."""

OF_THE_FILE = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_type",
    "peft_version", "revision", "runtime_config", "tokenizer_kwargs", "tokenizer_name_or_path",
)  # fmt: skip
"""Settings that say where a file comes from or what to load; they change nothing here."""

SVD_INITS = ("pissa", "olora", "mica")
"""Initialisations of LoRA whose factors are those of the weights."""

LARGEST = 1 << 16
"""No rank or number of tokens is larger; peft would fill tensors of that size on the host."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "adalora": {"total_step": 1000},  # must be set; the rank allocator alone reads it
    "cartridge": {"num_virtual_tokens": 20},  # the number in peft's own examples
    "p_tuning": {"num_virtual_tokens": 20},
    "prefix_tuning": {"num_virtual_tokens": 20},
    "prompt_tuning": {"num_virtual_tokens": 20},
}
"""What peft has no default for."""

OPTIONS = {
    "lora_r": ("init_r", "r"),
    "lora_alpha": ("lora_alpha", "alpha"),
    "lora_dropout": ("lora_dropout", "{method}_dropout"),
    "lora_target_modules": ("target_modules",),
    "lora_bias": ("bias",),
    "modules_to_save": ("modules_to_save",),
    "use_rslora": ("use_rslora",),
    "use_dora": ("use_dora",),
    "num_virtual_tokens": ("num_virtual_tokens",),
}
"""RunSpec's fields and how the configs of different methods call the same thing."""

_REFUSALS = (
    AssertionError, AttributeError, ImportError, IndexError, KeyError, NotImplementedError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What peft raises for settings that do not fit the model or each other."""


def method_of(spec: RunSpec) -> str:
    """The PeftType in lower case; QLoRA's is LoRA."""
    return "lora" if spec.method == "qlora" else spec.method


def check_adapters(spec: RunSpec) -> None:
    """Raises LlmemError if ``spec`` asks for adapters that do not exist or cannot be traced."""
    if spec.method == "full":
        return
    method = method_of(spec)
    if method in NOT_ON_META:
        raise LlmemError(f"{method} cannot be traced: {NOT_ON_META[method]}; use another method")
    config_class(method)
    if method in ("prefix_tuning", "cartridge") and spec.gradient_checkpointing:
        raise LlmemError(
            f"{method} passes keys and values through the cache, which gradient checkpointing "
            "drops; leave --gradient-checkpointing out"
        )


def config_class(method: str) -> Any:
    """peft's config class of ``method``. Raises LlmemError if peft knows no such method."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as known

    names = {kind.value.lower(): cls for kind, cls in known.items()}
    if method not in names:
        usable = ", ".join(sorted(set(names) - set(NOT_ON_META)))
        raise LlmemError(
            f"peft {peft.__version__} knows no method '{method}'; use full, qlora, {usable}"
        )
    return names[method]


def with_adapters(
    model: torch.nn.Module, spec: RunSpec, notes: list[str], *, cuda: bool
) -> torch.nn.Module:
    """The PeftModel that trains adapters of ``spec.method`` on ``model`` (changed in place).

    Raises LlmemError with peft's own reason if it refuses.
    """
    from peft import get_peft_model

    method = method_of(spec)
    device = next(model.parameters()).device
    try:
        config = config_class(method)(**_settings(spec, method, model))
        with _made_on(device, config):
            adapted = get_peft_model(
                model,  # type: ignore[arg-type]
                config,
                autocast_adapter_dtype=spec.autocast_adapter_dtype and not _older(spec, (0, 12)),
            )
    except _REFUSALS as error:
        if spec.lora_target_modules is None and "target_modules" in str(error):
            raise LlmemError(
                f"peft has no default targets of {method} for {type(model).__name__}; add "
                "--lora-target-modules all-linear, or names"
            ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip("'\" ")
        raise LlmemError(
            f"peft refuses this {method}: {reason.rstrip('.')}; change the options of the adapters "
            "or the --peft-config"
        ) from error
    _freeze_rank_numbers(adapted, always=_older(spec, (0, 21)))
    _to_device(adapted, device, cuda=cuda)
    _check_length(adapted, spec, config)
    _note(adapted, config, method, notes)
    return adapted


def adapted_targets(model: Any) -> list[str]:
    """The module names that peft put adapters on."""
    found = getattr(next(iter(model.peft_config.values())), "target_modules", None)
    return [found] if isinstance(found, str) else sorted(found or [])


class MadeOnMeta(TorchFunctionMode):
    """Tensors of constants go to meta unless told otherwise; random ones, which are asked, do not."""

    CONSTANTS = (torch.arange, torch.full, torch.ones, torch.tensor, torch.zeros)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.CONSTANTS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def as_on_the_host(
    model: torch.nn.Module, device: str, *, cuda: bool
) -> AbstractContextManager[Any]:
    """Where adapters make small tensors in every forward: token indices, masks of virtual tokens.

    They are made on the host and copied to the GPU; for CPU kernels they are where they are used.
    """
    on_meta = device == "meta" and not cuda and hasattr(model, "peft_config")
    return MadeOnMeta() if on_meta else nullcontext()


def _settings(spec: RunSpec, method: str, model: torch.nn.Module) -> dict[str, Any]:
    """Keyword arguments of the config class: of the file, and of the options beside it."""
    known = {field.name for field in fields(config_class(method))}
    from_file = _checked(spec.peft_config or {}, method, known)
    given = set(spec.model_fields_set)
    if method == "lora" and not spec.peft_config:
        given |= {"lora_r", "lora_alpha", "lora_dropout"}
    made = {**DEFAULTS.get(method, {}), **from_file}
    for option, names in OPTIONS.items():
        value = getattr(spec, option)
        if option not in given or value is None:
            continue
        name = next((n for n in (n.format(method=method) for n in names) if n in known), None)
        if name is None:
            raise LlmemError(f"{method} has no setting like {option}; leave it out")
        made[name] = list(value) if isinstance(value, tuple) else value
    if method == "trainable_tokens" and not made.get("token_indices"):
        raise LlmemError(
            "trainable_tokens trains the rows of some tokens; give token_indices in --peft-config"
        )
    if made.get("prompt_tuning_init") == "TEXT":  # needs a tokenizer; the tensors are the same
        made["prompt_tuning_init"] = "RANDOM"
    prompts = "num_virtual_tokens" in known
    if made.get("task_type") is None and (prompts or not spec.peft_config):
        made["task_type"] = task_type(model)
    if prompts and made.get("task_type") is None:
        raise LlmemError(
            f"{method} is of causal language models, encoder-decoders and classifiers, and "
            f"{type(model).__name__} is none of them; use another method"
        )
    return made


def _checked(raw: dict[str, Any], method: str, known: set[str]) -> dict[str, Any]:
    """What a file says beside where it comes from. Raises LlmemError for unknown or unsafe keys."""
    kept = {name: value for name, value in raw.items() if name not in OF_THE_FILE}
    for name, value in kept.items():
        if name not in known:
            raise LlmemError(f"'{name}' is no setting of peft's {method}; take it out of the file")
        if name in NEVER_LOADED and value:
            raise LlmemError(f"{name} would load something, which is never done; take it out")
        counts = not any(word in name for word in ("seed", "key", "step", "tinit", "tfinal"))
        if counts and isinstance(value, int) and abs(value) > LARGEST:
            raise LlmemError(f"{name} = {value} in the peft config is more than {LARGEST:,}")
    if kept.get("init_lora_weights") in ("eva", "corda", "lora_ga", "loftq"):
        raise LlmemError(
            f"init_lora_weights {kept['init_lora_weights']} needs data or weights; leave it out, "
            "the memory of training is the same unless ranks are redistributed"
        )
    return kept


def task_type(model: torch.nn.Module) -> str | None:
    """peft's TaskType of the model's class, by transformers' naming; None for others."""
    words = {
        "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM",
        "ForConditionalGeneration": "SEQ_2_SEQ_LM", "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS", "ForQuestionAnswering": "QUESTION_ANS",
    }  # fmt: skip
    name = type(model).__name__
    return next((task for ending, task in words.items() if name.endswith(ending)), None)


def _made_on(device: torch.device, config: Any) -> AbstractContextManager[Any]:
    """Factors of meta weights are meta tensors, which no parameter on the host can take."""
    init = getattr(config, "init_lora_weights", None)
    by_svd = isinstance(init, str) and init.startswith(SVD_INITS)
    return torch.device("meta") if by_svd and device.type == "meta" else nullcontext()


def _older(spec: RunSpec, version: tuple[int, int]) -> bool:
    """Whether habits from before ``version`` of peft are asked for. Raises LlmemError for no version."""
    if spec.as_peft is None:
        return False
    parts = spec.as_peft.split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise LlmemError(f"'{spec.as_peft}' is no version of peft; write it as 0.19")
    return (int(parts[0]), int(parts[1])) < version


def _freeze_rank_numbers(model: torch.nn.Module, *, always: bool) -> None:
    """AdaLoRA's ``ranknum`` is frozen where base and adapter share dtype and device at the start.

    Otherwise peft's move makes a new parameter of it, which is trained since 0.21 (until then,
    ``always``, what is not called lora was frozen: ``_mark_only_adapters_as_trainable``). A model on
    meta is taken as one that is on the host when adapters are added and goes to the GPU later (Trainer).
    """
    for module in model.modules():
        numbers = getattr(module, "ranknum", None)
        base = getattr(module, "base_layer", None)
        if numbers is None or base is None:
            continue
        if always or base.weight.dtype == torch.float32:
            numbers.requires_grad_(False)


def _to_device(model: torch.nn.Module, device: torch.device, *, cuda: bool) -> None:
    """Move what peft left on the host, each tensor once however many modules share it.

    ``nn.Module.to`` would give every sharer its own parameter on meta. Tensors in plain
    dictionaries (indices, prompt tokens) are no module's and stay on the host beside a GPU.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for attribute, kept in vars(module).items():
            registered = attribute in ("_parameters", "_buffers")
            if not isinstance(kept, dict) or (cuda and not registered):
                continue
            for name, old in kept.items():
                if not isinstance(old, torch.Tensor) or old.device == device:
                    continue
                if id(old) not in moved:
                    moved[id(old)] = old, _copy_of(old, device)
                kept[name] = moved[id(old)][1]


def _copy_of(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = old.detach().to(device)
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def _check_length(model: torch.nn.Module, spec: RunSpec, config: Any) -> None:
    virtual = getattr(config, "num_virtual_tokens", None) or 0
    text: Any = getattr(model, "config", None)
    limit = max_positions(text) if virtual and text is not None else None
    if limit is not None and spec.seq_length + virtual > limit:
        raise LlmemError(
            f"{virtual} virtual tokens and {spec.seq_length} of the text are more than the {limit} "
            f"positions that the model has learned; use -s {limit - virtual} or less"
        )


def _note(model: torch.nn.Module, config: Any, method: str, notes: list[str]) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained}))
    targets = adapted_targets(model)
    on = f"; targets {', '.join(targets)}" if targets else ""
    said = ", ".join(f"{name} {value}" for name, value in _changed(config))
    notes.append(
        f"adapters: peft's {method}{f' ({said})' if said else ''}{on}; "
        f"{sum(p.numel() for p in trained):,} trained parameters in {dtypes} (peft's choice)"
    )
    if method == "adalora":
        notes.append("adalora: update_and_allocate is not called, as Trainer does not call it")


def _changed(config: Any) -> Iterator[tuple[str, Any]]:
    """Settings that differ from peft's defaults, targets left out."""
    unsaid = (*OF_THE_FILE, "target_modules", "task_type")
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in unsaid and value != _default(field):
            yield field.name, value


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
