"""From a configuration to the module that `from_pretrained` would leave, without its weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmem.errors import LlmemError
from llmem.models.source import ModelSource

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

_DTYPE_NAMES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "float": "float32",
    "half": "float16",
}

# Kernels that transformers itself can dispatch to with nothing but torch installed. Every other
# name (flash_attention_2, flash_attention_3, kernels-community/…) needs a package that a machine
# without a GPU lacks.
_TORCH_ATTENTION = ("eager", "sdpa", "flex_attention")


def to_hf_config(
    source: ModelSource,
    overrides: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> PretrainedConfig:
    """The transformers configuration of `source`, with `overrides` replacing keys of its JSON.

    A configuration without `model_type` takes the configuration class of its `architectures[0]`.
    With `trust_remote_code` the configuration class may come from Python files beside
    `config.json`; without it no code but the installed transformers is ever run.

    Raises LlmemError if the installed transformers knows neither, or refuses the values.
    """
    content = copy.deepcopy(source.config) | dict(overrides or {})
    try:
        config = _config_class(source, content, trust_remote_code).from_dict(content)
    except LlmemError:
        raise
    except Exception as error:  # transformers validates with many exception types of its own
        raise LlmemError(
            f"transformers refuses the configuration of {source.name}: {_first_sentence(error)}."
        ) from error
    assert not isinstance(config, tuple)
    return config


def build(
    source: ModelSource,
    *,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    device: str = "meta",
    num_labels: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Make the model as `from_pretrained(dtype=dtype)` followed by `.train()` would leave it.

    Parameters have `dtype` (default: the configuration's own, as in transformers 5; fp32 where it
    names none), except those that the class keeps in fp32; buffers such as RoPE's inverse
    frequencies keep the dtype their module gives them; tied weights are one parameter. On
    `device="meta"` nothing is allocated or initialised; on "cpu" weights are random. A
    `quantization_config` is not acted upon: weights are whole.

    The class is `architectures[0]` if the installed transformers has it, else the causal language
    model of the configuration's `model_type`. `num_labels` sets the width of a classification
    head.

    `attn_implementation`: None takes the class's own default. The names "eager", "sdpa" and
    "flex_attention" are checked by transformers while building. Any other name (such as
    "flash_attention_2") stands for a package that need not be installed here: the model is built
    with its default and the name is then put into `model.config._attn_implementation`, which the
    attention layers read at every forward; whoever runs the model must have registered that name
    in `transformers.AttentionInterface`.

    Raises LlmemError for an unknown class or dtype, or an attention the class does not support.
    """
    import torch

    labels = {} if num_labels is None else {"num_labels": num_labels}
    config = to_hf_config(
        source, {**(overrides or {}), **labels}, trust_remote_code=trust_remote_code
    )
    element_type = parameter_dtype(config, dtype)
    _set_dtype(config, element_type)
    deferred = attn_implementation is not None and attn_implementation not in _TORCH_ATTENTION
    if attn_implementation is not None and not deferred:
        config._attn_implementation = attn_implementation
    cls = _known_class(config.architectures)  # torch 2.6 cannot import it where meta is the default
    with _default_dtype(element_type), torch.device(device):
        model = _instantiate(source, config, cls, trust_remote_code)
        _tie(model)
    _keep_in_fp32(model, element_type)
    if deferred:
        assert attn_implementation is not None
        _defer_attention(model, attn_implementation)
    return model.train()


def parameter_dtype(config: PretrainedConfig, dtype: str | torch.dtype | None) -> torch.dtype:
    """The dtype that parameters get: `dtype`, else the configuration's, else fp32.

    Accepts torch's names ("bfloat16") and short ones ("bf16"). Raises LlmemError for anything that
    is no floating-point dtype of torch.
    """
    import torch

    wanted = dtype
    if wanted is None or wanted == "auto":
        # transformers < 4.56 calls it torch_dtype; asking for that name in newer ones warns.
        wanted = getattr(config, "dtype", None) or config.__dict__.get("torch_dtype")
    if wanted is None:
        return torch.float32
    if isinstance(wanted, str):
        wanted = getattr(torch, _DTYPE_NAMES.get(wanted, wanted).removeprefix("torch."), wanted)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise LlmemError(f"{wanted!r} is no dtype for parameters; use fp32, bf16 or fp16.")
    return wanted


def _config_class(
    source: ModelSource, content: dict[str, Any], trust_remote_code: bool
) -> type[PretrainedConfig]:
    import transformers

    if trust_remote_code and source.path and "auto_map" in content:
        remote = transformers.AutoConfig.from_pretrained(source.path, trust_remote_code=True)
        return type(remote)
    model_type = content.get("model_type")
    if isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[model_type]
    known = _known_class(content.get("architectures"))
    config_class: type[PretrainedConfig] | None = getattr(known, "config_class", None)
    if config_class is not None and not model_type:
        return config_class
    raise LlmemError(
        f"transformers {transformers.__version__} has no model class for {source.name} "
        f"(model_type {model_type!r}): install a version that has it."
    )


def _known_class(architectures: Any) -> type | None:
    """The transformers class that `architectures[0]` names, or None."""
    import transformers

    base = transformers.PreTrainedModel
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, base) else None


def _instantiate(
    source: ModelSource, config: PretrainedConfig, cls: type | None, trust: bool
) -> nn.Module:
    import transformers

    causal_lm: Any = transformers.AutoModelForCausalLM
    model: nn.Module
    try:
        if cls is None or (trust and getattr(config, "auto_map", None)):
            if trust and source.path:
                config._name_or_path = source.path
            model = causal_lm.from_config(config, trust_remote_code=trust)
        else:
            # What the Auto classes call. Unlike the constructor it applies the library's patches.
            model = getattr(cls, "_from_config", cls)(config)
    except (
        ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError,
    ) as error:  # fmt: skip
        raise LlmemError(f"{source.name} cannot be built: {_first_sentence(error)}.") from error
    return model


def _tie(model: nn.Module) -> None:
    """Tie what from_pretrained ties after loading; transformers 5.0 ties nothing on meta itself."""
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def _set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Record the dtype where `from_config` looks for it (`torch_dtype` before 4.56)."""
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    setattr(config, name, dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have `dtype`, as while `from_pretrained` constructs a model."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the tensors that the class wants in fp32 that dtype, as `from_pretrained` does.

    `_keep_in_fp32_modules` counts for fp16 only, `_keep_in_fp32_modules_strict` for bf16 too
    (transformers, `PreTrainedModel._get_dtype_plan`); the names are patterns searched in the keys
    of the state dict.
    """
    import torch

    names: set[str] = set()
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not names:
        return
    pattern = re.compile("|".join(name.replace("*", ".*") for name in sorted(names)))
    for key, tensor in model.state_dict(keep_vars=True).items():
        if pattern.search(key) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _defer_attention(model: nn.Module, name: str) -> None:
    """Ask for an attention that cannot be checked here, unless the class says it has none."""
    if name.startswith("flash_attention"):
        flags = ("_supports_flash_attn", "_supports_flash_attn_2")  # the second before 4.54
        known = [getattr(model, flag) for flag in flags if hasattr(model, flag)]
        if known and not any(known):
            raise LlmemError(
                f"{type(model).__name__} does not support {name}; use sdpa or eager attention."
            )
    config: Any = model.config
    config._attn_implementation = name


def _first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    heading = lines[0].strip()
    if heading.endswith(":") and len(lines) > 1:  # huggingface_hub's validators: the reason is below
        return f"{heading} {lines[1].strip(' .')}"
    return heading.split(". ")[0].strip(" .")
