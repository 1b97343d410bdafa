"""`llmem-code` against values that the released code itself printed."""

import csv
from pathlib import Path

import pytest
import torch

from llmem.baselines import BaselineInput, run
from llmem.baselines.llmem_code import PAGE, chain_of, page

from .reference_models import build

MIB = 1024**2
GOLDEN = list(csv.DictReader((Path(__file__).parent / "data" / "llmem_golden.csv").open()))


def ask(name: str, batch: int, gpus: int = 1, tp: int = 1, zero: str = "gemini", **more):
    model, config = build(name)
    return run(
        "llmem-code", BaselineInput(model, config, name, batch, 512, gpus, tp, zero=zero, **more)
    )


@pytest.mark.parametrize(
    "row", GOLDEN, ids=lambda r: "-".join(r[k] for k in ("model", "gpus", "tp", "batch", "unit"))
)
def test_equals_the_released_code(row: dict[str, str]) -> None:
    answer = ask(row["model"], int(row["batch"]), int(row["gpus"]), max(1, int(row["tp"])))
    unit = MIB if row["unit"] == "MiB" else 1
    assert answer.parts[row["quantity"]] == int(row["value"]) * unit


def test_parts_add_up_and_biases_are_charged() -> None:
    parts = ask("OPT-125m", 10).parts
    kinds = ("gathered_parameters", "optimizer_states", "input", "outputs", "lm_head",
             "backward_gathers")
    assert sum(parts[k] for k in kinds) == parts["estimate_without_base"]
    # The true Adam state is 955 MiB; rounding 72 biases to two pages each makes the rest.
    assert parts["optimizer_states"] == 1464 * MIB
    assert parts["input"] == PAGE


def test_base_is_added_and_can_be_given() -> None:
    given = ask("OPT-125m", 10, base_bytes=600 * MIB)
    # Three chunks of 44,101,632 elements: 86 MiB of fp16 and 170 MiB of fp32 each, in pages.
    assert given.parts["chunks"] == 3 * (86 + 170) * MIB
    assert given.bytes == (600 + 768 + 3124) * MIB
    assert ask("OPT-125m", 10).parts["m_base"] == 426 * MIB


def test_plain_data_parallelism_is_the_single_gpu_form() -> None:
    one, four = ask("OPT-125m", 10), ask("OPT-125m", 10, gpus=4, zero="ddp")
    assert four.parts["estimate_without_base"] == one.parts["estimate_without_base"]


def test_chain_of_opt_350m_defers_its_output_projection() -> None:
    chain = chain_of(*build("OPT-350m"))
    assert chain.outputs == (512, 512, *[1024] * 23, 512)
    assert chain.gathers == (*[1024] * 23, 512)
    assert chain.head == 50272


def test_gpt2_is_as_silently_wrong_as_the_original() -> None:
    # Conv1D is no Linear: the code takes the last layer boundary for the logits.
    answer = ask("gpt2", 4)
    head = page(4 * 512 * 768 * 2) + 2 * page(4 * 511 * 768 * 2) + page(50257 * 768 * 2)
    assert answer.parts["lm_head"] == head
    assert any("no Linear" in text for text in answer.leaves_out)


def test_llama_goes_by_shapes_where_the_original_raises() -> None:
    parts = ask("llama-7b", 1).parts
    assert parts["outputs"] == (2 + 32) * 4 * MIB  # 512 x 4096 x 2 bytes = 4 MiB each
    assert parts["lm_head"] == (32 + 2 * 32 + 250) * MIB


def test_what_it_cannot_express() -> None:
    model, config = build("OPT-125m")
    zero2 = run("llmem-code", BaselineInput(model, config, "x", 1, 512, gpus=4, zero="zero2"))
    assert zero2.bytes is None
    assert "ZeRO-2" in str(zero2.why_not)
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5Config(num_layers=1)
    with torch.device("meta"):
        encoder_decoder = T5ForConditionalGeneration(t5)
    assert run("llmem-code", BaselineInput(encoder_decoder, t5, "t5", 1, 64)).bytes is None
