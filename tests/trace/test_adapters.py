"""peft's adapters on meta: trained parameters counted by hand, peaks laid beside real steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from experiments.real_cpu.adapters import spec_of
from experiments.real_cpu.compare import against_recorder
from experiments.real_cpu.models import MODELS
from llmem.cli import main
from llmem.errors import LlmemError
from llmem.lifetimes import Category, Trace
from llmem.spec import make_spec
from llmem.timeline import replay
from llmem.trace.adapters import NOT_ON_META
from llmem.trace.run import trace_spec

LAYERS, WIDTH, KEYS, INNER, VOCABULARY = 3, 48, 16, 104, 331
"""The tiny Llama of ``MODELS``: width of keys and values by its 2 grouped heads of 8."""

QV = (WIDTH + WIDTH) + (WIDTH + KEYS)
"""In and out features of q_proj and v_proj, peft's default targets for Llama."""


def traced(model: str = "llama", **fields: Any) -> Trace:
    plain = {"seq_length": 16, "per_device_train_batch_size": 1, "gpu": "cpu", "steps": 1}
    return trace_spec(make_spec(model=MODELS[model], **{"param_dtype": "fp32", **plain, **fields}))


def trained(trace: Trace) -> int:
    return sum(p.numel for p in trace.parameters if p.trainable)


def config(kind: str, **settings: Any) -> dict[str, Any]:
    return {"peft_config": {"peft_type": kind, **settings}}


