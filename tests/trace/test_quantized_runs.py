"""Quantised models: which layers, what a run holds, against real runs and published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.real_cpu.compare import against_profiler
from experiments.real_cpu.models import MODELS
from llmem.errors import LlmemError
from llmem.estimate import estimate
from llmem.lifetimes import Phase, Trace
from llmem.spec import RunSpec, make_spec
from llmem.trace.build import build_model
from llmem.trace.quantize import layers_known, quantize, statistics
from llmem.trace.run import trace_spec
from llmem.trace.standins.bitsandbytes import (
    Int8Params,
    Linear4bit,
    Linear8bitLt,
    Params4bit,
)


def bytes_of(tensors: list[torch.Tensor]) -> list[int]:
    return [t.untyped_storage().nbytes() for t in tensors]


# -- which layers, and how a model is prepared -----------------------------------------------------


def saved(tmp_path: Path, model: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    return str(tmp_path)


def small(tmp_path: Path, model: str = "llama", **fields: Any) -> RunSpec:
    return make_spec(
        **{
            "model": saved(tmp_path, model), "per_device_train_batch_size": 3, "seq_length": 23,
            "method": "lora", "gpu": "cpu", "attn_implementation": "eager", "param_dtype": "fp32",
            "optim": "adamw_torch_single", "lora_target_modules": "all-linear", **fields,
        }
    )  # fmt: skip


def built(spec: RunSpec, model: str) -> torch.nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(**MODELS[model])
    kind = getattr(transformers, MODELS[model]["architectures"][0])
    with torch.device("meta"):
        made: torch.nn.Module = kind(config).to(torch.bfloat16)
    quantize(made, spec, [], cuda=True)
    return made


@pytest.mark.parametrize("model", ["llama", "qwen2", "gpt2", "opt", "mixtral"])
def test_the_layers_replaced_are_those_transformers_replaces(tmp_path: Path, model: str) -> None:
    integration = pytest.importorskip("transformers.integrations.bitsandbytes")
    bnb = pytest.importorskip("bitsandbytes")
    import transformers
    from transformers.quantizers.base import get_keys_to_not_convert

    ours = built(small(tmp_path, model, quantization="int8"), model)
    config = transformers.AutoConfig.for_model(**MODELS[model])
    with torch.device("meta"):
        real = getattr(transformers, MODELS[model]["architectures"][0])(config)
    integration.replace_with_bnb_linear(
        real, get_keys_to_not_convert(real), transformers.BitsAndBytesConfig(load_in_8bit=True)
    )
    theirs = {n for n, m in real.named_modules() if isinstance(m, bnb.nn.Linear8bitLt)}
    assert {n for n, m in ours.named_modules() if isinstance(m, Linear8bitLt)} == theirs
    assert theirs


def test_preparation_casts_what_is_not_quantised(tmp_path: Path) -> None:
    plain = built(small(tmp_path, quantization="nf4", prepare_kbit="none"), "llama")
    prepared = built(small(tmp_path, quantization="nf4"), "llama")
    for before, after in zip(plain.parameters(), prepared.parameters(), strict=True):
        kept = isinstance(after, Params4bit)
        assert before.dtype == (torch.uint8 if kept else torch.bfloat16)
        assert after.dtype == (torch.uint8 if kept else torch.float32)
    assert not any(p.requires_grad for p in prepared.parameters())


def test_trl_casts_embeddings_back(tmp_path: Path) -> None:
    spec = small(
        tmp_path, quantization="nf4", prepare_kbit="trl", bf16=True, param_dtype="bf16", gpu=None
    )
    trace = trace_spec(spec, steps=1)
    dtypes = {p.name.rsplit(".", 2)[-2]: p.dtype for p in trace.parameters}
    assert dtypes["embed_tokens"] == dtypes["lm_head"] == "bfloat16"
    assert dtypes["norm"] == dtypes["input_layernorm"] == "float32"


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"quantization": "nf4", "double_quant": True}),
    ("llama", {"quantization": "int8", "param_dtype": "bf16"}),
    ("opt", {"quantization": "fp4", "param_dtype": "bf16"}),
    (
        "gpt2",
        {"quantization": "nf4", "param_dtype": "bf16", "prepare_kbit": "none", "bf16": True},
    ),
    ("gpt2", {"quantization": "int8"}),
]


def held_at_backward(trace: Trace) -> Counter[int]:
    """Bytes of every storage alive when the second step's backward begins."""
    table = trace.lifetimes
    at = next(t for t, phase, step in trace.phase_ticks if phase is Phase.BACKWARD and step == 1)
    return Counter(table.nbytes[(table.birth <= at) & (table.death > at)].tolist())


