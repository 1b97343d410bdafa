"""LLMem's Algorithm 1 as a plan: the largest batch of each of its four methods, and its pick.

``by="paper"`` asks the paper's equations, against what nvidia-smi calls the card's total. By
``"trace"`` each method is the nearest that this program models, and the allocator decides: CDP is
Gemini with whole chunks on every GPU, ADP is Gemini's sharded chunks (LLMem's own engine), TP is
Colossal-AI's 1-D tensor parallelism under it, DP+TP the same in pairs. A method that cannot be traced
has a reason and no batch. If nothing fits, the pick is to offload to the CPU: by trace that is ZeRO-3
with everything offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llmem.baselines.algorithm1 import CPU_OFFLOAD, MAX_BATCH, METHODS, Decision, algorithm1
from llmem.errors import LlmemError
from llmem.gpu.devices import DeviceProfile, get_device
from llmem.spec import RunSpec

By = Literal["paper", "trace"]
HYBRID_TP = 2
"""The tensor-parallel degree of DP+TP in the paper's runs (2DP+2TP)."""
FREE_GROWTH = 1 << 62


@dataclass(frozen=True)
class MethodPlan:
    """A method's largest batch per replica (0: none fits), its score, and bytes per GPU there."""

    method: str
    batch: int
    score: float
    device_bytes: int | None
    why_not: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class LlmemPlan:
    """The four methods in the paper's order and the pick, a method or ``CPU offload``.

    ``offload`` is the largest batch and bytes of ZeRO-3 with everything offloaded, by trace only.
    """

    spec: RunSpec
    by: By
    capacity: int
    methods: list[MethodPlan]
    pick: str
    offload: MethodPlan | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "llmem.plan/1",
            "algorithm": "llmem",
            "by": self.by,
            "capacity": self.capacity,
            "methods": [method.to_json() for method in self.methods],
            "pick": self.pick,
            "offload": None if self.offload is None else self.offload.to_json(),
        }


def plan_llmem(spec: RunSpec, *, by: By = "paper", base_bytes: int | None = None) -> LlmemPlan:
    """Algorithm 1 for ``spec`` on its ``gpus`` GPUs of kind ``gpu``.

    Gradient checkpointing is always on, as in the paper. ``base_bytes`` is a measured m_base for
    the equations (None: modelled). Raises LlmemError without a GPU, or where the equations do not
    cover the model.
    """
    if spec.gpu is None:
        raise LlmemError("plan needs to know the card: add --gpu NAME (see `llmem gpus`)")
    device = get_device(spec.gpu)
    spec = spec.model_copy(update={"gradient_checkpointing": True, "tp": 1})
    if by == "paper":
        return _by_paper(spec, device, base_bytes)
    return _by_trace(spec, device)


def _by_paper(spec: RunSpec, device: DeviceProfile, base_bytes: int | None) -> LlmemPlan:
    from llmem.baselines.llmem_paper import peaks
    from llmem.compare import baseline_input

    try:
        peak = peaks(baseline_input(spec, base_bytes))
    except ValueError as error:
        raise LlmemError(f"the paper's equations do not apply: {error}; use --by trace") from None
    capacity = device.smi_total or device.capacity
    decision = algorithm1(peak, capacity, spec.gpus, tp=HYBRID_TP)
    methods = [
        MethodPlan(s.method, s.batch, s.score, peak(s.method, s.batch) if s.batch else None)
        for s in decision.scores
    ]
    return LlmemPlan(spec, "paper", capacity, methods, decision.pick)


def _by_trace(spec: RunSpec, device: DeviceProfile) -> LlmemPlan:
    search = _Traced(spec, device)
    decision: Decision = algorithm1(search.peak, device.capacity, spec.gpus, tp=HYBRID_TP)
    methods = [
        MethodPlan(
            s.method, s.batch, s.score,
            search.peak(s.method, s.batch) if s.batch else None, search.reasons.get(s.method),
        )
        for s in decision.scores
    ]  # fmt: skip
    offload = None
    if decision.pick == CPU_OFFLOAD:
        from llmem.largest import largest_batch

        batch = largest_batch(
            lambda b: search.peak(CPU_OFFLOAD, b) <= device.capacity, limit=MAX_BATCH
        ).batch
        used = search.peak(CPU_OFFLOAD, batch) if batch else None
        offload = MethodPlan(
            CPU_OFFLOAD, batch, float(batch * spec.gpus), used, search.reasons.get(CPU_OFFLOAD)
        )
    return LlmemPlan(spec, "trace", device.capacity, methods, decision.pick, offload)


def spec_of(method: str, spec: RunSpec) -> RunSpec:
    """The run that stands for ``method``: mixed precision in fp16 unless bf16 is asked for."""
    mixed: dict[str, Any] = {} if spec.bf16 else {"fp16": True, "param_dtype": "fp32"}
    fields: dict[str, dict[str, Any]] = {
        "CDP": {"strategy": "gemini", "gpus": 1},
        "ADP": {"strategy": "gemini"},
        "TP": {"strategy": "gemini", "tp": spec.gpus, "tp_plan": "colossal"},
        "DP+TP": {"strategy": "gemini", "tp": HYBRID_TP, "tp_plan": "colossal"},
        CPU_OFFLOAD: {"strategy": "zero3", "offload": "all", **mixed},
    }
    return spec.model_copy(update=fields[method])


class _Traced:
    """Bytes on the device by method and batch; above the capacity where the step does not fit."""

    def __init__(self, spec: RunSpec, device: DeviceProfile) -> None:
        self._spec, self._device = spec, device
        self._sources: dict[Any, Any] = {}
        self._known: dict[tuple[str, int], int] = {}
        self.reasons: dict[str, str] = {}

    def peak(self, method: str, batch: int) -> int:
        if method in self.reasons:
            return FREE_GROWTH
        key = method, batch
        if key not in self._known:
            try:
                self._known[key] = self._used(method, batch)
            except LlmemError as error:
                self.reasons[method] = str(error)
                return FREE_GROWTH
        return self._known[key]

    def _used(self, method: str, batch: int) -> int:
        from llmem.estimate import outside_allocator
        from llmem.gpu.alloc_conf import AllocConf
        from llmem.parallel import ranks_of
        from llmem.timeline import replay

        trial = spec_of(method, self._spec).model_copy(
            update={"per_device_train_batch_size": batch}
        )
        # Context and communicators are those of all GPUs, whatever the method shards.
        outside = sum(outside_allocator(self._device, self._spec).values())
        room = self._device.capacity - outside
        used = 0
        for table in ranks_of(self._source(trial)(batch), trial):
            conf = AllocConf.parse(trial.alloc_conf)
            timeline = replay(table.lifetimes, conf=conf, capacity=room)
            if timeline.oom is not None:
                return FREE_GROWTH
            used = max(used, int(timeline.reserved.max()))
        return used + outside

    def _source(self, trial: RunSpec) -> Callable[[int], Any]:
        from llmem.parallel import compute_dtype
        from llmem.plan import Source

        dtype = compute_dtype(trial)
        key = (dtype, trial.fp16, trial.bf16, trial.param_dtype, trial.tp)
        if key not in self._sources:
            self._sources[key] = Source(trial, dtype)
        found: Callable[[int], Any] = self._sources[key].at
        return found


__all__ = ["METHODS", "LlmemPlan", "MethodPlan", "plan_llmem", "spec_of"]
