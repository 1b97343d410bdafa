"""The tables everything else is computed from: ops, storages and who touches what.

A traced step is a table of ops and a table of *lifetimes*: one row per storage, saying how many
bytes it has, when it is born and when it dies. Columns are numpy arrays, so a parallel strategy,
an allocator replay or a breakdown is arithmetic on columns. Nothing here knows about torch.

Time is counted in *ticks*. A tick is one allocation or one free, in program order; ticks are
``TICK`` apart so that a pass can put events of its own between two recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx as nx

TICK = 1 << 20
"""Distance between two recorded events."""

NEVER = np.iinfo(np.int64).max
"""Death of a storage that outlives the trace."""

Ints = NDArray[np.int64]


class Together(NamedTuple):
    """Modules that are one unit of FSDP2 (``fully_shard([a, b])``), in the order of the model.

    ``takes_ids``: the first that runs is the embedding, whose input needs no gradient. ``kept``:
    ``reshard_after_forward=False``, whatever the blocks have.
    """

    modules: tuple[str, ...]
    takes_ids: bool
    kept: bool

    @property
    def name(self) -> str:
        """What torch calls the unit."""
        return ", ".join(self.modules)


class Recorded(NamedTuple):
    """A call of ``Tensor.record_stream``: another stream uses the block, which waits for it when freed.

    ``on_compute``: that stream computes with it, else it communicates or copies. ``by_nccl``: the
    call is ProcessGroupNCCL's own, which torch 2.8 stopped making, not the engine's.
    """

    on_compute: bool = False
    by_nccl: bool = False


class HostWait(NamedTuple):
    """At ``tick`` the CPU waits for the GPU.

    Then all compute kernels launched before the tick ``compute`` are done, and all collectives
    launched before ``communication``.
    """

    tick: int
    compute: int
    communication: int


class Category(IntEnum):
    """What a storage is for."""

    PARAMETER = 0
    BUFFER = 1
    INPUT = 2
    GRADIENT = 3
    OPTIMIZER_STATE = 4
    ACTIVATION = 5
    ACTIVATION_GRADIENT = 6
    LOGITS_AND_LOSS = 7
    COMMUNICATION = 8
    WORKSPACE = 9
    OPTIMIZER_TEMPORARY = 10
    OTHER = 11
    KV_CACHE = 12


BREAKDOWN: dict[str, tuple[Category, ...]] = {
    "parameters": (Category.PARAMETER,),
    "gradients": (Category.GRADIENT,),
    "optimizer_states": (Category.OPTIMIZER_STATE,),
    "activations": (Category.ACTIVATION, Category.ACTIVATION_GRADIENT, Category.KV_CACHE),
    "logits_and_loss": (Category.LOGITS_AND_LOSS,),
    "communication": (Category.COMMUNICATION,),
    "workspace": (Category.WORKSPACE,),
    "other": (Category.BUFFER, Category.INPUT, Category.OPTIMIZER_TEMPORARY, Category.OTHER),
}
"""The names of a breakdown's parts, in the order they are shown, and the categories of each."""


class Phase(IntEnum):
    """Part of a training step, or of a generation."""

    SETUP = 0
    ZERO_GRAD = 1
    FORWARD = 2
    BACKWARD = 3
    CLIP = 4
    OPTIMIZER = 5
    BATCH = 6
    OTHER = 7
    PREFILL = 8
    DECODE = 9

    @property
    def label(self) -> str:
        return self.name.lower()


class Touch(IntEnum):
    """How an op touches a storage."""

    READ = 0
    WRITE = 1


@dataclass(frozen=True)
class Ops:
    """One row per recorded op (views, which touch no memory, are not recorded).

    ``name`` and ``module`` index the trace's string tables, ``tick`` is when the op started,
    ``recompute`` marks forward ops that checkpointing runs again inside backward.
    """

    name: NDArray[np.int32]
    module: NDArray[np.int32]
    phase: NDArray[np.int8]
    step: NDArray[np.int16]
    tick: Ints
    recompute: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.name)


