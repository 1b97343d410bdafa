"""Autocast on meta: its op lists against torch's own kernels, casts and their lifetimes by hand."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import llmem
from experiments.real_cpu.models import MODELS
from llmem.errors import LlmemError
from llmem.lifetimes import NEVER, Phase, Trace
from llmem.spec import make_spec
from llmem.timeline import replay
from llmem.trace.autocast import autocast_for, autocast_on_meta
from llmem.trace.autocast_lists import Policy, policy_of
from llmem.trace.mixed_precision import to_fp32
from llmem.trace.run import trace_spec

FP32, BF16 = torch.float32, torch.bfloat16
COPY = torch.ops.aten._to_copy.default


# -- the lists, asked of the kernels themselves ----------------------------------------------------


class _Reached(Exception):
    """An op got past autocast."""


class _Probe(Tensor):
    """Looks like a tensor of a device, so that torch's autocast kernels cast it; holds nothing."""

    seen: ClassVar[list[tuple[Any, Any]]] = []

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        dtype = (kwargs or {}).get("dtype")
        cls.seen.append((func, dtype))
        if func is COPY:
            return _probe(dtype, args[0].device)
        raise _Reached


def _probe(dtype: torch.dtype, device: Any) -> Tensor:
    return Tensor._make_wrapper_subclass(_Probe, (4, 4), dtype=dtype, device=device)  # type: ignore[attr-defined,no-any-return]


def _argument(kind: str, dtypes: Iterator[torch.dtype], device: str) -> Any:
    """Something of an argument's type; what the op thinks of it comes too late to matter."""
    if kind in ("Tensor", "Optional[Tensor]"):
        return _probe(next(dtypes), device)
    if "Tensor" in kind:
        return [_probe(next(dtypes), device) for _ in range(2)]
    if kind in ("int", "SymInt", "Scalar", "number"):
        return 1
    known = {"float": 0.5, "bool": False, "str": "ij,jk"}
    if kind in known:
        return known[kind]
    if kind.startswith(("List[int", "List[SymInt")):
        return [0]
    return [True, True, True] if kind.startswith("List[bool") else None


def _casts_of(name: str, device: str, dtypes: Sequence[torch.dtype]) -> list[tuple[Any, Any]]:
    """(op, dtype) that torch's autocast kernel of an op calls for arguments of ``dtypes``."""
    base, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, base), overload or "default")
    cycle, place = itertools.cycle(dtypes), f"{device}:0"
    arguments = {
        a.name: _argument(str(a.type), cycle, place)
        for a in func._schema.arguments
        if not a.has_default_value() or "Tensor" in str(a.type)
    }
    _Probe.seen = []
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, BF16)
    try:
        func(**arguments)
    except (_Reached, RuntimeError, ValueError, IndexError, NotImplementedError):
        pass  # what the op itself thinks of its arguments
    finally:
        torch.set_autocast_enabled(device, False)
    return list(_Probe.seen)


def _policy_seen(name: str, device: str) -> Policy | None:
    def casts(*dtypes: torch.dtype) -> list[Any]:
        return [dtype for func, dtype in _casts_of(name, device, dtypes) if func is COPY]

    def told(*dtypes: torch.dtype) -> list[Any]:
        seen = _casts_of(name, device, dtypes)
        return [dtype for func, dtype in seen if func is not COPY and dtype is not None]

    if casts(FP32)[:1] == [BF16]:
        return Policy.LOWER
    if casts(BF16)[:1] == [FP32]:
        return Policy.FP32
    if casts(BF16, FP32)[:1] == [FP32]:
        return Policy.PROMOTE
    return Policy.FP32_RESULT if told(BF16)[:1] == [FP32] else None