@pytest.mark.parametrize(("model", "fields"), CASES)
def test_storage_alive_is_that_of_a_real_run(
    tmp_path: Path, model: str, fields: dict[str, Any]
) -> None:
    """bitsandbytes' and peft's own layers, computing on a CPU."""
    pytest.importorskip("bitsandbytes")
    spec = small(tmp_path, model, **fields)
    assert held_at_backward(trace_spec(spec)) == held_at_backward(trace_spec(spec, device="cpu"))


@pytest.mark.parametrize(("model", "fields"), [CASES[0], CASES[2], CASES[4]])
def test_every_allocation_is_that_of_a_real_run(
    tmp_path: Path, model: str, fields: dict[str, Any]
) -> None:
    """Dequantised copies and fp32 absmax, too: the profiler sees below the library's ops."""
    pytest.importorskip("bitsandbytes")
    found = against_profiler(small(tmp_path, model, **fields))
    assert found.only_real == {}
    assert found.only_predicted == {}


def test_it_works_without_bitsandbytes(tmp_path: Path) -> None:
    """peft takes the stand-ins, and the process is left without the library as it was."""
    code = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bitsandbytes":
            raise ModuleNotFoundError(name)
import importlib.util
seen = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    getattr(sys.modules.get(name), "__spec__", None)
    if name == "bitsandbytes" else seen(name, package))
sys.meta_path.insert(0, Hide())
from llmem.estimate import estimate
from llmem.spec import make_spec
import peft.import_utils
spec = make_spec(model={saved(tmp_path, "llama")!r}, method="qlora", seq_length=16,
                 per_device_train_batch_size=2, param_dtype="bf16")