OP_COLUMNS = (np.int32, np.int32, np.int8, np.int16, np.int64, np.bool_)
"""The dtypes of the fields of Ops, in their order."""


@dataclass(frozen=True)
class Lifetimes:
    """One row per storage.

    ``nbytes`` is what was asked for, before any allocator rounds it. ``birth`` and ``death`` are
    ticks (``NEVER`` if it outlives the trace); ``birth_op`` made it, ``death_op`` is the op whose
    completion freed it (-1 where there is none); ``key`` is -1 or names the parameter it belongs
    to (parameters, their gradients and optimizer states).
    """

    nbytes: Ints
    birth: Ints
    death: Ints
    birth_op: Ints
    death_op: Ints
    category: NDArray[np.int8]
    module: NDArray[np.int32]
    stream: NDArray[np.int32]
    key: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.nbytes)

    @staticmethod
    def empty() -> Lifetimes:
        return Lifetimes.build([])

    @staticmethod
    def build(rows: Sequence[dict[str, int]]) -> Lifetimes:
        """A table from one dict per storage; ``nbytes`` and ``birth`` are required.

        >>> len(Lifetimes.build([{"nbytes": 8, "birth": 0, "death": 2}]))
        1
        """
        defaults = {
            "death": int(NEVER),
            "birth_op": -1,
            "death_op": -1,
            "category": int(Category.OTHER),
            "module": 0,
            "stream": 0,
            "key": -1,
        }
        filled = [{**defaults, **row} for row in rows]
        return Lifetimes(
            **{name: np.array([row[name] for row in filled], kind) for name, kind in COLUMNS.items()}
        )

    def take(self, index: Any) -> Lifetimes:
        """The rows that a boolean mask or an index array selects."""
        return Lifetimes(**{name: getattr(self, name)[index] for name in COLUMNS})

    def with_columns(self, **columns: NDArray[Any]) -> Lifetimes:
        return replace(self, **columns)

    def __add__(self, other: Lifetimes) -> Lifetimes:
        return Lifetimes(
            **{
                name: np.concatenate([getattr(self, name), getattr(other, name)])
                for name in COLUMNS
            }
        )

    def alive_at(self, tick: int) -> NDArray[np.bool_]:
        """Which storages are alive just after the event at ``tick``."""
        return (self.birth <= tick) & (self.death > tick)

    def events(self) -> Events:
        """Every birth and death in program order."""
        dies = np.flatnonzero(self.death != NEVER)
        tick = np.concatenate([self.birth, self.death[dies]])
        row = np.concatenate([np.arange(len(self)), dies])
        sign = np.concatenate([np.ones(len(self), np.int8), -np.ones(len(dies), np.int8)])
        # Equal ticks (only passes make them): frees first, as a refcount drops before a new request.
        order = np.lexsort((row, sign, tick))
        return Events(tick[order], row[order], sign[order])


COLUMNS: dict[str, Any] = {
    "nbytes": np.int64,
    "birth": np.int64,
    "death": np.int64,
    "birth_op": np.int64,
    "death_op": np.int64,
    "category": np.int8,
    "module": np.int32,
    "stream": np.int32,
    "key": np.int32,
}


