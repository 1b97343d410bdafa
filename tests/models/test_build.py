"""`build` leaves in memory what `from_pretrained` does: compared with the real thing, tiny."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmem.errors import LlmemError
from llmem.models.build import build, parameter_dtype, to_hf_config
from llmem.models.source import resolve

LLAMA_LIKE = dict(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
DEEPSEEK = dict(
    num_key_value_heads=4,
    head_dim=4,
    kv_lora_rank=8,
    q_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=6,
    moe_intermediate_size=10,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
)
GPT2 = dict(vocab_size=97, n_embd=24, n_layer=2, n_head=4, n_positions=32)

# Class, configuration: tied and untied heads, weights kept in fp32 (T5, DeepSeek-V3), buffers.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", LLAMA_LIKE | {"model_type": "llama"}),
    ("LlamaForCausalLM", LLAMA_LIKE | {"model_type": "llama", "tie_word_embeddings": True}),
    ("LlamaForSequenceClassification", LLAMA_LIKE | {"model_type": "llama", "num_labels": 3}),
    ("Gemma2ForCausalLM", LLAMA_LIKE | {"model_type": "gemma2"}),
    ("DeepseekV3ForCausalLM", LLAMA_LIKE | DEEPSEEK | {"model_type": "deepseek_v3"}),
    ("GPT2LMHeadModel", GPT2 | {"model_type": "gpt2"}),
    ("CodeGenForCausalLM", GPT2 | {"model_type": "codegen", "n_ctx": 32, "rotary_dim": 4}),
    (
        "OPTForCausalLM",
        dict(
            model_type="opt",
            vocab_size=97,
            hidden_size=24,
            word_embed_proj_dim=12,
            ffn_dim=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        ),
    ),
    (
        "BloomForCausalLM",
        dict(model_type="bloom", vocab_size=97, hidden_size=24, n_layer=2, n_head=4),
    ),
    (
        "T5ForConditionalGeneration",
        dict(
            model_type="t5", vocab_size=97, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4
        ),
    ),
    (
        "DistilBertForSequenceClassification",
        dict(model_type="distilbert", vocab_size=97, dim=24, hidden_dim=40, n_layers=2, n_heads=4),
    ),
]


def layout(model: torch.nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bool]]:
    """Every name of every tensor in the module, tied names too: dtype, shape, trainable."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {n: (t.dtype, tuple(t.shape), t.requires_grad) for n, t in [*parameters, *buffers]}


def ties(model: torch.nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("architecture", "config"),
    FAMILIES,
    ids=[f"{i}-{name}" for i, (name, _) in enumerate(FAMILIES)],
)
def test_same_tensors_as_from_pretrained(
    architecture: str, config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    cls = getattr(transformers, architecture)
    config = config | {"architectures": [architecture]}
    cls(to_hf_config(resolve(config))).save_pretrained(tmp_path)
    wanted = parameter_dtype(transformers.PretrainedConfig(), dtype)
    real = cls.from_pretrained(tmp_path, dtype=wanted)
    built = build(resolve(tmp_path), dtype=dtype)
    assert type(built) is cls
    assert layout(built) == layout(real)
    assert ties(built) == ties(real)
    for key in ("use_cache", "_attn_implementation"):
        assert getattr(built.config, key, None) == getattr(real.config, key, None)
    assert built.training
    assert {t.device.type for t in [*built.parameters(), *built.buffers()]} == {"meta"}


def source(**changes: Any) -> Any:
    base = LLAMA_LIKE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return resolve(base | changes)


def test_default_dtype_is_the_configs_else_fp32() -> None:
    assert build(source(torch_dtype="bfloat16")).lm_head.weight.dtype == torch.bfloat16
    assert build(source(dtype="float16")).lm_head.weight.dtype == torch.float16
    assert build(source()).lm_head.weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_rope_frequencies_stay_fp32() -> None:
    model = build(source(), dtype="bf16")
    assert {b.dtype for n, b in model.named_buffers() if "inv_freq" in n} == {torch.float32}


@pytest.mark.parametrize("dtype", ["int8", "bf17", "int32"])
def test_bad_dtype(dtype: str) -> None:
    with pytest.raises(LlmemError, match="no dtype for parameters"):
        build(source(), dtype=dtype)


def test_class_falls_back_to_the_causal_lm_of_the_model_type() -> None:
    assert type(build(source(architectures=["NoSuchModel"]))).__name__ == "LlamaForCausalLM"
    assert type(build(source(architectures=None))).__name__ == "LlamaForCausalLM"


def test_model_type_may_be_missing_if_the_class_is_known() -> None:
    assert type(build(source(model_type=None))).__name__ == "LlamaForCausalLM"


def test_unknown_model_type() -> None:
    with pytest.raises(LlmemError, match=r"no model class for .* \(model_type 'martian'\)"):
        build(source(model_type="martian", architectures=["MartianForCausalLM"]))


def test_model_type_without_a_causal_lm() -> None:
    with pytest.raises(LlmemError, match="vit cannot be built"):
        build(resolve({"model_type": "vit"}))


def test_values_that_transformers_refuses() -> None:
    with pytest.raises(LlmemError, match="transformers refuses the configuration of llama"):
        build(source(hidden_size="wide"))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_attention_2"])
def test_attention_is_what_was_asked_for(attention: str) -> None:
    model = build(source(), attn_implementation=attention)
    layer: Any = model.get_submodule("model.layers.0.self_attn")
    assert layer.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("model_type", "attention"), [("bloom", "sdpa"), ("bloom", "flash_attention_2")]
)
def test_attention_that_the_class_does_not_have(model_type: str, attention: str) -> None:
    tiny = resolve(dict(model_type=model_type, hidden_size=8, n_layer=1, n_head=2, vocab_size=11))
    with pytest.raises(LlmemError, match="does not support"):
        build(tiny, attn_implementation=attention)


def test_num_labels_sets_the_width_of_the_head() -> None:
    tiny = source(architectures=["LlamaForSequenceClassification"])
    assert build(tiny, num_labels=5).get_parameter("score.weight").shape == (5, 24)


def test_overrides_replace_keys_of_the_json() -> None:
    assert to_hf_config(source(), {"num_hidden_layers": 7}).num_hidden_layers == 7
    assert "num_hidden_layers" in source().config and source().config["num_hidden_layers"] == 2


def test_remote_code_is_not_run_unless_trusted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig", '
        '"AutoModelForCausalLM": "mine.Mine"}}'
    )
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from transformers import PretrainedConfig, PreTrainedModel\n"
        "class MineConfig(PretrainedConfig):\n"
        "    model_type = 'mine'\n"
        "class Mine(PreTrainedModel):\n"
        "    config_class = MineConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.line = torch.nn.Linear(3, 5)\n"
        "        self.post_init()\n"
    )
    with pytest.raises(LlmemError, match="no model class"):
        build(resolve(tmp_path))
    trusted = build(resolve(tmp_path), trust_remote_code=True)
    assert sum(p.numel() for p in trusted.parameters()) == 20


def test_cpu_gives_real_random_weights_that_run() -> None:
    model = build(source(), device="cpu")
    weight = model.get_parameter("lm_head.weight")
    assert weight.device.type == "cpu" and 0 < weight.std() < 1
    ids = torch.arange(10)[None]
    loss = model(input_ids=ids, labels=ids).loss
    assert 3 < loss < 6  # ln 97 = 4.57: untrained
