"""Every preset builds, and has as many weights as were published."""

import json
import subprocess
import sys

import pytest
import torch

from llmem.models.build import build
from llmem.models.presets import Preset, get_preset, list_presets, nearest_presets
from llmem.models.source import resolve

PRESETS = list_presets()

REQUIRED = """
    opt-125m opt-350m opt-1.3b opt-2.7b opt-6.7b bloom-560m bloom-1b1 bloom-1b7 bloom-3b
    codegen-350m codegen-2b biogpt biogpt-large santacoder gpt-neo-125m gpt-neo-1.3b llama-7b
    llama-2-7b llama-2-13b llama-2-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b
    llama-3.2-3b mistral-7b mixtral-8x7b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b
    qwen2.5-14b qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b
    qwen3-32b qwen3-30b-a3b gemma-2-2b gemma-2-9b gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b
    phi-3-mini phi-4 octocoder gpt2 pythia-1b tinyllama deepseek-v3 gpt-oss-20b
"""


def weights(model: torch.nn.Module) -> int:
    """Elements of the floating-point tensors that a checkpoint stores, tied ones once."""
    stored = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    return sum(t.numel() for t in stored.values() if t.is_floating_point())


def figure(rounded: str) -> float:
    return float(rounded[:-1]) * {"M": 1e6, "B": 1e9}[rounded[-1]]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_has_the_published_number_of_weights(preset: Preset) -> None:
    model = build(resolve(preset.name))
    assert type(model).__name__ == preset.config["architectures"][0]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    if preset.parameters is not None:
        assert weights(model) == preset.parameters
    else:
        assert preset.parameters_rounded is not None
        # Sizes in names are rounded freely: CodeGen "2.7B" holds 2.78e9.
        assert weights(model) == pytest.approx(figure(preset.parameters_rounded), rel=0.03)


def test_weights_of_gpt2_by_hand() -> None:
    hidden, vocabulary, positions, layers = 768, 50257, 1024, 12
    attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
    mlp = 2 * hidden * 4 * hidden + 4 * hidden + hidden
    norms = 2 * 2 * hidden
    by_hand = (vocabulary + positions) * hidden + layers * (attention + mlp + norms) + 2 * hidden
    preset = get_preset("gpt2")
    assert preset is not None and preset.parameters == by_hand


def test_the_promised_models_are_there() -> None:
    assert set(REQUIRED.split()) <= {preset.name for preset in PRESETS}


def test_most_counts_are_exact_and_all_have_a_source() -> None:
    assert all(preset.parameters_source for preset in PRESETS)
    assert sum(preset.parameters is None for preset in PRESETS) <= 5


def test_names_and_aliases_are_distinct() -> None:
    keys = [key for preset in PRESETS for key in set(preset.keys)]
    assert sorted(keys) == sorted(set(keys))


@pytest.mark.parametrize(
    "name", ["LLAMA-3.1-8B", " llama-3.1-8b", "meta-llama/Llama-3.1-8B", "unsloth/llama-3.1-8b"]
)
def test_found_by_any_case_hub_id_and_alias(name: str) -> None:
    preset = get_preset(name)
    assert preset is not None and preset.name == "llama-3.1-8b"


def test_unknown_is_none_and_near_names_are_near() -> None:
    assert get_preset("llama-3.1-9b") is None
    assert nearest_presets("llama-3.1-9b")[0] == "llama-3.1-8b"
    assert nearest_presets("zzzzzzzzzz") == []


def test_listing_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, json; from llmem.models.presets import list_presets; "
        "print(json.dumps([len(list_presets()), sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    count, modules = json.loads(done.stdout)
    assert count == len(PRESETS)
    assert not {"torch", "transformers", "numpy", "huggingface_hub"} & set(modules)
