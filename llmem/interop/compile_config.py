"""torch.compile as training arguments and accelerate's configs ask for it ─▶ RunSpec fields.

Read in transformers/training_args.py (5.24: a backend or a mode alone turns ``torch_compile`` on) and in
accelerate/utils/dataclasses.py (``TorchDynamoPlugin``). Axolotl's "auto" is true since torch 2.5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmem.errors import LlmemError
from llmem.interop.fsdp_config import truth

BACKEND = "inductor"
"""The one whose memory is known, and the default."""

QUIET_MODES = ("default", "max-autotune-no-cudagraphs")
"""Modes with the default's buffers; in the others CUDA graphs keep memory pools of their own."""

TRAINER = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
"""Keys of training arguments."""


def trainer_compile(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TRAINER``'s keys; empty if none of them asks for torch.compile.

    Raises LlmemError for another backend than Inductor, and for modes that use CUDA graphs.
    """
    asked, backend, mode = (arguments.get(key) for key in TRAINER)
    wanted = asked == "auto" or truth(asked or False)
    if not wanted and backend is None and mode is None:
        return {}
    _check("torch_compile_backend", backend, "torch_compile_mode", mode)
    return {"compile": True}


def accelerate_compile(section: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of accelerate's ``dynamo_config``, and the keys that say nothing about memory.

    Raises LlmemError as ``trainer_compile`` does.
    """
    left = {str(key).removeprefix("dynamo_"): value for key, value in section.items()}
    backend = left.pop("backend", "no")
    if str(backend).lower() in ("no", "false"):  # YAML reads an unquoted NO as false
        return {}, []
    _check("dynamo_backend", backend, "dynamo_mode", left.pop("mode", None))
    regional = truth(left.pop("use_regional_compilation", False))
    fields = {"compile": True} | ({"compile_scope": "regions"} if regional else {})
    return fields, [f"dynamo_{key}" for key in sorted(left)]


def _check(backend_key: str, backend: Any, mode_key: str, mode: Any) -> None:
    if backend is not None and str(backend).lower() != BACKEND:
        raise LlmemError(
            f"{backend_key} {backend} is not supported; use {BACKEND}, or leave compiling out"
        )
    if mode is not None and str(mode) not in QUIET_MODES:
        raise LlmemError(
            f"{mode_key} {mode} is not supported (CUDA graphs keep memory of their own); leave it out"
        )
