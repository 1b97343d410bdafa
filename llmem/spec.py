"""What is trained, how, and on what: one validated object.

Field names follow ``transformers.TrainingArguments`` (and peft's ``LoraConfig``) where one exists.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.interop.peft_config import with_method
from llmem.optim_names import OPTIMIZERS, unknown_optimizer

Strategy = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp2", "gemini", "megatron"]
Attention = Literal["eager", "sdpa", "flash_attention_2"]
DType = Literal["fp32", "bf16", "fp16"]
CheckpointPolicy = Literal["full", "op"]
Loss = Literal["full", "chunked", "liger"]
Kernels = Literal["model", "foak", "foak-liger"]
Quantization = Literal["none", "int8", "nf4", "fp4"]
CompileScope = Literal["model", "blocks", "regions"]
TPPlan = Literal["transformers", "torchtitan", "colossal", "megatron"]
CPComm = Literal["allgather", "ring", "ulysses"]
EPPlan = Literal["transformers", "alltoall"]
FSDPUnits = Literal["blocks", "accelerate"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]
Task = Literal["train", "generate"]
CacheImplementation = Literal["dynamic", "static"]
ZeroGrad = Literal["before_forward", "before_backward", "after_step"]

MOST_TOKENS = 2**31 - 1
"""Of a micro-batch on one GPU: what an int32 counts, as kernels do; far from any real batch."""


class RunSpec(BaseModel):
    """One fine-tuning run. Raises LlmemError (one sentence) if it makes no sense."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: Any = Field(description="preset, Hub id, folder, config.json, or an nn.Module")
    per_device_train_batch_size: int = Field(8, ge=1, description="sequences per GPU")
    seq_length: int = Field(512, ge=1, description="tokens per sequence")
    gradient_accumulation_steps: int = Field(1, ge=1)
    method: str = Field(
        "full", description="full, qlora, or the name of a peft.PeftType in lower case"
    )
    param_dtype: DType | None = Field(None, description="dtype of loading; None: the config's own")
    bf16: bool = Field(False, description="bf16 mixed precision")
    fp16: bool = Field(False, description="fp16 mixed precision")
    optim: str = Field("adamw_torch_fused", description="name of TrainingArguments.optim")
    max_grad_norm: float = Field(1.0, ge=0.0, description="clip to this norm; 0: no clipping")
    optimizer_in_backward: bool = Field(
        False, description="each parameter is updated, its gradient freed, during backward"
    )
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(1, ge=1, description="checkpoint every n-th layer alone")
    checkpoint_policy: CheckpointPolicy = Field(
        "full", description="op: outputs of attention and of every second matmul are kept"
    )
    use_reentrant: bool | None = Field(
        None, description="of torch.utils.checkpoint; None: as that version of transformers"
    )
    activation_offload: bool = Field(
        False, description="inputs of checkpointed layers wait in pinned host memory"
    )
    attn_implementation: Attention | None = None
    sdpa_backend: Literal["flash", "efficient", "cudnn", "math"] | None = None
    loss: Loss = "full"
    liger: bool = Field(False, description="Liger's kernels in place of the model's own layers")
    kernels: Kernels = Field(
        "model", description="the model's own layers, or fms-acceleration's fused ops and kernels"
    )

    task: Task = "train"
    max_new_tokens: int = Field(64, ge=1, description="of generate, after seq_length tokens")
    num_beams: int = Field(1, ge=1, description="of generate; 1: greedy search")
    cache_implementation: CacheImplementation | None = Field(
        None, description="of generate; sliding windows are the config's own; None: dynamic"
    )
    packed: bool = Field(False, description="sequences flattened to one row, without padding")
    packed_documents: int = Field(1, ge=1, description="documents in each packed sequence")

    # habits of the training loop
    padding: bool = Field(False, description="batches hold padding: attention masks have zeros")
    use_cache: bool = Field(False, description="forward returns past_key_values")
    hold_outputs: bool = Field(
        False, description="outputs and loss of a step live until the next forward replaces them"
    )
    compile: bool = Field(False, description="torch.compile (TrainingArguments.torch_compile)")
    compile_scope: CompileScope = Field("model", description="what is compiled as one")
    zero_grad: ZeroGrad = Field(
        "before_forward", description="when old gradients are dropped, in the loop's own order"
    )
    steps: int = Field(2, ge=1, description="optimizer steps to trace")
    as_torch: str | None = Field(
        None, description="torch version whose kernels' scratch is assumed; None: the installed one"
    )
    as_transformers: str | None = Field(
        None, description="transformers version whose habits are assumed; None: the installed one"
    )

    lora_r: int = Field(8, ge=1)
    lora_alpha: int = Field(16, ge=1)
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    lora_target_modules: str | tuple[str, ...] | None = Field(
        None, description="names, 'all-linear', or None for peft's default of the model"
    )
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: Literal["none", "all", "lora_only"] = Field("none", description="peft's bias")
    modules_to_save: tuple[str, ...] | None = None
    num_virtual_tokens: int | None = Field(None, ge=1, description="of prompt methods")
    peft_config: Any = Field(
        None, description="adapter_config.json: its path, its folder, or what it holds"
    )
    autocast_adapter_dtype: bool = Field(
        True, description="peft's argument: adapters of 16-bit models are fp32 (always off < 0.12)"
    )

    as_peft: str | None = Field(
        None, description="peft version whose habits are assumed; None: the installed one"
    )

    # quantised weights, as bitsandbytes has them; --method qlora alone means nf4
    quantization: Quantization = "none"
    double_quant: bool | None = Field(
        None, description="bnb_4bit_use_double_quant; None: on for QLoRA, else off"
    )
    bnb_4bit_compute_dtype: DType | None = Field(
        None, description="None: that of autocast, else that of loading"
    )
    bnb_4bit_quant_storage: Literal["uint8", "fp32", "bf16", "fp16"] = "uint8"
    prepare_kbit: Literal["peft", "trl", "none"] = Field(
        "peft", description="prepare_model_for_kbit_training; trl: and bf16 again where TRL casts"
    )
    as_bitsandbytes: str | None = Field(None, description="version whose habits are assumed")

    gpus: int = Field(1, ge=1, description="processes, one GPU each")
    strategy: Strategy = "none"
    tp: int = Field(1, ge=1)
    tp_plan: TPPlan = Field("transformers", description="which layers are split, and how")
    sp: bool = Field(False, description="norms and residual stream sharded over the sequence")
    loss_parallel: bool = Field(False, description="logits stay sharded over the vocabulary")
    cp: int = Field(1, ge=1, description="ranks that share each sequence, among the data-parallel")
    cp_comm: CPComm = Field("allgather", description="how they see each other's keys and values")
    ep: int = Field(1, ge=1, description="ranks that share a set of experts")
    ep_plan: EPPlan = Field("transformers", description="whether they share a batch, or each its own")
    routing_balance: float = Field(
        1.0, gt=0, le=1, description="an average rank's tokens over those of the busiest, with ep"
    )
    pp: int = Field(1, ge=1)
    pp_schedule: Schedule = Field("1f1b", description="of torch.distributed.pipelining")
    micro_batches: int | None = Field(
        None, ge=1, description="of per_device_train_batch_size; None: as many as pp"
    )
    virtual_stages: int = Field(2, ge=2, description="stages per rank, if interleaved")
    gpu: str | None = Field(None, description="GPU name; 'cpu' assumes CPU kernels")
    alloc_conf: str = ""

    # data parallelism
    bucket_cap_mb: float = Field(25.0, gt=0, description="DDP's bucket_cap_mb")
    gradient_as_bucket_view: bool = False
    reshard_after_forward: bool | int | None = Field(
        None, description="None: true, and false under pp, as torchtitan sets it"
    )
    keep_last_block: bool = Field(
        False, description="FSDP2: the last block stays gathered after forward, as in torchtitan"
    )
    use_orig_params: bool = Field(False, description="FSDP1's argument (accelerate's default)")
    backward_prefetch: Literal["pre", "post", "none"] = Field(
        "pre", description="FSDP1's BackwardPrefetch"
    )
    reduce_dtype: DType = Field(
        "fp32", description="FSDP2's MixedPrecisionPolicy(reduce_dtype=...), with bf16 or fp16"
    )
    deepspeed: Any = Field(None, description="ds_config: a dict or the path of its JSON")
    placement_policy: Literal["cuda", "cpu", "auto"] = Field(
        "cuda", description="Gemini's: where chunks rest"
    )
    zero_init: bool = Field(
        True, description="ZeRO-3: parameters are partitioned while they are loaded"
    )
    offload: Literal["none", "optimizer", "all"] = "none"
    use_distributed_optimizer: bool = Field(
        False, description="Megatron-LM's: masters and optimizer states are divided among ranks"
    )
    overlap_grad_reduce: bool = Field(
        False, description="Megatron-LM's: its buffers are cut in buckets; reductions overlap backward"
    )
    record_streams: bool = Field(
        False, description="blocks whose streams are recorded wait for the GPU (an upper bound)"
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] | None = Field(
        None, description="classes that FSDP wraps; none: the root alone; None: _no_split_modules"
    )
    fsdp_min_num_params: int = Field(0, ge=0, description="FSDP wraps by size; 0: by class")
    fsdp_units: FSDPUnits = Field(
        "blocks", description="FSDP2's units beside the root: blocks, or those that accelerate makes"
    )
    hybrid_shard: int = Field(0, ge=0, description="HSDP: GPUs that share one copy; 0: all")
    dp_replicate_size: int | None = Field(
        None, ge=1, description="HSDP: copies of the parameters; None: as hybrid_shard leaves"
    )

    notes: tuple[str, ...] = Field((), description="where fields came from, for the assumptions")

    @model_validator(mode="before")
    @classmethod
    def _adapters(cls, fields: Any) -> Any:
        return with_method(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 exclude each other; give one of them")
        if self.tokens > MOST_TOKENS:
            raise ValueError(f"{self.tokens:,} tokens per GPU are more than {MOST_TOKENS:,}; lower -b or -s")
        if self.optim not in OPTIMIZERS:
            raise ValueError(unknown_optimizer(self.optim))
        if self.gpus % (self.tp * self.pp):
            raise ValueError(
                f"{self.gpus} GPUs cannot be split into tp {self.tp} x pp {self.pp}; "
                f"make gpus a multiple of {self.tp * self.pp}"
            )
        self._check_replicas()
        self._check_wrapping()
        if self.gpus // (self.tp * self.pp) % self.cp:
            raise ValueError(
                f"--cp {self.cp} does not divide {self.gpus // (self.tp * self.pp)} data-parallel "
                f"GPUs, which share the sequences; make gpus a multiple of {self.cp}"
            )
        if self.gpus % self.ep:
            raise ValueError(
                f"{self.gpus} GPUs cannot be split into groups of ep {self.ep}; make gpus a multiple "
                f"of {self.ep}"
            )
        if self.strategy == "none" and self.gpus // (max(self.tp, self.ep) * self.pp) > 1:
            raise ValueError(
                f"{self.gpus} GPUs need a strategy: add --strategy ddp, zero3, fsdp2 or another"
            )
        return self

    def _check_replicas(self) -> None:
        copies, data = self.dp_replicate_size, self.gpus // (self.tp * self.pp)
        if copies is None or (copies == 1 and not self.hybrid_shard):
            return
        if self.strategy not in ("fsdp", "fsdp2"):
            raise ValueError(
                f"--dp-replicate-size {copies} is HSDP's; use it with --strategy fsdp2 or fsdp"
            )
        if data % copies:
            raise ValueError(
                f"--dp-replicate-size {copies} does not divide {data} data-parallel GPUs; choose a "
                "divisor"
            )
        if self.hybrid_shard and self.hybrid_shard * copies != data:
            raise ValueError(
                f"{copies} copies of {self.hybrid_shard} GPUs each are not {data} data-parallel "
                "GPUs; leave --dp-replicate-size or --dp-shard-size out"
            )

    def _check_wrapping(self) -> None:
        by_class = self.fsdp_transformer_layer_cls_to_wrap is not None
        if (by_class or self.fsdp_min_num_params) and self.strategy not in ("fsdp", "fsdp2"):
            raise ValueError("what FSDP wraps was given; use --strategy fsdp or fsdp2 with it")
        if by_class and self.fsdp_min_num_params:
            raise ValueError(
                "--fsdp-transformer-layer-cls-to-wrap and --fsdp-min-num-params exclude each other; "
                "give one of them"
            )

    @property
    def shard_ranks(self) -> int:
        """Data-parallel ranks that share one copy of the parameters: all, or fewer under HSDP."""
        data = self.gpus // (self.tp * self.pp)
        return self.hybrid_shard or data // (self.dp_replicate_size or 1)

    @property
    def batches(self) -> int:
        """Groups of GPUs with a batch of their own: those of tp, pp, cp and shared ep have one.

        >>> make_spec(model="m", gpus=8, strategy="fsdp2", cp=4).batches
        2
        """
        experts = self.ep if self.ep_plan == "transformers" else 1
        return self.gpus // (max(self.tp, experts) * self.pp * self.cp)

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on one GPU."""
        return self.per_device_train_batch_size * self.seq_length

    @property
    def pipeline_micro_batches(self) -> int:
        """Micro-batches of an optimizer step under ``pp``."""
        return self.micro_batches or self.pp

    @property
    def reshards(self) -> bool | int:
        """``reshard_after_forward``, or what it is where nothing was said.

        torchtitan's policy "default" keeps a pipeline stage gathered between its micro-batches
        (torchtitan/distributed/fsdp.py, ``get_fsdp_reshard_after_forward_policy``).
        """
        said = self.reshard_after_forward
        return self.pp == 1 if said is None else said

    @property
    def autocast_dtype(self) -> str | None:
        """``bfloat16`` or ``float16`` under mixed precision, else None."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else None

    @property
    def autocast_inside_engine(self) -> bool:
        """Whether the forward runs under autocast although the engine casts parameters itself.

        accelerate wraps the forward under FSDP1 as it does on one GPU (``prepare_model``).
        """
        return self.strategy == "fsdp" and self.autocast_dtype is not None


def checkpoints_reentrantly(as_transformers: str | None) -> bool:
    """Whether that version's gradient checkpointing is the reentrant one (None: the installed one's).

    transformers/modeling_utils.py: ``use_reentrant`` is True by default until 4.57, False since 5.0.
    """
    return (as_transformers or installed("transformers")).startswith("4.")


def checkpoints_calls(as_transformers: str | None) -> bool:
    """Whether it is around the calls of layers, outside of what wraps a layer (FSDP1), until 4.52.

    Since ``GradientCheckpointingLayer`` (4.53) the layer does it itself.
    """
    version = as_transformers or installed("transformers")
    if not checkpoints_reentrantly(version):
        return False
    minor = version.split(".")[1]
    return minor.isdecimal() and int(minor) < 53


def make_spec(**fields: Any) -> RunSpec:
    """A RunSpec, or LlmemError with one sentence about the first thing that is wrong."""
    try:
        return RunSpec(**fields)
    except ValidationError as error:
        raise LlmemError(_first_sentence(error)) from None


def _first_sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    if not where:
        return message
    if first["type"] == "extra_forbidden":
        return f"unknown field '{where}'; RunSpec knows {', '.join(RunSpec.model_fields)}"
    return f"{where} = {first['input']!r}: {message[0].lower()}{message[1:]}"
