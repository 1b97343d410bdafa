"""Which modules of a model Liger replaces, family by family."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import llmem
from llmem.gpu.devices import get_device
from llmem.trace.standins import liger, liger_ops
from llmem.trace.standins.liger_families import FAMILIES
from llmem.trace.standins.liger_moe import BALANCED

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0,
}  # fmt: skip
GPU = get_device("h100-80gb")
NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}


def built(kind: str, **fields: Any) -> Any:
    config = CONFIG_MAPPING[kind](**SMALL, **fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def touched(model: Any) -> set[str]:
    """Last part of the name of every module that has another forward."""
    with liger.kernels(model, GPU):
        return {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if "forward" in vars(module)
        }


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", {*NORMS, "mlp"}),
        ("qwen3", {*NORMS, "mlp"}),  # norms of queries and keys stay transformers'
        ("phi3", {*NORMS, "mlp"}),
        ("gemma", {*NORMS, "mlp"}),
        (
            "gemma3_text",
            {*NORMS, "mlp", "q_norm", "k_norm", "pre_feedforward_layernorm",
             "post_feedforward_layernorm"},
        ),
        ("olmo2", {"norm", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"}),
        ("nemotron", {"act_fn"}),
    ],
)  # fmt: skip
def test_modules_of_a_family(kind: str, names: set[str]) -> None:
    assert touched(built(kind)) == names


def test_routed_experts_are_one_kernel() -> None:
    model = built("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert touched(model) == {*NORMS, "experts"}


@pytest.mark.parametrize(("kind", "turned"), [("llama", True), ("glm4", False)])
def test_rope_is_replaced_where_liger_does(kind: str, turned: bool) -> None:
    model = built(kind)
    code = sys.modules[type(model).__module__]
    with liger.kernels(model, GPU):
        assert (code.apply_rotary_pos_emb is liger_ops.rope) == turned


def test_families_are_model_types() -> None:
    assert set(FAMILIES) <= set(CONFIG_MAPPING)


def estimated(folder: Any, kind: str, fields: dict[str, Any], **options: Any) -> llmem.Estimate:
    CONFIG_MAPPING[kind](**SMALL, **fields).save_pretrained(folder)
    return llmem.estimate(
        model=str(folder), per_device_train_batch_size=2, seq_length=64, gpu="h100-80gb", **options
    )


def test_granite_keeps_its_logits_unless_asked(tmp_path: Any) -> None:
    logits = 2 * 64 * 512 * 4  # fp32, the gradient written over them
    default = estimated(tmp_path, "granite", {}, liger=True)
    assert "Liger: cross-entropy over the logits in place" in default.assumptions
    assert logits in default.trace.lifetimes.nbytes
    asked = estimated(tmp_path, "granite", {}, liger=True, loss="liger")
    assert logits not in asked.trace.lifetimes.nbytes


def test_mixture_of_experts_makes_rows_of_all_experts_at_once(tmp_path: Any) -> None:
    """128 tokens, 2 of 4 experts: 256 rows; the up projection's output [256, 2 x 128] is kept."""
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
    result = estimated(tmp_path, "mixtral", fields, liger=True, param_dtype="bf16")
    assert (result.trace.lifetimes.nbytes == 256 * 256 * 2).sum() >= 2
    assert BALANCED in result.assumptions
    assert BALANCED not in estimated(tmp_path, "llama", {}, liger=True).assumptions
