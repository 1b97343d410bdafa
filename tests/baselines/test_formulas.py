"""Rules of thumb and other tools' formulas, on a model of 1,704 parameters."""

from __future__ import annotations

import pytest

from llmem.baselines import NAMES, BaselineInput, BaselineResult, run
from llmem.baselines.deepspeed import zero2, zero3
from llmem.baselines.dims import TransformerDims, dims_of
from llmem.errors import LlmemError

from .reference_models import build
from .tiny import tiny_llama

PARAMS = 1704


def ask(name: str, batch: int = 2, seq: int = 4, **run_options) -> BaselineResult:
    model, config = tiny_llama()
    return run(name, BaselineInput(model, config, "tiny", batch, seq, **run_options))


def test_dims() -> None:
    assert dims_of(*tiny_llama()) == TransformerDims(
        hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=32, gated=True,
        experts=1, tied=False,
    )
    opt = dims_of(*build("OPT-125m"))
    assert (opt.hidden, opt.layers, opt.ffn, opt.gated, opt.tied) == (768, 12, 3072, False, True)
    gpt2 = dims_of(*build("gpt2"))
    assert (gpt2.hidden, gpt2.layers, gpt2.heads, gpt2.ffn) == (768, 12, 12, 3072)


def test_params_x4() -> None:
    assert ask("params-x4").bytes == 16 * PARAMS
    assert ask("params-x4", dtype_bytes=2, gpus=4, zero="zero3").bytes == 8 * PARAMS


def test_deepspeed() -> None:
    assert ask("deepspeed", gpus=4, zero="zero2").bytes == 2 * PARAMS + 18 * PARAMS // 4
    # The largest module's own parameters are the embedding's 256.
    assert ask("deepspeed", gpus=4, zero="zero3").bytes == 4 * 256 + 18 * PARAMS // 4
    assert ask("deepspeed", gpus=4, zero="zero3", offload="all").bytes == 4 * 256
    refused = ask("deepspeed", zero="none")
    assert refused.bytes is None
    assert refused.why_not


def test_deepspeed_prints_what_its_documentation_prints() -> None:
    # T0_3B on one GPU: 2,783 M parameters, 65 M in the largest layer -> 46.91, 5.43 and 0.25 GiB.
    params, largest = 2783 * 10**6, 65 * 10**6

    def gib(parts: dict[str, int]) -> float:
        return round(sum(parts.values()) / 2**30, 1)

    assert gib(zero3(params, largest, 1)) == 46.9
    assert gib(zero3(params, largest, 1, "optimizer")) == 5.4
    assert gib(zero3(params, largest, 1, "all")) == 0.2
    assert sum(zero2(params, 1, "optimizer").values()) == 2 * params


def test_accelerate_is_a_maximum_over_the_headless_model() -> None:
    # Without the head's 256; the rotary embedding's two buffers have head_dim / 2 = 2 entries each.
    size = (PARAMS - 256 + 2 + 2) * 4
    assert ask("accelerate").bytes == 4 * size
    half = ask("accelerate", mixed=True)
    assert half.bytes == 2 * size
    assert half.parts["gradients"] == size * 3 // 2


def test_accelerate_agrees_with_the_tool() -> None:
    estimate = pytest.importorskip("accelerate.commands.estimate")
    modeling = pytest.importorskip("accelerate.utils.modeling")
    model, config = build("OPT-125m")
    size = modeling.calculate_maximum_sizes(model.base_model)[0]
    for dtype, options in (("float32", {}), ("bfloat16", {"mixed": True})):
        expected = max(estimate.estimate_training_usage(size, dtype).values())
        inp = BaselineInput(model, config, "opt-125m", 1, 512, **options)
        assert run("accelerate", inp).bytes == expected


# EleutherAI: embeddings 2 x 256, positions 8 x 4, norms 8 x 8 x 2 + 16, attention 2 x 1.5 x 2 x 64,
# MLP 3 x 2 x 8 x 16.
COUNTED = 512 + 32 + 144 + 384 + 768
# Two sequences of 4 tokens, hidden 8, 2 layers: 34 bytes each and 5 x 2 x 4 / 8 of scores.
ACTIVATIONS = 2 * 4 * 8 * 2 * (34 + 5)


def test_eleutherai_on_one_gpu() -> None:
    assert ask("eleutherai").bytes == COUNTED * (4 + 4 + 12) + ACTIVATIONS
    checkpointed = ask("eleutherai", gradient_checkpointing=True, mixed=True, optim="sgd")
    assert checkpointed.bytes == COUNTED * (2 + 4 + 8) + 2 * 4 * 8 * 2 * 34


def test_eleutherai_divides_twice_and_fixed_does_not() -> None:
    options = {"gpus": 8, "tp": 2, "zero": "zero3", "mixed": True}
    buckets = (5 * 10**8 + 10**9) * 2
    wrong, right = ask("eleutherai", **options), ask("eleutherai-fixed", **options)
    assert wrong.parts["model"] == COUNTED * 2 // 16
    assert right.parts["model"] == COUNTED * 2 // 8
    assert wrong.parts["communication"] == right.parts["communication"] == buckets
    assert wrong.parts["optimizer"] == right.parts["optimizer"] == COUNTED * 12 // 8
    # Without ZeRO the original forgets that gradients are split by tensors at all.
    plain = {"gpus": 2, "tp": 2, "zero": "none"}
    assert ask("eleutherai", **plain).parts["gradients"] == COUNTED * 4
    assert ask("eleutherai-fixed", **plain).parts["gradients"] == COUNTED * 2


# Megatron: attention 2 x 8 x 2 x 4 x 1.5 = 192, MLP 2 x 8 x (16 x 1.5 + 2) = 416, final norm 16.
BLOCK = 2 * (192 + 416) + 16


def test_megatron_weights_and_optimizer() -> None:
    # The vocabulary is padded to 128, the head is untied.
    assert ask("megatron").bytes == (BLOCK + 2 * 8 * 128) * 18
    sharded = ask("megatron", gpus=4, zero="zero1")
    assert sharded.bytes == (BLOCK + 2 * 8 * 128) * 9  # 6 + 12 / 4
    # With two stages the first holds half the layers and the embedding, not the head.
    assert ask("megatron", gpus=2, pp=2).bytes == (BLOCK // 2 + 8 * 128) * 18
    assert "activations: reported only with sequence parallelism" in sharded.leaves_out


def test_megatron_activations_with_sequence_parallelism() -> None:
    parts = ask("megatron", gpus=2, tp=2, sp=True).parts
    tokens = 2 * 4
    layers = tokens * 8 * (18 + 4 * 2) * 2
    embedding = 8 * tokens + tokens * 8
    head = tokens * 8 * 4 * (1 + 256 // 8)
    assert parts["activations"] == (layers + embedding + head) // 2


def test_every_baseline_answers_or_says_why() -> None:
    for name in NAMES:
        if name in ("dnnmem", "xmem"):  # they trace and train; see their own tests
            continue
        answer = ask(name, gpus=2, zero="zero3")
        assert (answer.bytes is None) != (answer.why_not is None)
        assert answer.seconds >= 0
        assert answer.bytes is None or answer.leaves_out


def test_unknown_name() -> None:
    with pytest.raises(LlmemError, match="llmem-paper"):
        ask("guess")


def test_interface_is_light() -> None:
    import subprocess
    import sys

    heavy = "{'torch', 'numpy', 'networkx', 'transformers'}"
    code = f"import sys, llmem.baselines; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
