"""`dnnmem`: an estimator after DNNMem.

Source: Gao et al., "Estimating GPU Memory Consumption of Deep Learning Models", ESEC/FSE 2020
(doi 10.1145/3368089.3417050). No reference implementation is public and reimplementations differ, so
this is the variant:

- the forward aten graph is walked in topological order; backward is that walk reversed;
- weights are there from the start; a weight's gradient comes with the first backward op that needs it
  and stays; one element width for all floating-point tensors (uniform precision);
- an op that leads to a weight keeps its outputs until its own backward; other outputs (masks,
  positions) die after their last forward use; views and in-place results own nothing;
- the gradient of an output comes with the backward of its last forward user and dies with the backward
  of its producer;
- every tensor is rounded up to 512 bytes; a constant 64 MiB stands for the allocator's buffer, and the
  CUDA context is added. The optimizer's state, made in the first step, is not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmem.baselines.base import MIB, Answer, BaselineInput, cannot

if TYPE_CHECKING:
    from torch import fx

ALIGNMENT = 512
ALLOCATOR_BUFFER = 64 * MIB
UNMARKED_VIEWS = ("_unsafe_view",)
"""aten ops that return their input's storage although their schema does not say so."""

LEAVES_OUT = [
    "the optimizer's state and its temporaries",
    "mixed precision: one width for weights, gradients and activations",
    "gradient checkpointing: every output is kept",
    "parallelism: the whole step is on one GPU",
    "kernel workspaces; the allocator is a constant and 512-byte rounding",
]


def estimate(inp: BaselineInput) -> Answer:
    """Peak bytes on one GPU: the walk, plus allocator buffer and context."""
    if inp.gpus > 1:
        return cannot("DNNMem knows one GPU only")
    graph = inp.graph if inp.graph is not None else _trace(inp)
    parts = peak_of(graph, inp.dtype_bytes)
    parts |= {"allocator_buffer": ALLOCATOR_BUFFER, "m_base": inp.m_base}
    return Answer(bytes=sum(parts.values()), parts=parts, leaves_out=list(LEAVES_OUT))


def peak_of(graph: fx.GraphModule, dtype_bytes: int) -> dict[str, int]:
    """Bytes by kind at the peak of the walk over ``graph``; floats are ``dtype_bytes`` wide.

    Kinds: ``weights``, ``inputs``, ``weight_gradients``, ``outputs``, ``output_gradients``.
    """
    walk = _Walk(graph, dtype_bytes)
    walk.forward()
    walk.backward()
    return walk.at_peak


@dataclass
class _Op:
    """A graph node: the storages its outputs lie in, those it made, and whether a gradient passes."""

    storages: list[str]
    made: list[str]
    differentiable: bool = False
    is_weight: bool = False


