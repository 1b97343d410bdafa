"""From what the user typed to the model's configuration: `resolve`."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmem.errors import LlmemError
from llmem.models.presets import get_preset, nearest_presets

Origin = Literal["preset", "folder", "file", "hub cache", "hub", "config"]

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_HUB_TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class ModelSource:
    """A model's configuration and where it came from.

    `config` is the content of a Hugging Face `config.json`. `path` is the folder that held it, if
    any: custom modelling code, if the caller trusts it, is loaded from there. `notes` are
    sentences for the report's list of assumptions.
    """

    name: str
    origin: Origin
    config: dict[str, Any]
    path: str | None = None
    notes: tuple[str, ...] = ()


def resolve(model: str | os.PathLike[str] | Mapping[str, Any]) -> ModelSource:
    """Find the configuration that `model` names.

    Tried in this order: a mapping is a configuration itself; a preset; an existing folder (which
    holds a `config.json`) or file; a hub id in the local Hugging Face cache; a hub id on the hub,
    of which only `config.json` is downloaded. A folder that has a preset's name is meant by a path
    such as `./gpt2`.

    A `quantization_config` is kept in `config` and told in `notes`: the module is built with whole
    weights.

    Raises LlmemError if nothing of that name is found (with the nearest preset names), if the JSON
    cannot be read, or if it names neither a `model_type` nor `architectures`.
    """
    if isinstance(model, Mapping):
        config = copy.deepcopy(dict(model))
        name = config.get("_name_or_path") or config.get("model_type") or "config"
        return _checked(ModelSource(str(name), "config", config))
    text = os.fspath(model)
    if not text.strip():
        raise LlmemError("The model has no name; give a preset, hub id, folder or config.json.")
    source = _from_preset(text) or _from_path(text) or _from_hub(text)
    if source is None:
        raise LlmemError(_unknown(text))
    return _checked(source)


def _from_preset(name: str) -> ModelSource | None:
    preset = get_preset(name)
    if preset is None:
        return None
    notes = (f"{preset.name}: {preset.note}",) if preset.note else ()
    config = copy.deepcopy(preset.config)
    config.setdefault("_name_or_path", preset.hub_id)
    return ModelSource(preset.name, "preset", config, notes=notes)


def _from_path(text: str) -> ModelSource | None:
    try:
        path = Path(text).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # a part is too long, or there is no such user
        raise LlmemError(f"{text[:80]} is no path that can be read: {error!s:.80}; check it") from error
    if is_folder:
        file = path / "config.json"
        if not file.is_file():
            raise LlmemError(
                f"The folder {text} holds no config.json; give a saved model's folder."
            )
        return ModelSource(text, "folder", _read_json(file), path=str(path))
    if path.is_file():
        return ModelSource(text, "file", _read_json(path), path=str(path.parent))
    if path.suffix == ".json" or text.startswith((".", "/", "~")):
        raise LlmemError(f"There is no file or folder {text}; check the path.")
    return None


def _from_hub(hub_id: str) -> ModelSource | None:
    """The configuration of a hub id, from the local cache or else by download, or None."""
    if not _HUB_ID.match(hub_id) or ".." in hub_id:
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(hub_id, "config.json")
    if isinstance(cached, str):
        return _from_file(hub_id, "hub cache", Path(cached))
    if constants.HF_HUB_OFFLINE or "/" not in hub_id:
        return None
    file = _download(hub_id)
    return None if file is None else _from_file(hub_id, "hub", file)


def _from_file(name: str, origin: Origin, file: Path) -> ModelSource:
    return ModelSource(name, origin, _read_json(file), path=str(file.parent))


def _download(hub_id: str) -> Path | None:
    """Download `config.json` only; None if the hub does not have it or cannot be reached.

    A gated or private repository has no readable config without a token: that is said, not hidden.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        if not _hub_answers():
            return None
        return Path(hf_hub_download(hub_id, "config.json", etag_timeout=_HUB_TIMEOUT_SECONDS))
    except GatedRepoError as error:
        raise LlmemError(
            f"{hub_id} is gated on the hub: log in with `hf auth login`, or give its config.json."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None


def _hub_answers() -> bool:
    """Whether the hub's host accepts a connection, asked once with a short limit.

    huggingface_hub retries for much longer than anyone wants to wait offline.
    """
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # Only the proxy can tell.
    endpoint = urlsplit(constants.ENDPOINT)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        with socket.create_connection((endpoint.hostname or "", port), _HUB_TIMEOUT_SECONDS):
            return True
    except OSError:
        return False


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LlmemError(f"{file} cannot be read as JSON: {error}; download it anew.") from error
    if not isinstance(content, dict):
        raise LlmemError(f"{file} is not a JSON object; give a model's config.json.")
    return content


def _checked(source: ModelSource) -> ModelSource:
    """The source itself, if its configuration says which class of model it is."""
    if source.config.get("model_type") or source.config.get("architectures"):
        return _with_quantization_note(source)
    raise LlmemError(
        f"The configuration of {source.name} names no model class; add model_type or architectures."
    )


def _with_quantization_note(source: ModelSource) -> ModelSource:
    quantization = source.config.get("quantization_config")
    if not isinstance(quantization, dict):
        return source
    method = quantization.get("quant_method", "some way")
    note = f"{source.name} is stored quantised ({method}); its weights are counted dequantised"
    return replace(source, notes=(*source.notes, note))


def _unknown(name: str) -> str:
    near = nearest_presets(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "`llmem models` lists the known names."
    return (
        f"There is no model {name!r} among the presets, local paths and the hub's cache, "
        f"and the hub gave none; {hint}"
    )
