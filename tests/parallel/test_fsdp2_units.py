"""accelerate's units of FSDP2: which modules, and every buffer of the toy (weights: 144 bytes)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import Category, Together
from llmem.parallel.fsdp.fsdp2 import Fsdp2Pass
from llmem.parallel.fsdp.fsdp2_hooks import Group, hooks_of
from llmem.parallel.fsdp.fsdp2_shards import Fsdp2Options
from llmem.parallel.fsdp.wrapping import units_together
from llmem.parallel.units import units_of
from llmem.spec import make_spec
from tests.parallel.test_fsdp2 import WEIGHT, alive
from tests.parallel.toy import collectives, toy_trace

EMBEDDING = Together(("embed",), takes_ids=True, kept=False)


def model_of(**config: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=7, hidden_size=4, intermediate_size=5, num_hidden_layers=1,
                num_attention_heads=1, num_key_value_heads=1, **config,
            )
        )  # fmt: skip


def units(model: torch.nn.Module, **fields: Any) -> list[Together]:
    given = {"model": "m", "gpus": 2, "strategy": "fsdp2", "fsdp_units": "accelerate", **fields}
    return units_together(model, make_spec(**given))


def test_embedding_apart_from_norm_and_head() -> None:
    assert units(model_of()) == [
        Together(("model.embed_tokens",), takes_ids=True, kept=False),
        Together(("model.norm", "lm_head"), takes_ids=False, kept=True),
    ]
    assert units(model_of(), fsdp_units="blocks") == []


def test_tied_weights_are_one_unit() -> None:
    tied = units(model_of(tie_word_embeddings=True))
    assert tied == [Together(("model.embed_tokens", "model.norm", "lm_head"), True, True)]
    assert tied[0].name == "model.embed_tokens, model.norm, lm_head"  # as torch calls it


def test_a_module_that_is_wrapped_anyway_is_left_out() -> None:
    by_class = units(model_of(), fsdp_transformer_layer_cls_to_wrap=("LlamaRMSNorm", "Embedding"))
    assert by_class == [Together(("lm_head",), takes_ids=False, kept=True)]


def test_a_peft_model_leaves_its_norm_in_the_root() -> None:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model_of(), LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    prefix = "base_model.model."
    assert [unit.modules for unit in units(adapted)] == [
        (prefix + "model.embed_tokens",), (prefix + "lm_head",),
    ]  # fmt: skip


def test_accelerate_finds_the_same_norm() -> None:
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    if not hasattr(fsdp_utils, "_find_final_norm"):
        pytest.skip("this accelerate has other units than 1.15")
    norm = fsdp_utils._find_final_norm(model := model_of())
    [name] = [name for name, module in model.named_modules() if module is norm]
    assert name in units(model)[-1].modules


def test_the_embedding_is_freed_after_forward_and_gathered_again() -> None:
    trace = toy_trace()
    made = units_of(trace, trace.wrapped, [EMBEDDING])
    assert [(u.name, len(u.parameters)) for u in made] == [
        ("", 0), ("embed", 1), ("blocks.0", 1), ("blocks.1", 1),
    ]  # fmt: skip
    fsdp = Fsdp2Options(shard_size=2)
    table, named = Fsdp2Pass(trace, made, trace.masters, fsdp).run().finish()
    assert collectives(named) == [
        ("all_gather", "embed"), ("all_gather", "blocks.0"), ("all_gather", "blocks.1"),
        ("all_gather", "blocks.1"), ("all_gather", "blocks.0"), ("reduce_scatter", "blocks.1"),
        ("all_gather", "embed"), ("reduce_scatter", "blocks.0"), ("reduce_scatter", "embed"),
    ]  # fmt: skip
    # block 0 in forward: its copy and its gather output; embed's were freed
    assert alive(table, named, Category.COMMUNICATION, "mm", 1) == [WEIGHT] * 2
    # block 0 in backward: its copy, block 1's reduce-scatter input, embed's prefetched output
    assert alive(table, named, Category.COMMUNICATION, "mm", 5) == [WEIGHT] * 3
    assert alive(table, named, Category.COMMUNICATION, "add_", 0) == []


def test_a_unit_of_two_modules_lasts_from_the_first_to_the_last() -> None:
    trace = toy_trace()
    both = Together(("embed", "blocks.1"), takes_ids=True, kept=True)
    made = {u.name: u for u in units_of(trace, ["blocks.0"], [both])}
    unit, root = made["embed, blocks.1"], made[""]
    spans = {trace.modules[s.module]: s for s in trace.spans if s.step == 0}
    [window] = unit.forward[0]
    assert (window.start, window.end) == (spans["embed"].enter, spans["blocks.1"].exit)
    assert len(unit.parameters) == 2 and not root.parameters
    # its gradients are reduced in the callback at the end of backward
    hooks = hooks_of([Group(u) for u in made.values()], 0)
    assert [(h.name, h.group.unit.name) for h in hooks][-4:] == [
        ("post_backward", "blocks.0"), ("post_backward", ""), ("post_backward", unit.name),
        ("end_backward", ""),
    ]  # fmt: skip


def test_a_unit_whose_last_module_never_runs_ends_with_the_root() -> None:
    trace = toy_trace()
    both = Together(("blocks.1", "absent"), takes_ids=False, kept=True)
    made = {u.name: u for u in units_of(trace, ["blocks.0"], [both])}
    assert made[both.name].forward[0][0].end == made[""].forward[0][0].end


def test_four_bit_weights_as_integers_lie_whole_on_each_gpu() -> None:
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1,
    }  # fmt: skip
    common: dict[str, Any] = {
        "model": llama, "gpus": 2, "strategy": "fsdp2", "method": "qlora", "lora_r": 2,
        "lora_target_modules": ("q_proj",), "bf16": True, "param_dtype": "bf16", "seq_length": 8,
        "per_device_train_batch_size": 1, "prepare_kbit": "none",
    }  # fmt: skip
    done = estimate(**common, fsdp_units="accelerate")
    [note] = [line for line in done.assumptions if "whole on each GPU" in line]
    assert note.startswith("fsdp2: 7 4-bit weights stored as uint8, 0.0 MiB")
    table, named = done.worst.table.lifetimes, done.worst.table.trace
    rows = table.take(table.category == Category.PARAMETER)
    # seven matrices of 64 x 64 half bytes, each with a code of 256 fp32 numbers for its constants; half
    # of embedding and head in bf16; half of the adapter's 2 x 64 and 64 x 2 in fp32; below: norms
    large = sorted(n for n in rows.nbytes.tolist() if n > 64)
    assert large == [2 * 64 * 2] * 2 + [256 * 4] * 7 + [64 * 64 // 2] * 7 + [64 * 64] * 2
    assert ("all_gather", "base_model.model.model.layers.0") in collectives(named)
    with pytest.raises(LlmemError, match="use --fsdp-units accelerate"):
        estimate(**common)