UNSEEN = {
    "binary_cross_entropy": "raises on CUDA, which has a test of its own",
    "linalg_matrix_norm": "refuses bf16 before it computes",
}
"""Ops whose kernel the probe cannot read."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_lists_are_those_of_torchs_own_kernels(device: str) -> None:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")  # type: ignore[attr-defined]
    assert len(names) > 100
    wrong = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these ops are deprecated
        for name in (n.removeprefix("aten::") for n in names if n.startswith("aten::")):
            if name in UNSEEN:
                continue
            ours, seen = policy_of(name, device), _policy_seen(name, device)
            # softmax with a dtype casts by itself; norm with one calls linalg_vector_norm with it.
            same = {(Policy.FP32_RESULT, Policy.FP32), (Policy.FP32_NORM, Policy.FP32_RESULT)}
            if seen is not ours and (ours, seen) not in same:
                wrong[name] = (ours, seen)
    assert wrong == {}


# -- what is cast ----------------------------------------------------------------------------------


class _Ops(TorchDispatchMode):
    """Names of the ops that ran and the dtype of their first output."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        self.ran.append((func.overloadpacket.__name__, getattr(first, "dtype", None)))
        return out


def ran(code: Callable[[], Any], dtype: str = "bfloat16") -> list[tuple[str, torch.dtype | None]]:
    """What runs under autocast, without views."""
    views = {"view", "t", "permute", "unsqueeze", "expand", "transpose", "_unsafe_view", "detach"}
    with autocast_for("cuda"), _Ops() as ops, autocast_on_meta(dtype):
        code()
    return [item for item in ops.ran if item[0] not in views]


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_matrix_product_inside_a_composite_op_is_cast() -> None:
    x, w = meta(2, 3, 4), meta(5, 4)
    cast = ("_to_copy", BF16)
    assert ran(lambda: torch.einsum("bti,oi->bto", x, w)) == [cast, cast, ("bmm", BF16)]
    assert ran(lambda: x @ w.t()) == [cast, cast, ("mm", BF16)]
    assert ran(lambda: torch.nn.functional.linear(x, w)) == [cast, cast, ("mm", BF16)]


def test_each_policy() -> None:
    half, full = meta(4, 4, dtype=BF16), meta(4, 4)
    to_full, to_half = ("_to_copy", FP32), ("_to_copy", BF16)
    assert ran(lambda: full.mm(full), "float16") == [("_to_copy", torch.float16)] * 2 + [
        ("mm", torch.float16)
    ]
    assert ran(lambda: half.exp()) == [to_full, ("exp", FP32)]
    assert ran(lambda: half.pow(2)) == [to_full, ("pow", FP32)]
    assert ran(lambda: half.sum()) == [("sum", FP32)]
    assert ran(lambda: half.sum(dtype=BF16)) == [("sum", BF16)]
    assert ran(lambda: half.norm()) == [("linalg_vector_norm", FP32)]
    assert ran(lambda: torch.addcmul(full, half, half)) == [to_full] * 2 + [("addcmul", FP32)]
    assert ran(lambda: torch.addcmul(half, half, half)) == [("addcmul", BF16)]
    assert ran(lambda: half * half) == [("mul", BF16)]
    assert ran(lambda: half.mm(full)) == [to_half, ("mm", BF16)]
    with pytest.raises(RuntimeError, match="binary_cross_entropy"):
        ran(lambda: torch.nn.functional.binary_cross_entropy(full, full))


def test_ineligible_tensors_stay_as_they_are() -> None:
    double, host = meta(4, 4, dtype=torch.float64), torch.zeros(4, 4)
    assert ran(lambda: double.mm(double)) == [("mm", torch.float64)]
    assert ran(lambda: host.mm(host)) == [("mm", FP32)]
    assert ran(lambda: double.sum()) == [("sum", torch.float64)]
    assert ran(lambda: meta(4, 4, dtype=torch.int64).sum()) == [
        ("empty", torch.int64), ("sum", torch.int64),
    ]  # fmt: skip


