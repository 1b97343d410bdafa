"""A name, path or configuration ─▶ an `nn.Module` on the meta device.

`presets` knows models by name, `source.resolve` finds a configuration, `build.build` makes the
module, and `positions.max_positions` says how long its sequences may be. Importing any of them
loads neither torch nor transformers.
"""

from llmem.models.build import build, parameter_dtype, to_hf_config
from llmem.models.positions import max_positions
from llmem.models.presets import Preset, get_preset, list_presets
from llmem.models.source import ModelSource, resolve

__all__ = [
    "ModelSource",
    "Preset",
    "build",
    "get_preset",
    "list_presets",
    "max_positions",
    "parameter_dtype",
    "resolve",
    "to_hf_config",
]