COUNTED: list[tuple[dict[str, Any], int]] = [
    ({"method": "lora"}, LAYERS * 8 * QV),
    ({"method": "lora", "lora_r": 5, "use_rslora": True}, LAYERS * 5 * QV),
    # DoRA: a magnitude for each output
    ({"method": "lora", "lora_r": 5, "use_dora": True}, LAYERS * (5 * QV + WIDTH + KEYS)),
    ({"method": "lora", "modules_to_save": ("lm_head",)}, LAYERS * 8 * QV + VOCABULARY * WIDTH),
    (config("LORA", r=4, init_lora_weights="pissa"), LAYERS * 4 * QV),
    (config("LORA", r=4, init_lora_weights="mica"), LAYERS * 4 * 2 * WIDTH),  # A alone
    # IA3: a factor for each output of k_proj and v_proj and each input of down_proj
    ({"method": "ia3"}, LAYERS * (KEYS + KEYS + INNER)),
    ({"method": "loha"}, LAYERS * 2 * 8 * QV),
    # OFT: a skew-symmetric 8 x 8 block for every 8 inputs
    (config("OFT", oft_block_size=8), LAYERS * 2 * (WIDTH // 8) * (8 * 7 // 2)),
    # VeRA: two vectors; the matrices are shared and frozen
    ({"method": "vera", "lora_r": 7}, LAYERS * (7 + WIDTH + 7 + KEYS)),
    # AdaLoRA: rank 12 at first, with as many singular values
    ({"method": "adalora"}, LAYERS * 12 * (QV + 2)),
    ({"method": "adalora", "lora_r": 5}, LAYERS * 5 * (QV + 2)),
    ({"method": "prompt_tuning", "num_virtual_tokens": 7}, 7 * WIDTH),
    ({"method": "prefix_tuning", "num_virtual_tokens": 7}, 7 * LAYERS * 2 * KEYS),
    ({"method": "ln_tuning"}, (2 * LAYERS + 1) * WIDTH),
    (config("TRAINABLE_TOKENS", token_indices=[3, 5, 7]), 3 * WIDTH),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "count"), COUNTED, ids=lambda value: str(value))
def test_trained_parameters_are_those_counted_by_hand(fields: dict[str, Any], count: int) -> None:
    assert trained(traced(**fields)) == count


def test_all_biases_of_gpt2_are_trained_beside_lora() -> None:
    norms_and_linears = 2 * 48 + (144 + 48) + (192 + 48)
    lora = LAYERS * 8 * (48 + 144)  # c_attn
    found = trained(traced("gpt2", method="lora", lora_bias="all"))
    assert found == lora + LAYERS * norms_and_linears + 48


REAL = [
    ("llama", "dora", "bf16"),
    ("llama", "lora and head", "fp32"),
    ("llama", "loha", "fp32"),
    ("llama", "adalora", "bf16"),
    ("llama", "adalora", "fp32"),
    ("llama", "prefix_tuning", "bf16"),
    ("gpt2", "rslora, biases", "fp32"),
    ("gpt2", "vera", "bf16"),
    ("gpt2", "prompt_tuning", "fp32"),
    ("t5", "ia3", "fp32"),
    ("t5", "lora and tokens", "bf16"),
]


@pytest.mark.parametrize(("model", "adapter", "dtype"), REAL)
def test_births_and_deaths_are_those_of_a_real_run(model: str, adapter: str, dtype: str) -> None:
    found = against_recorder(spec_of(adapter, model, param_dtype=dtype))
    assert found.real == found.predicted
    assert found.difference == ""


def test_peak_of_oft_is_that_of_a_real_run() -> None:
    """Its two index buffers are views of one storage on the host, and part when they are moved."""
    found = against_recorder(spec_of("oft", "llama", param_dtype="bf16"))
    assert found.real == found.predicted


def test_adapters_of_a_16_bit_model_are_fp32_unless_told_otherwise() -> None:
    def dtypes(**fields: Any) -> set[str]:
        trace = traced(method="lora", param_dtype="bf16", **fields)
        return {p.dtype for p in trace.parameters if p.trainable}

    assert dtypes() == {"float32"}
    assert dtypes(autocast_adapter_dtype=False) == {"bfloat16"}


def test_habits_of_older_peft() -> None:
    """Until 0.11 adapters keep the model's dtype; until 0.20 AdaLoRA's rank numbers are frozen."""
    old = traced(method="lora", param_dtype="bf16", as_peft="0.11")
    assert {p.dtype for p in old.parameters if p.trainable} == {"bfloat16"}
    now, then = (
        traced(method="adalora", param_dtype="bf16", as_peft=version) for version in (None, "0.20")
    )
    assert trained(now) - trained(then) == 2 * LAYERS  # one for each of q_proj and v_proj
    assert trained(then) == LAYERS * 12 * (QV + 2)
    with pytest.raises(LlmemError, match="'new' is no version of peft"):
        traced(method="lora", as_peft="new")


def test_assumptions_say_what_is_trained() -> None:
    (said,) = [
        line for line in traced(method="lora", use_dora=True).assumptions if "adapters" in line
    ]
    assert "peft's lora (lora_alpha 16, use_dora True); targets q_proj, v_proj" in said
    assert f"{LAYERS * (8 * QV + WIDTH + KEYS):,} trained parameters in float32" in said


def tiny_classifier() -> torch.nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    with torch.device("meta"):
        return DistilBertForSequenceClassification(
            DistilBertConfig(vocab_size=331, dim=48, hidden_dim=104, n_layers=1, n_heads=6)
        )


def test_a_module_given_is_not_changed_and_its_head_is_trained() -> None:
    model = tiny_classifier()
    before = [name for name, _ in model.named_modules()]
    spec = make_spec(
        model=model, method="lora", lora_target_modules=("q_lin",), seq_length=8, steps=1
    )
    head = (48 * 48 + 48) + (48 * 2 + 2)  # pre_classifier and classifier, which peft adds itself
    assert trained(trace_spec(spec)) == 8 * 2 * 48 + head
    assert [name for name, _ in model.named_modules()] == before


def saved(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(settings))
    return path


def test_options_win_over_the_file_that_peft_saved(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(r=3, target_modules=["q_proj"], inference_mode=True).save_pretrained(str(tmp_path))
    assert trained(traced(peft_config=tmp_path)) == LAYERS * 3 * 2 * WIDTH
    assert trained(traced(peft_config=tmp_path, lora_r=5)) == LAYERS * 5 * 2 * WIDTH


def test_a_prompt_from_a_text_loads_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    path = saved(
        tmp_path, peft_type="PROMPT_TUNING", task_type="CAUSAL_LM", num_virtual_tokens=5,
        prompt_tuning_init="TEXT", prompt_tuning_init_text="Classify:",
        tokenizer_name_or_path="somebody/tokenizer", tokenizer_kwargs={"trust_remote_code": True},
        base_model_name_or_path="somebody/model", auto_mapping={"parent_library": "evil"},
    )  # fmt: skip
    assert trained(traced(peft_config=path)) == 5 * WIDTH


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "lorra"}, "knows no method 'lorra'"),
    ({"method": "cpt"}, "cpt cannot be traced: it scales"),
    ({"method": "trainable_tokens"}, "token_indices"),
    ({"method": "loha", "use_dora": True}, "loha has no setting like use_dora"),
    ({"method": "full", **config("LORA")}, "leave out --method full"),
    ({"method": "ia3", **config("LORA")}, "of type lora"),
    ({"peft_config": {"r": 8}}, "has no peft_type"),
    (config("LORA", sublayers=3), "'sublayers' is no setting of peft's lora"),
    (config("LORA", megatron_config={"a": 1}, megatron_core="os"), "never done"),
    (config("LORA", r=10**9), "is more than 65,536"),
    (config("LORA", r="many"), "peft refuses this lora"),
    (config("LORA", init_lora_weights="eva"), "needs data"),
    (config("MULTITASK_PROMPT_TUNING"), "task_ids"),
    ({"method": "lora", "lora_target_modules": ("nothing",)}, "peft refuses this lora"),
    ({"method": "prefix_tuning", "gradient_checkpointing": True}, "through the cache"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LlmemError, match=sentence) as caught:
        traced(**fields)
    assert "\n" not in str(caught.value)