def test_regions_nest_and_the_device_may_be_called_meta_or_cuda() -> None:
    x = meta(4, 4)

    def code() -> None:
        with torch.autocast("meta", enabled=False):
            assert not torch.is_autocast_enabled("meta")
            x.mm(x)
            with torch.autocast("cuda", dtype=torch.float16):
                assert torch.get_autocast_dtype("meta") == torch.float16
                x.mm(x)
        assert torch.is_autocast_enabled("cuda")

    half = torch.float16
    assert ran(code) == [("mm", FP32), ("_to_copy", half), ("_to_copy", half), ("mm", half)]


def test_nothing_is_left_behind() -> None:
    def replaced() -> tuple[Any, ...]:
        return torch.autocast.__init__, torch.is_autocast_enabled, torch.clear_autocast_cache

    before = replaced()
    x = meta(4, 4)
    with autocast_for("cuda"), autocast_on_meta("bfloat16"):
        assert x.mm(x).dtype == BF16
    assert before == replaced()
    assert x.mm(x).dtype == FP32
    with pytest.raises(RuntimeError, match="meta"):
        autocast_on_meta("bfloat16")
    with torch.autocast("cpu", dtype=BF16):
        assert torch.zeros(4, 4).mm(torch.zeros(4, 4)).dtype == BF16


def test_transformers_switches_autocast_off_on_meta_too() -> None:
    from transformers.utils.generic import maybe_autocast

    x = meta(4, 4)

    def code() -> None:
        with maybe_autocast(device_type="meta", enabled=False):
            x.mm(x)

    assert ran(code) == [("mm", FP32)]


def test_custom_functions() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.mm(x)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            assert not torch.is_autocast_enabled("cuda")
            return grad

    x = meta(4, 4).requires_grad_()
    half = torch.float16
    with autocast_for("cuda"):
        assert Product.apply(x).dtype == FP32  # type: ignore[no-untyped-call]
    assert ran(lambda: Product.apply(x)) == [("_to_copy", half), ("mm", half)]  # type: ignore[no-untyped-call]


# -- how long casts live ---------------------------------------------------------------------------


def trace_of(step: Callable[[], Any], model: nn.Module) -> Trace:
    return llmem.trace(step, model=model, steps=1)  # type: ignore[operator,no-any-return]


def casts(trace: Trace, nbytes: int) -> list[tuple[str, str, str]]:
    """(phase of birth, op during which it dies, phase of death) of each cast of so many bytes."""
    found = []
    table = trace.lifetimes
    for row in range(len(table)):
        birth, death = int(table.birth_op[row]), int(table.death_op[row])
        if trace.op_name(birth) == "_to_copy" and table.nbytes[row] == nbytes:
            assert table.death[row] != NEVER
            phases = [Phase(int(trace.ops.phase[op])).label for op in (birth, death)]
            found.append((phases[0], trace.op_name(death), phases[1]))
    return found


