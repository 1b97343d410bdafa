"""FSDP as accelerate's configs and ``TrainingArguments.fsdp_config`` write it ─▶ RunSpec fields.

The keys are those of accelerate's ``FullyShardedDataParallelPlugin``; accelerate's files and older
training arguments put ``fsdp_`` before each. What a key means without a value is read in
transformers/training_args.py (``_process_fsdp_args``, 5.24) and accelerate/utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmem.errors import LlmemError

SHARDING = {
    "FULL_SHARD": ("fsdp", True), "1": ("fsdp", True),
    "SHARD_GRAD_OP": ("fsdp", False), "2": ("fsdp", False),
    "NO_SHARD": ("ddp", None), "3": ("ddp", None),
    "HYBRID_SHARD": ("fsdp", True), "4": ("fsdp", True),
    "HYBRID_SHARD_ZERO2": ("fsdp", False), "5": ("fsdp", False),
}  # fmt: skip
"""``fsdp_sharding_strategy`` -> strategy, reshard after forward."""

PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "none"}

WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
"""``auto_wrap_policy``; the first is the default."""


def truth(value: Any) -> bool:
    """``value`` as a bool. Raises LlmemError for what is neither true nor false."""
    words = {"true": True, "1": True, "yes": True, "on": True, "auto": False,
             "false": False, "0": False, "no": False, "off": False, "none": False, "": False}  # fmt: skip
    found = value if isinstance(value, bool) else words.get(str(value).lower())
    if found is None:
        raise LlmemError(f"a config file has {value!r} where true or false belongs; write one of them")
    return found


def names(value: Any) -> tuple[str, ...]:
    """Class names: a list, or a text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(str(part).strip() for part in parts)


def accelerate_fsdp(
    section: Mapping[str, Any], *, machines: int | None, dtype: str | None, path: Any
) -> tuple[dict[str, Any], list[str]]:
    """Fields of accelerate's ``fsdp_config``, and the keys that say nothing about memory.

    ``machines``: its ``num_machines`` (a copy on each under HYBRID_SHARD); ``dtype``: bf16, fp16 or
    None. Raises LlmemError for values that accelerate would refuse.
    """
    left = {str(key).removeprefix("fsdp_"): value for key, value in section.items()}
    version = str(left.pop("version", "1"))
    if version not in ("1", "2"):
        raise LlmemError(f"{path}: fsdp_version {version} is not known; use 1 or 2")
    sharding = str(left.pop("sharding_strategy", "FULL_SHARD")).upper()
    if sharding not in SHARDING:
        raise LlmemError(
            f"{path}: unknown fsdp_sharding_strategy {sharding}; use FULL_SHARD, SHARD_GRAD_OP, "
            "HYBRID_SHARD or NO_SHARD"
        )
    strategy, reshard = SHARDING[sharding]
    fields: dict[str, Any] = {"strategy": strategy}
    if version == "2":
        fields |= {"strategy": "fsdp2", "fsdp_units": "accelerate"}
        fields["reduce_dtype"] = dtype or "fp32"
        said = left.pop("reshard_after_forward", None)
        reshard = None if said is None else truth(said)
    elif sharding.startswith("HYBRID") or sharding in ("4", "5"):
        fields["dp_replicate_size"] = _nodes(machines, sharding, path)
    if reshard is False:
        fields["reshard_after_forward"] = False
    if version != "2":
        fields |= _version_1(left, strategy)
    return fields | _common(left), [f"fsdp_{key}" for key in sorted(left)]


def trainer_fsdp(
    fsdp: Any, config: Mapping[str, Any], *, bf16: bool = False, fp16: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Fields of ``TrainingArguments.fsdp`` and ``fsdp_config``, and the keys not used.

    ``fsdp`` is True or the older words (``full_shard auto_wrap``). Raises LlmemError for
    ``hybrid_shard``, whose groups are the GPUs of a node.
    """
    left = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    version = int(left.pop("version", 2))
    reshard = left.pop("reshard_after_forward", None)
    words = fsdp.split() if isinstance(fsdp, str) else [] if isinstance(fsdp, bool) else fsdp
    for word in (str(getattr(w, "value", w)).lower() for w in words):
        if word == "offload":
            left.setdefault("cpu_offload", True)
        elif word.upper() in SHARDING:
            reshard = word if reshard is None else reshard
        elif word != "auto_wrap":
            raise LlmemError(f"fsdp {word} is not known here; use full_shard or shard_grad_op")
    name = str(reshard).upper()
    if name.startswith("HYBRID"):
        raise LlmemError(
            f"fsdp {reshard} makes a copy on each node, whose GPUs it does not name; write full_shard "
            "and give --dp-replicate-size N"
        )
    strategy, keep = SHARDING.get(name, ("fsdp", None))
    if name not in SHARDING:
        keep = reshard is None or truth(reshard)
    fields: dict[str, Any] = {"strategy": "fsdp2" if version == 2 else strategy}
    if version == 2:
        fields["fsdp_units"] = "accelerate"
        fields["reduce_dtype"] = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    else:
        left.setdefault("backward_prefetch", "NO_PREFETCH")
        fields |= _version_1(left, strategy)
    if keep is False:
        fields["reshard_after_forward"] = False
    return fields | _common(left), sorted(left)


def _nodes(machines: int | None, sharding: str, path: Any) -> int:
    if machines is None:
        raise LlmemError(
            f"{path}: {sharding} makes a copy on each machine; write num_machines, or FULL_SHARD and "
            "give --dp-replicate-size N"
        )
    return machines


def _version_1(left: dict[str, Any], strategy: str) -> dict[str, Any]:
    """What only FSDP1 has; taken out of ``left``."""
    fields: dict[str, Any] = {}
    if (prefetch := left.pop("backward_prefetch", None)) is not None:
        fields["backward_prefetch"] = PREFETCH.get(str(prefetch).upper(), prefetch)
    original = truth(left.pop("use_orig_params", True))
    return fields | ({"use_orig_params": original} if strategy == "fsdp" else {})


def _common(left: dict[str, Any]) -> dict[str, Any]:
    """What both versions have; taken out of ``left``."""
    fields: dict[str, Any] = {}
    offloads = [left.pop(key, False) for key in ("offload_params", "cpu_offload")]
    if any(truth(value) for value in offloads):
        fields["offload"] = "all"
    if truth(left.pop("activation_checkpointing", False)):
        fields["gradient_checkpointing"] = True
    policy = str(left.pop("auto_wrap_policy", None) or WRAPS[0])
    classes, least = left.pop("transformer_layer_cls_to_wrap", None), left.pop("min_num_params", 0)
    if policy not in WRAPS:
        raise LlmemError(f"fsdp auto_wrap_policy {policy} is not known; use one of {', '.join(WRAPS)}")
    if policy == "SIZE_BASED_WRAP" and int(least or 0):
        fields["fsdp_min_num_params"] = int(least)
    elif policy != WRAPS[0]:
        fields["fsdp_transformer_layer_cls_to_wrap"] = ()
    elif classes:
        fields["fsdp_transformer_layer_cls_to_wrap"] = names(classes)
    return fields
