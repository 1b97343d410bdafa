"""Models known by name: facts from public `config.json` files and published parameter counts.

Every preset is one JSON file in `llmem/models/presets/`. This module imports the standard library
only, so that listing presets never loads torch or transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One known model.

    `parameters` is the exact published number of weights of the checkpoint, tied ones counted
    once, or None where only a rounded figure such as "2.7B" (`parameters_rounded`) is known to be
    public; `parameters_source` says where it was published. Weights are parameters and, where a
    checkpoint stores them too, floating-point buffers (DeepSeek-V3's routing biases). `config`
    holds what the model's `config.json` says, as far as it decides shapes, dtypes or behaviour; it
    always names `model_type`, `architectures` and `dtype`. `note` tells where the preset differs
    from the checkpoint on the hub.
    """

    name: str
    hub_id: str
    parameters: int | None
    parameters_rounded: str | None
    parameters_source: str
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()
    note: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Every name that finds this preset, lower-case."""
        return tuple(key.lower() for key in (self.name, self.hub_id, *self.aliases))


def list_presets() -> list[Preset]:
    """All presets, ordered by name."""
    return list(_by_name().values())


def get_preset(name: str) -> Preset | None:
    """The preset called `name` (its own name, its hub id or an alias; case is ignored), or None."""
    return _by_key().get(name.strip().lower())


def nearest_presets(name: str, count: int = 3) -> list[str]:
    """Names of the presets spelled most like `name`, nearest first; empty if nothing is close."""
    wanted = name.strip().lower()
    hits = difflib.get_close_matches(wanted, _by_key(), n=4 * count, cutoff=0.5)
    names = dict.fromkeys(_by_key()[hit].name for hit in hits)
    return list(names)[:count]


@lru_cache(maxsize=1)
def _by_name() -> MappingProxyType[str, Preset]:
    return MappingProxyType({p.name: p for p in sorted(_read_all(), key=lambda p: p.name)})


@lru_cache(maxsize=1)
def _by_key() -> MappingProxyType[str, Preset]:
    return MappingProxyType({key: p for p in _by_name().values() for key in p.keys})


def _read_all() -> Iterator[Preset]:
    for entry in resources.files(__package__).joinpath("presets").iterdir():
        if entry.name.endswith(".json"):
            facts = json.loads(entry.read_text(encoding="utf-8"))
            facts["aliases"] = tuple(facts.get("aliases", ()))
            facts.setdefault("parameters_rounded", None)
            yield Preset(**facts)