class Twice(nn.Module):
    """x W^T W^T and a product with a frozen matrix; in bf16 they have 128 and 320 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
        self.frozen = nn.Parameter(torch.empty(8, 20, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(torch.nn.functional.linear(x, self.weight), self.weight)
        return y.mm(self.frozen)


def test_a_weights_cast_is_made_once_and_lives_until_backward_has_used_it() -> None:
    model, x = Twice(), meta(3, 8)

    def step() -> None:
        with autocast_on_meta("bfloat16"):
            loss = model(x).sum()
        loss.backward()

    trace = trace_of(step, model)
    # One cast for both uses. The first needs no weight in backward (x wants no gradient), the
    # second does, for the gradient of its input; then nothing holds the cast any more.
    assert casts(trace, 128) == [("forward", "mm", "backward")]
    # A frozen weight's cast is not cached; backward holds it for the gradient of its input.
    assert casts(trace, 320) == [("forward", "mm", "backward")]


def test_without_a_graph_the_cast_lives_until_the_outermost_region_ends() -> None:
    model, x = Twice(), meta(3, 8)

    def step() -> None:
        with torch.no_grad(), autocast_on_meta("bfloat16"):
            with autocast_on_meta("bfloat16"):
                model(x)
            x.cos()
        x.sin()

    # One cast for both uses, freed after cos (the region's last op) and before sin.
    assert casts(trace_of(step, model), 128) == [("forward", "cos", "forward")]


def test_the_cache_can_be_off_and_inference_mode_has_none() -> None:
    model, x = Twice(), meta(3, 8)

    def uncached() -> None:
        with torch.no_grad(), torch.autocast("meta", dtype=BF16, cache_enabled=False):
            model(x)

    def inference() -> None:
        with torch.inference_mode(), autocast_on_meta("bfloat16"):
            model(x)

    for step in (uncached, inference):
        assert casts(trace_of(step, model), 128) == [("forward", "mm", "forward")] * 2


def test_recomputation_casts_again_in_a_region_of_its_own() -> None:
    model, x = Twice(), meta(3, 8).requires_grad_()

    def step() -> None:
        with autocast_on_meta("bfloat16"):
            out = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
            loss = out.sum()
        loss.backward()

    made = [birth for birth, _, _ in casts(trace_of(step, model), 128)]
    # One in forward, gone when the region ends; one when forward runs again in backward.
    assert made == ["forward", "backward"]


# -- against real runs -----------------------------------------------------------------------------


def moves(trace: Trace) -> list[int]:
    curve = replay(trace.lifetimes, exact=True)
    return [int(n) for n in curve.events.sign * curve.lifetimes.nbytes[curve.events.row]]


def tiny(name: str, **fields: Any) -> Any:
    return make_spec(
        model=_folder(name), param_dtype="fp32", bf16=True, gpu="cpu",
        per_device_train_batch_size=3, seq_length=23, **fields,
    )  # fmt: skip


def _folder(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in MODELS[name].items() if k != "architectures"})
    return lambda: AutoModelForCausalLM.from_config(config, dtype=FP32)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_birth_and_death_of_a_real_autocast_step(name: str) -> None:
    """The real step runs torch's own autocast on CPU tensors."""
    spec = tiny(name, optim="sgd")
    assert moves(trace_spec(spec, device="meta")) == moves(trace_spec(spec, device="cpu"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_peak_of_a_real_checkpointed_autocast_step(name: str) -> None:
    """Births and deaths are the same ones; a cache gives its casts back in no fixed order."""
    spec = tiny(name, gradient_checkpointing=True)
    traces = [trace_spec(spec, device=device) for device in ("meta", "cpu")]
    assert sorted(moves(traces[0])) == sorted(moves(traces[1]))
    peaks = {int(replay(t.lifetimes, exact=True).requested.max()) for t in traces}
    assert len(peaks) == 1


# -- the Trainer's side ----------------------------------------------------------------------------


def test_outputs_become_fp32() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    half = meta(2, 2, dtype=BF16)
    out = to_fp32(CausalLMOutputWithPast(logits=half, past_key_values=None, hidden_states=(half,)))
    assert isinstance(out, CausalLMOutputWithPast)
    assert out.logits.dtype == FP32 and out.hidden_states[0].dtype == FP32
    ids = meta(2, dtype=torch.int64)
    assert to_fp32([ids, (half, 3)])[0] is ids
    assert to_fp32({"a": half})["a"].dtype == FP32


def test_fp16_scales_the_loss_and_unscales_gradients() -> None:
    spec = make_spec(
        model=_folder("llama"), fp16=True, per_device_train_batch_size=1, seq_length=8, steps=2
    )
    trace = trace_spec(spec)
    names = [trace.op_name(op) for op in range(len(trace.ops))]
    assert names.count("_amp_foreach_non_finite_check_and_unscale_") == 2
    assert names.count("_amp_update_scale_") == 2
    assert any("mixed precision" in note for note in trace.assumptions)


def test_what_a_real_run_refuses() -> None:
    common: dict[str, Any] = {"model": "opt-125m", "fp16": True, "seq_length": 8}
    with pytest.raises(LlmemError, match="unscale"):
        trace_spec(make_spec(param_dtype="fp16", **common))
    with pytest.raises(LlmemError, match="GPU"):
        trace_spec(make_spec(param_dtype="fp32", gpu="cpu", **common))