@dataclass
class _Ledger:
    """Live bytes by kind and tensor; the largest total so far is kept with its split."""

    live: dict[tuple[str, str], int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    at_peak: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, key: str, nbytes: int) -> None:
        if (kind, key) in self.live:
            return
        self.live[kind, key] = nbytes
        self.totals[kind] = self.totals.get(kind, 0) + nbytes
        if sum(self.totals.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(self.totals)

    def drop(self, kind: str, key: str) -> None:
        self.totals[kind] = self.totals.get(kind, 0) - self.live.pop((kind, key), 0)


class _Walk:
    """The forward walk and its reverse over one graph."""

    def __init__(self, graph: fx.GraphModule, dtype_bytes: int) -> None:
        self.module = graph
        self.dtype_bytes = dtype_bytes
        self.order = _topological(graph.graph)
        self.ops: dict[fx.Node, _Op] = {}
        self.sizes: dict[str, int] = {}
        self.ledger = _Ledger()
        for node in self.order:
            self.ops[node] = self._read(node)

    @property
    def at_peak(self) -> dict[str, int]:
        return self.ledger.at_peak

    def forward(self) -> None:
        """Weights and inputs first, then every op's outputs; drop what no backward will want."""
        for node in self.order:
            if node.op in ("get_attr", "placeholder"):
                kind = "inputs" if node.op == "placeholder" and not self._weight(node) else "weights"
                for key in self.ops[node].made:
                    self.ledger.add(kind, key, self.sizes[key])
        keep = {k for op in self.ops.values() if op.differentiable for k in op.made}
        last_use = {k: n for n in self.order for u in n.all_input_nodes for k in self._of(u)}
        dying: dict[fx.Node, list[str]] = {}
        for key, node in last_use.items():
            dying.setdefault(node, []).append(key)
        for node in self.order:
            if node.op == "call_function":
                for key in self.ops[node].made:
                    self.ledger.add("outputs", key, self.sizes[key])
            for key in dying.get(node, ()):
                if key not in keep:
                    self.ledger.drop("outputs", key)

    def backward(self) -> None:
        """Each op in reverse: gradients of its inputs appear, then its own outputs and theirs go."""
        for node in reversed(self.order):
            op = self.ops[node]
            if node.op != "call_function" or not (op.differentiable and op.made):
                continue
            for used in node.all_input_nodes:
                source = self.ops[used]
                kind = "weight_gradients" if self._leads_to_weight(used) else "output_gradients"
                for key in source.storages if source.differentiable else ():
                    self.ledger.add(kind, key, self.sizes[key])
            for key in op.made:
                self.ledger.drop("output_gradients", key)
                self.ledger.drop("outputs", key)

    def _of(self, node: fx.Node) -> list[str]:
        return self.ops[node].storages

    def _weight(self, node: fx.Node) -> bool:
        return self.ops[node].is_weight

    def _leads_to_weight(self, node: fx.Node) -> bool:
        """Whether ``node`` is a weight or a view of one (a transposed matrix)."""
        weights = {k for op in self.ops.values() if op.is_weight for k in op.made}
        return any(key in weights for key in self._of(node))

    def _read(self, node: fx.Node) -> _Op:
        if node.op == "get_attr" or node.op == "placeholder":
            made = self._make(node)
            trains = self._trains(node)
            return _Op(made, made, differentiable=trains, is_weight=trains)
        if node.op != "call_function":
            return _Op([], [])
        inputs = [self.ops[used] for used in node.all_input_nodes]
        passes = any(op.differentiable for op in inputs) and _passes_gradient(node)
        if node.target is operator.getitem:
            parent = inputs[0].storages
            index = node.args[1]
            assert isinstance(index, int)
            # Views of one storage (split) list that storage once.
            shared = [parent[min(index, len(parent) - 1)]]
            return _Op(shared, [], passes)
        if _is_view(node):
            return _Op(inputs[0].storages[:1], [], passes)
        made = self._make(node)
        return _Op(made, made, passes)

    def _make(self, node: fx.Node) -> list[str]:
        keys = []
        for index, tensor in enumerate(_tensors(node)):
            key = f"{node.name}.{index}"
            self.sizes[key] = self._aligned(tensor)
            keys.append(key)
        return keys

    def _aligned(self, tensor: Any) -> int:
        if tensor is None:
            return 0
        width = self.dtype_bytes if tensor.dtype.is_floating_point else tensor.dtype.itemsize
        nbytes = tensor.shape.numel() * width
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def _trains(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            value: Any = self.module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return bool(getattr(value, "requires_grad", False))
        return any(getattr(t, "requires_grad", False) for t in _tensors(node))


def _topological(graph: fx.Graph) -> list[fx.Node]:
    """Nodes of ``graph`` in topological order; among equals the order in which they were traced."""
    import networkx as nx

    dag: nx.DiGraph[int] = nx.DiGraph()
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    dag.add_nodes_from(range(len(nodes)))
    dag.add_edges_from((position[u], position[n]) for n in nodes for u in n.all_input_nodes)
    return [nodes[i] for i in nx.lexicographical_topological_sort(dag)]


def _tensors(node: fx.Node) -> Iterator[Any]:
    """The node's outputs by position: tensors or their metadata, None where there is no tensor."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    several = isinstance(value, tuple | list) and not hasattr(value, "dtype")
    for one in value if several else (value,):  # type: ignore[union-attr]
        yield one if hasattr(one, "dtype") and hasattr(one, "shape") else None


def _is_view(node: fx.Node) -> bool:
    """Whether the op's result lies in the storage of its first tensor argument."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    name = schema.name.split("::")[-1]
    return name in UNMARKED_VIEWS or any(r.alias_info is not None for r in schema.returns)


def _passes_gradient(node: fx.Node) -> bool:
    detached = "detach" in str(node.target)
    return not detached and any(
        t is not None and t.dtype.is_floating_point for t in _tensors(node)
    )


def _trace(inp: BaselineInput) -> fx.GraphModule:
    import torch

    from llmem.trace.fx import forward_fx

    tokens = torch.zeros(inp.batch, inp.seq, dtype=torch.int64, device="meta")
    return forward_fx(inp.model, {"input_ids": tokens, "labels": tokens})