@dataclass(frozen=True)
class Events:
    """Births (+1) and deaths (-1) in order; ``row`` is the lifetime."""

    tick: Ints
    row: Ints
    sign: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.tick)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the traced model: its table key, name, shape and where it lives."""

    key: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool
    row: int
    """Its lifetime; tied names share one."""

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Span:
    """One call of a module: from ``enter`` to ``exit`` (ticks), with the op indices inside."""

    module: int
    step: int
    phase: Phase
    recompute: bool
    enter: int
    exit: int


@dataclass
class Trace:
    """What a recorder saw: ops, lifetimes, touches, module calls, parameters."""

    ops: Ops
    lifetimes: Lifetimes
    names: list[str]
    modules: list[str]
    touch_op: Ints
    touch_row: Ints
    touch_kind: NDArray[np.int8]
    spans: list[Span] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    gradient_ready: dict[tuple[int, int], int] = field(default_factory=dict)
    """(step, parameter key) -> tick at which backward finished accumulating its gradient."""
    step_ticks: list[int] = field(default_factory=list)
    """Tick at which each step starts, and one more for the end."""
    phase_ticks: list[tuple[int, Phase, int]] = field(default_factory=list)
    """(tick, phase, step) at each change of phase."""
    assumptions: list[str] = field(default_factory=list)
    masters: dict[int, str] = field(default_factory=dict)
    """Parameter key -> the dtype in which an engine keeps it between uses."""
    wrapped: list[str] = field(default_factory=list)
    """Names of the blocks that engines shard as one (the model's ``_no_split_modules``)."""
    together: list[Together] = field(default_factory=list)
    """Modules beside them that FSDP2 shards as one."""
    experts: list[str] = field(default_factory=list)
    """Names of the modules of experts of which an expert-parallel rank holds a part."""
    cache_emptied: list[int] = field(default_factory=list)
    """Ticks at which an engine empties the allocator's cache."""
    recorded: dict[int, Recorded] = field(default_factory=dict)
    """Lifetime's row -> what an engine recorded of it."""
    host_waits: list[HostWait] = field(default_factory=list)
    """Where an engine lets the CPU wait for the GPU."""
    sharded: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Parameter key -> (dimension, its whole size) that tensor-parallel ranks cut in chunks."""
    tensor_rank: tuple[int, int] = (0, 1)
    """The rank among those that hold chunks of the same tensors, and their number."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """name, state_elements and state_bytes (host scalars included), after the last step."""
    tracing_seconds: float = 0.0
    fx_builder: Any = None

    def op_name(self, op: int) -> str:
        return self.names[self.ops.name[op]] if op >= 0 else ""

    def module_name(self, module: int) -> str:
        return self.modules[module]

    def phase_at(self, tick: int) -> tuple[Phase, int]:
        """The phase and step that ``tick`` falls in."""
        found = (Phase.SETUP, 0)
        for start, phase, step in self.phase_ticks:
            if start > tick:
                break
            found = (phase, step)
        return found

    def op_at(self, tick: int) -> int:
        """The op running at ``tick``, -1 before the first."""
        return int(np.searchsorted(self.ops.tick, tick, side="right")) - 1

    def graph(self, rows: Iterable[int] | None = None) -> nx.DiGraph:
        """The trace as a graph: ops and storages are nodes, reads and writes are edges.

        Nodes are ``("op", i)`` and ``("storage", j)``; a read is an edge from storage to op, a
        write (a birth included) one from op to storage. Node attributes: ``name``, ``module``,
        ``phase``, ``step`` for ops; ``nbytes``, ``category``, ``birth``, ``death`` for storages.
        With ``rows``, only these storages and the ops that touch them.
        """
        import networkx as nx

        table = self.lifetimes
        chosen = np.arange(len(table)) if rows is None else np.array(sorted(set(rows)), np.int64)
        touching = np.flatnonzero(np.isin(self.touch_row, chosen))
        ops = np.arange(len(self.ops)) if rows is None else np.unique(self.touch_op[touching])
        graph = nx.DiGraph()
        for op in ops.tolist():
            graph.add_node(
                ("op", op),
                name=self.op_name(op),
                module=self.modules[self.ops.module[op]],
                phase=Phase(int(self.ops.phase[op])).label,
                step=int(self.ops.step[op]),
            )
        for row in chosen.tolist():
            graph.add_node(
                ("storage", row),
                nbytes=int(table.nbytes[row]),
                category=Category(int(table.category[row])).name.lower(),
                birth=int(table.birth[row]),
                death=int(table.death[row]),
            )
        columns = (self.touch_op, self.touch_row, self.touch_kind)
        for op, row, kind in zip(*(column[touching].tolist() for column in columns), strict=True):
            ends = (("op", op), ("storage", row))
            graph.add_edge(*(ends if kind == Touch.WRITE else ends[::-1]))
        return graph

    def to_fx(self) -> Any:
        """The recorded ops as a ``torch.fx.GraphModule`` (see ``llmem.trace.fx``)."""
        from llmem.trace.fx import trace_to_fx

        return trace_to_fx(self)