def test_virtual_tokens_need_positions_too() -> None:
    fields = {"method": "prompt_tuning", "num_virtual_tokens": 20}
    with pytest.raises(LlmemError, match="use -s 108 or less"):
        traced("gpt2", seq_length=120, **fields)
    traced("llama", seq_length=120, **fields)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "is not JSON"), ("[1]", "no JSON object"), (" " * (1 << 20) + "{}", "larger than 1 MiB"),
     ("[" * 100_000, "is not JSON"), (None, "cannot read")],
    ids=["broken", "list", "large", "deep", "missing"],
)  # fmt: skip
def test_a_file_that_is_no_peft_config_is_refused(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    path = tmp_path / "adapter_config.json"
    if content is not None:
        path.write_text(content)
    ran = CliRunner().invoke(main, ["estimate", "gpt2", "-s", "8", "--peft-config", str(path)])
    assert ran.exit_code == 2
    assert sentence in " ".join(ran.output.split())


def test_peft_knows_every_method_that_cannot_be_traced() -> None:
    from peft import PeftType

    assert set(NOT_ON_META) <= {kind.value.lower() for kind in PeftType}


def tinyllama(**fields: Any) -> Trace:
    return trace_spec(make_spec(model="tinyllama", param_dtype="bf16", steps=1, **fields))


def test_the_rank_of_lora_is_almost_free() -> None:
    def measured(rank: int) -> tuple[int, int]:
        trace = tinyllama(method="lora", lora_r=rank)
        return int(replay(trace.lifetimes).requested.max()), trained(trace)

    (small, few), (large, many) = measured(8), measured(64)
    assert many == 8 * few
    assert large < 1.05 * small


def test_at_long_sequences_lora_keeps_most_of_the_activations_of_full_fine_tuning() -> None:
    def activations(**fields: Any) -> int:
        trace = tinyllama(seq_length=2048, per_device_train_batch_size=4, **fields)
        curve = replay(trace.lifetimes)
        rows = curve.alive(curve.peak_index()) & (
            trace.lifetimes.category == int(Category.ACTIVATION)
        )
        return int(trace.lifetimes.nbytes[rows].sum())

    lora, full = activations(method="lora"), activations(method="full")
    assert 0.7 * full < lora < full
