"""Older versions of transformers and torch: what is done without what they lack, and what is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import llmem
from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.models import build, resolve
from llmem.spec import checkpoints_calls, checkpoints_reentrantly, make_spec
from llmem.trace.as_transformers import behave_like
from llmem.trace.checkpointing import _only_every
from llmem.trace.generate import GenerationRecorder, check_generation
from llmem.trace.quantize import _converts
from llmem.trace.recorder import Recorder
from llmem.trace.run import _untraceable
from llmem.trace.split.process_group import rank_of
from llmem.trace.split.tp_plans import _check_masks

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIZE = {"per_device_train_batch_size": 2, "seq_length": 32}


def says(version: str) -> Callable[[str], str]:
    return lambda package: version


def test_a_package_that_is_not_there() -> None:
    assert installed("torch").split("+")[0] == torch.__version__.split("+")[0]
    with pytest.raises(LlmemError, match="no-such-package is not installed"):
        installed("no-such-package")


@pytest.mark.parametrize(
    ("version", "reentrant", "calls"),
    [("4.51.3", True, True), ("4.57.6", True, False), ("5.24.0", False, False)],
)
def test_checkpoints_are_by_default_those_of_the_installed_version(
    monkeypatch: pytest.MonkeyPatch, version: str, reentrant: bool, calls: bool
) -> None:
    monkeypatch.setattr("llmem.spec.installed", says(version))
    assert (checkpoints_reentrantly(None), checkpoints_calls(None)) == (reentrant, calls)
    assert (checkpoints_reentrantly("4.51"), checkpoints_calls("4.51")) == (True, True)


def test_habits_that_an_older_installation_has_are_not_acted_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmem.trace.as_transformers.installed", says("4.51.3"))
    masks = pytest.importorskip("transformers.masking_utils").AttentionMaskInterface._global_mapping
    mask, notes = masks["sdpa"], []
    with behave_like("4.51", notes.append):
        assert masks["sdpa"] is mask
    assert any("one additive mask" in note for note in notes)
    with pytest.raises(LlmemError, match=r"4\.51\.3 still has a habit of before 4\.53"):
        with behave_like("4.55", notes.append):
            pass


def test_checkpoint_every_names_the_version_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(resolve(LLAMA))
    monkeypatch.setitem(sys.modules, "transformers.modeling_layers", None)
    with pytest.raises(LlmemError, match=r"transformers 4\.53"):
        _only_every(model, 2)


def test_generate_names_the_version_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.cache_utils.DynamicSlidingWindowLayer")
    with pytest.raises(LlmemError, match=r"transformers 4\.56"):
        check_generation(make_spec(model=LLAMA, task="generate"))


def test_positions_of_a_generation_have_not_run_past_its_ids() -> None:
    with GenerationRecorder(forwards=[0, 1], devices=frozenset({"meta"})):
        first = torch.ones(4, dtype=torch.int64, device="meta").cumsum(0) - 1
        assert not first[-1] >= 4
        assert not (first[-1:] + 1)[-1] >= 5


@pytest.mark.parametrize(
    ("kept", "quantised", "same_in_5"),
    [
        ([], [True, True, True], True),
        (["lm_head"], [False, True, True], True),
        (["model.layers.0"], [True, False, True], True),
        (["mlp"], [True, False, True], False),  # 4.x finds it in the middle of a name, too
    ],
)
def test_layers_that_4_x_quantises(
    monkeypatch: pytest.MonkeyPatch, kept: list[str], quantised: list[bool], same_in_5: bool
) -> None:
    names = ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")
    assert ([_converts(name, kept) for name in names] == quantised) is same_in_5
    monkeypatch.delattr("transformers.quantizers.quantizers_utils.should_convert_module")
    assert [_converts(name, kept) for name in names] == quantised


def test_weights_are_tied_where_the_class_ties_none_on_meta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)  # as 5.0
    model: Any = build(resolve(LLAMA))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_model_classes_are_imported_before_meta_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmem.models import build as module  # the function of that name is in its place

    where = []
    known = sys.modules["llmem.models.build"]._known_class
    monkeypatch.setattr(
        sys.modules["llmem.models.build"], "_known_class",
        lambda names: (where.append(torch.get_default_device().type), known(names))[1],
    )  # fmt: skip
    module(resolve(LLAMA))
    assert set(where) == {"cpu"}


def test_ranks_without_transformers_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    monkeypatch.setitem(sys.modules, "transformers.distributed", None)
    with rank_of(2, 1):
        assert torch.distributed.get_rank() == 1
    with pytest.raises(LlmemError, match=r"--tp needs transformers 5\.24"):
        llmem.trace(LLAMA, gpus=2, tp=2, **SIZE)


def test_torchtitan_plan_where_weights_are_always_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import parallel

    def peak(**fields: Any) -> int:
        return llmem.estimate(
            model=LLAMA, gpus=2, tp=2, tp_plan="torchtitan", **SIZE, **fields
        ).worst.peak.allocated  # fmt: skip

    now, original = peak(), parallel.parallelize_module
    monkeypatch.setattr(parallel, "parallelize_module", lambda m, mesh, plan: original(m, mesh, plan))
    assert peak() == now


def test_sequence_parallelism_with_masks_of_the_ranks_part() -> None:
    class Old(torch.nn.Module):
        def forward(self, input_ids: Any, cache_position: Any = None) -> Any: ...

    with pytest.raises(LlmemError, match=r"install 5\.24"):
        _check_masks(Old())
    _check_masks(build(resolve(LLAMA)))


def test_plain_tensors_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 would answer NotImplemented the second time it is asked."""
    monkeypatch.setattr(Recorder, "_take_apart", lambda self, func, *_: pytest.fail(str(func)))
    assert len(llmem.trace(LLAMA, **SIZE).step_ticks) == 3


def test_experts_of_4_x_are_said_to_read_values(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder: Any = SimpleNamespace(last_op=lambda: "nonzero", current_module=lambda: "mlp")
    error = NotImplementedError("no meta kernel")
    assert "register_fake" in _untraceable(torch.nn.Linear(1, 1), recorder, error)
    monkeypatch.setattr("llmem.trace.run.installed", says("4.57.6"))
    assert "experts: since 5.0" in _untraceable(torch.nn.Linear(1, 1), recorder, error)


def test_a_refused_batch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("`token_type_ids` is required")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", refuse)
    with pytest.raises(LlmemError, match="refuses the batch: `token_type_ids` is required;"):
        llmem.trace(LLAMA, **SIZE)


def test_a_model_that_fails_in_its_own_code_is_one_sentence() -> None:
    lacks_its_first_token = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 100,
        "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    }  # fmt: skip
    said = r"T5ForConditionalGeneration .* fails \(AttributeError: .*decoder_start_token_id'\); check"
    with pytest.raises(LlmemError, match=said):
        llmem.trace(lacks_its_first_token, **SIZE)
