"""Options that would change nothing, and a newcomer's other mistakes: refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import llmem
from llmem.cli import main
from llmem.errors import LlmemError
from llmem.spec import RunSpec, make_spec
from llmem.unused import RULES, notes_on_unused, refuse_unused

from .conftest import TINY


def refused(*args: str) -> str:
    """The sentence of a refusal, which is all that is printed."""
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def test_rules_name_fields_of_a_run() -> None:
    assert {name for rule in RULES for name in rule.fields} <= RunSpec.model_fields.keys()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lora-r", "4"], "--method lora"),
        (["--use-dora"], "--method lora"),
        (["--as-peft", "0.5"], "--method lora"),
        (["--double-quant"], "--method qlora"),
        (["--method", "lora", "--quantization", "int8", "--no-double-quant"], "4-bit"),
        (["--as-bitsandbytes", "0.41"], "quantised"),
        (["--attn-implementation", "eager", "--sdpa-backend", "math"], "SDPA"),
        (["--gpu", "cpu", "--alloc-conf", "expandable_segments:True"], "CUDA allocator"),
        (["--packed-documents", "2"], "--packed"),
        (["--compile-scope", "blocks"], "add --compile"),
        (["--num-beams", "2"], "--task generate"),
        (["--task", "generate", "--optim", "sgd"], "training"),
        (["--task", "generate", "--liger"], "training"),
        (["--tp-plan", "torchtitan"], "--tp N"),
        (["--cp-comm", "ring"], "--cp N"),
        (["--ep-plan", "alltoall"], "--ep N"),
        (["--micro-batches", "2"], "--pp N"),
        (["--gpus", "2", "--pp", "2", "--virtual-stages", "2"], "interleaved"),
        (["--gpus", "2", "--strategy", "ddp", "--reshard-after-forward", "false"], "FSDP"),
        (["--gpus", "2", "--strategy", "fsdp2", "--reduce-dtype", "bf16"], "--bf16"),
        (["--gpus", "2", "--strategy", "fsdp2", "--use-orig-params"], "FSDP1"),
        (["--gpus", "2", "--strategy", "zero2", "--bucket-cap-mb", "1"], "DDP"),
        (["--gpus", "2", "--strategy", "ddp", "--use-distributed-optimizer"], "--strategy megatron"),
        (["--gpus", "2", "--strategy", "megatron", "--overlap-grad-reduce"], "optimizer"),
        (["--gpus", "2", "--strategy", "fsdp2", "--record-streams"], "--strategy fsdp or zero3"),
        (["--gpus", "2", "--tp", "2", "--record-streams"], "--as-torch 2.7"),
        (["--gpus", "2", "--strategy", "fsdp", "--gpu", "cpu", "--record-streams"], "CUDA allocator"),
        (["--deepspeed", "no-such.json"], "zero3"),
        (["--offload", "all"], "shard"),
        (["--hybrid-shard", "2"], "FSDP"),
        (["--top", "3"], "--explain"),
        (["--reshard-after-forward", "abc"], "true, false or a number"),
        (["-s", "99999999999999999999"], "lower -b or -s"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    config: str, args: list[str], said: str
) -> None:
    assert said in refused("estimate", config, *args)


def test_what_asks_for_nothing_may_be_said() -> None:
    spec = make_spec(model="m", offload="none", hybrid_shard=0, packed_documents=1)
    refuse_unused(spec, ("offload", "hybrid_shard", "packed_documents"))


def test_an_option_of_one_strategy_that_is_tried_is_enough() -> None:
    spec = make_spec(model="m", gpus=2, strategy="fsdp2", bucket_cap_mb=1.0)
    refuse_unused(spec, ["bucket_cap_mb"], ("fsdp2", "ddp"))
    with pytest.raises(LlmemError, match="is of DDP"):
        refuse_unused(spec, ["bucket_cap_mb"], ("fsdp2", "zero3"))


def test_a_config_file_names_what_it_sets_in_vain(config: str, tmp_path: Path) -> None:
    train = tmp_path / "train.yaml"
    train.write_text("finetuning_type: full\nlora_rank: 4\n")
    result = CliRunner().invoke(
        main, ["estimate", config, "-b", "1", "-s", "8", "--config", str(train), "--json", "-"]
    )
    assert result.exit_code == 0, result.stderr
    assert "lora_r 4: not used, it is of adapters" in json.loads(result.stdout)["assumptions"]
    assert not list(notes_on_unused(make_spec(model="m", method="lora", lora_r=4)))


def test_the_allocator_and_torch_that_are_assumed_are_named(config: str) -> None:
    found = llmem.estimate(
        model=config, per_device_train_batch_size=1, seq_length=8, as_torch="2.6", padding=True,
        alloc_conf="expandable_segments:True",
    )  # fmt: skip
    assert "allocator: PYTORCH_ALLOC_CONF expandable_segments:True" in found.assumptions
    assert "as torch 2.6: its kernels' scratch and choices" in found.assumptions
    assert "batch: 1 x 8 tokens, padded to that length" in found.assumptions


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attn_implementation: [1]", "wrong kind"),
        ("lora_target: 5\nfinetuning_type: lora", "wrong kind"),
        ("fsdp: full_shard\nfsdp_config: [1]", "wrong kind"),
        ("fsdp: full_shard\nfsdp_config: {min_num_params: x, auto_wrap_policy: SIZE_BASED_WRAP}", "kind"),
        ("bf16: maybe", "true or false"),
        ("distributed_type: MULTI_GPU\nparallelism_config: 5", "wrong kind"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 9}", "use 1 or 2"),
    ],
)
def test_a_config_file_with_a_value_of_a_wrong_kind(
    config: str, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    assert said in refused("estimate", config, "--config", str(path))


def test_context_parallelism_of_accelerate_shards_each_copy_too(tmp_path: Path) -> None:
    from llmem.interop.config_files import read_config

    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config:\n"
        "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_cp_size: 2\n"
    )
    fields = read_config(path).fields
    assert (fields["dp_replicate_size"], fields["cp"], fields["hybrid_shard"]) == (2, 2, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "abc"}, "expected int"),
        ({"hidden_size": 10**12}, "cannot be built"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "pixel_values"),
    ],
)
def test_a_model_that_cannot_be_built_or_trained_on_tokens(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    assert said in refused("estimate", str(path), "-b", "1", "-s", "8")


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("bert", ["--method", "prompt_tuning"], "BertForMaskedLM is none"),
        ("bert", ["--gpus", "2", "--strategy", "ddp", "--cp", "2"], "causal"),
        ("gpt2", ["--attn-implementation", "flash_attention_2"], "--param-dtype bf16"),
        ("llama", ["--attn-implementation", "flash_attention_2"], "--param-dtype bf16"),
        ("mixtral", ["--method", "lora"], "--lora-target-modules"),
    ],
)
def test_what_a_class_of_models_does_not_know(
    tmp_path: Path, kind: str, args: list[str], said: str
) -> None:
    shapes: dict[str, dict[str, object]] = {
        "bert": {**TINY, "architectures": ["BertForMaskedLM"]},
        "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "architectures": ["GPT2LMHeadModel"]},
        "llama": TINY,
        "mixtral": {**TINY, "architectures": ["MixtralForCausalLM"], "num_local_experts": 2},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**shapes[kind], "model_type": kind}))
    assert said in refused("estimate", str(path), "-b", "1", "-s", "8", *args)


def test_a_record_without_its_spec(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"schema": "llmem.record/1"}')
    assert "no ranks and no spec" in refused("validate", str(path))


@pytest.mark.parametrize("name", ["x" * 300, "~no-such-user/model"])
def test_a_name_that_is_no_path(name: str) -> None:
    assert "no path" in refused("estimate", name)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gpu", "t4", "--algorithm", "llmem", "-b", "3"], "leave -b out"),
        (["--gpu", "t4", "--strategy", "ddp", "--strategies", "fsdp2"], "exclude"),
        (["--gpu", "t4", "--strategies", "fsdp3"], "no strategy 'fsdp3'"),
        (["--gpu", "t4", "--by", "trace"], "--algorithm llmem"),
        (["--gpu", "t4", "--algorithm", "llmem", "--gpus", "2", "--tp", "2"], "leave --tp out"),
        (["--gpu", "cpu"], "--gpu NAME"),
    ],
)
def test_a_plan_that_makes_no_sense(config: str, args: list[str], said: str) -> None:
    assert said in refused("plan", config, *args)


def test_a_plan_tries_the_strategy_given_and_says_what_was_assumed() -> None:
    result = CliRunner().invoke(
        main, ["plan", "gpt2", "-b", "3", "-s", "1024", "--gpus", "2", "--gpu", "t4", "--strategy",
               "megatron", "--json", "-"],
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [option["strategy"] for option in document["options"]] == ["megatron"]
    assert any("Megatron" in note or "megatron" in note for note in document["assumptions"])
    assert any("batch size 3 as given is not used" in note for note in document["assumptions"])


def test_a_plan_of_a_pipeline_grows_by_whole_micro_batches() -> None:
    spec = make_spec(
        model="gpt2", seq_length=1024, gpus=2, pp=2, micro_batches=3, strategy="none", gpu="t4"
    )
    pick = llmem.plan(spec, strategies=["none"]).pick
    assert pick is not None
    assert pick.batch > 0
    assert pick.batch % 3 == 0
    for batch, fits in ((pick.batch, True), (pick.batch + 3, False)):
        found = llmem.estimate(spec.model_copy(update={"per_device_train_batch_size": batch})).fit
        assert found is not None
        assert found.fits is fits


def test_a_strategy_that_refuses_a_run_does_not_end_the_plan() -> None:
    spec = make_spec(
        model="gpt2", seq_length=1024, gpus=2, strategy="ddp", gpu="t4", method="lora"
    )
    result = llmem.plan(spec, strategies=["gemini", "ddp"])
    gemini, ddp = result.options
    assert gemini.batch == 0
    assert "trains all parameters" in gemini.sentence
    assert result.pick is ddp
    with pytest.raises(LlmemError, match="trains all parameters"):
        llmem.plan(spec, strategies=["gemini"])
