"""adapter_config.json: which adapters, with which settings, read as data and nothing else.

Saved by ``PeftConfig.save_pretrained``. The file may come from anywhere: it is parsed as JSON, its
size is bounded, and what it names (base model, tokenizer, Python classes) is never loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmem.errors import LlmemError

NAME = "adapter_config.json"
LARGEST_FILE = 1 << 20
"""bytes; peft's own files are a few hundred"""


def settings_of(source: Any) -> dict[str, Any]:
    """The settings in ``source``: a mapping, the path of a JSON file, or of a folder that holds one.

    They include ``peft_type``. Raises LlmemError for what is not such a file.
    """
    found = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    if not isinstance(found.get("peft_type"), str):
        raise LlmemError(f"the peft config has no peft_type; take the {NAME} that peft saved")
    return found


def with_method(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` of a RunSpec, with ``method`` as its ``peft_config`` says, if it has one.

    Raises LlmemError if they contradict each other.
    """
    if fields.get("peft_config") is None:
        return fields
    settings = settings_of(fields["peft_config"])
    method = settings["peft_type"].lower()
    asked = fields.get("method", method)
    if asked != method and (asked, method) != ("qlora", "lora"):
        raise LlmemError(f"the peft config is of type {method}; leave out --method {asked}")
    return {**fields, "peft_config": settings, "method": asked}


def _read(path: Path) -> dict[str, Any]:
    path = path / NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise LlmemError(f"{path} is larger than 1 MiB, so it is no {NAME}")
        found = json.loads(text)
    except OSError as error:
        raise LlmemError(f"cannot read {path}: {error.strerror}; name an {NAME}") from error
    except (ValueError, RecursionError) as error:
        raise LlmemError(f"{path} is not JSON; name the {NAME} that peft saved") from error
    if not isinstance(found, dict):
        raise LlmemError(f"{path} holds no JSON object; name the {NAME} that peft saved")
    return found