print(estimate(spec).worst.peak.allocated, peft.import_utils.is_bnb_available(),
      "bitsandbytes" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    spec = small(
        tmp_path, method="qlora", seq_length=16, per_device_train_batch_size=2, param_dtype="bf16",
        gpu=None, attn_implementation=None, lora_target_modules=None, optim="adamw_torch_fused",
    )  # fmt: skip
    assert out.stdout.split() == [str(estimate(spec).worst.peak.allocated), "False", "False"]


def test_peft_keeps_the_library_it_had() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    with layers_known(make_spec(model="tinyllama", method="qlora"), "meta"):
        assert sys.modules["bitsandbytes"] is not bnb
    assert sys.modules["bitsandbytes"] is bnb
    from peft.tuners.lora import bnb as layers

    assert layers.bnb is bnb


def test_modules_of_peft_without_the_library_are_left_as_they_are() -> None:
    pytest.importorskip("bitsandbytes")
    from peft.tuners.ia3 import bnb as layers  # looks for the library, and never names it

    assert not hasattr(layers, "bnb")
    with layers_known(make_spec(model="tinyllama", method="qlora"), "meta"):
        assert not hasattr(layers, "bnb")
    assert sys.modules["peft.tuners.ia3.bnb"] is layers


# -- what the user sees ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "full", "quantization": "nf4"}, "no gradients"),
        ({"method": "qlora", "quantization": "int8"}, "use --method lora"),
        ({"method": "qlora", "gpus": 2, "strategy": "zero3"}, "zero3 are not modelled"),
        ({"method": "qlora", "gpus": 2, "tp": 2}, "not cut by --tp"),
        ({"method": "qlora", "gpus": 2, "strategy": "fsdp"}, "--bnb-4bit-quant-storage bf16"),
        (
            {
                "method": "qlora", "gpus": 2, "strategy": "fsdp", "bnb_4bit_quant_storage": "bf16"
            },
            "--prepare-kbit none",
        ),
    ],
)  # fmt: skip
def test_refused_in_one_sentence(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(LlmemError, match=says):
        estimate(small(tmp_path, **{"gpu": None, "param_dtype": "bf16", **fields}))


def test_under_ddp_every_rank_has_all_of_it(tmp_path: Path) -> None:
    def parameters(**fields: Any) -> int:
        spec = small(tmp_path, method="qlora", gpu=None, steps=1, **fields)
        return estimate(spec).worst.breakdown["parameters"]

    assert parameters() == parameters(gpus=2, strategy="ddp")


def test_octocoder_in_16_8_and_4_bits() -> None:
    """15.5 B parameters to load: about 29, 15 and 9 GiB (an LLM-inference guide: 29, 15, 9.5)."""

    def gib(kind: str) -> float:
        spec = make_spec(
            model="octocoder", method="lora", quantization=kind, prepare_kbit="none",
            param_dtype="bf16",
        )  # fmt: skip
        model = build_model(spec, "meta", [])
        quantize(model, spec, [], cuda=True)
        kept = [*model.parameters(), *(tensor for _, tensor in statistics(model))]
        return sum(bytes_of(kept)) / 2**30

    assert gib("none") == pytest.approx(28.9, abs=0.2)
    assert gib("int8") == pytest.approx(14.8, abs=0.2)
    assert gib("nf4") == pytest.approx(8.6, abs=0.2)


def test_qlora_can_exceed_lora() -> None:
    """A 1.1 B model without checkpointing: fp32 norms make the residual stream fp32."""

    def peak(**fields: Any) -> int:
        spec = make_spec(
            model="tinyllama", per_device_train_batch_size=4, seq_length=512, bf16=True,
            steps=1, **fields,
        )  # fmt: skip
        return estimate(spec).worst.peak.allocated

    assert peak(method="qlora") > peak(method="lora") > peak(method="qlora", prepare_kbit="none")
    assert peak(method="qlora", gradient_checkpointing=True) < peak(
        method="lora", gradient_checkpointing=True
    )


@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        # Mistral-7B, nf4 with double quantization, r 16 on q, k, v, o; A100-80GB, 4 x 4,096 tokens,
        # torch.cuda.max_memory_allocated (foundation-model-stack/fms-acceleration, Apache-2.0).
        ({"prepare_kbit": "trl"}, 20_556_796_416),
        # 2 GPUs, 2 x 4,096 tokens each, FSDP1
        (
            {
                "prepare_kbit": "none",
                "gpus": 2,
                "strategy": "fsdp",
                "bnb_4bit_quant_storage": "bf16",
                "per_device_train_batch_size": 2,
            },
            9_525_273_600,
        ),
    ],
)
def test_published_peaks(fields: dict[str, Any], measured: int) -> None:
    run: dict[str, Any] = {
        "model": "mistral-7b", "method": "qlora", "param_dtype": "bf16", "bf16": True,
        "optim": "adamw_torch", "per_device_train_batch_size": 4, "seq_length": 4096,
        "gradient_checkpointing": True, "attn_implementation": "flash_attention_2",
        "as_transformers": "4.45", "as_bitsandbytes": "0.43.3", "gpu": "a100-80gb",
        "lora_r": 16, "lora_dropout": 0.1,
        "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
    }  # fmt: skip
    spec = make_spec(**{**run, **fields})
    assert estimate(spec).worst.peak.allocated == pytest.approx(measured, rel=0.0005)


def test_statistics_are_no_buffers(tmp_path: Path) -> None:
    """DDP broadcasts buffers; bitsandbytes' statistics are none."""
    model = built(small(tmp_path, quantization="nf4", double_quant=True), "llama")
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    assert len(list(statistics(model))) == 5 * len(layers)
    assert not any(list(layer.buffers()) for layer in layers)
    assert not any(isinstance(p, Int8Params) for p in model.parameters())
