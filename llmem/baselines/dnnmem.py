"""`dnnmem`: an estimator after DNNMem.

Source: Gao et al., "Estimating GPU Memory Consumption of Deep Learning Models", ESEC/FSE 2020 (doi
10.1145/3368089.3417050). No reference implementation is public and reimplementations differ, so
this is the variant:

- the forward aten graph is walked in topological order; backward is that walk reversed;
- weights are there from the start; a weight's gradient comes with the first backward op that needs
  it and stays; one element width for all floating-point tensors (uniform precision), 2 bytes for
  a mixed-precision run;
- an op that leads to a weight keeps its outputs until its own backward; other outputs (masks,
  positions) die after their last forward use; views and in-place results own nothing;
- the gradient of an output comes with the backward of its last forward user and dies with the
  backward of its producer;
- with gradient checkpointing a layer's inner outputs die in forward, as its one output stays; that
  they come back in backward is not counted;
- every tensor is rounded up to 512 bytes; a constant 64 MiB stands for the allocator's buffer, and
  the CUDA context is added. The optimizer's state, made in the first step, is not counted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmem.baselines.base import MIB, Answer, BaselineInput, cannot
from llmem.baselines.dims import layer_stack

if TYPE_CHECKING:
    from torch import fx, nn

ALIGNMENT = 512
ALLOCATOR_BUFFER = 64 * MIB
UNMARKED_VIEWS = ("_unsafe_view",)
"""aten ops that return their input's storage although their schema does not say so."""
MAY_COPY = ("contiguous", "reshape", "flatten", "to", "type_as")
"""aten ops marked as views that copy where dtype or layout ask for it."""

LEAVES_OUT = [
    "the optimizer's state and its temporaries",
    "mixed precision: one width for weights, gradients and activations",
    "what gradient checkpointing recomputes in backward",
    "parallelism: the whole step is on one GPU",
    "kernel workspaces; the allocator is a constant and 512-byte rounding",
]


def estimate(inp: BaselineInput) -> Answer:
    """Peak bytes on one GPU: the walk, plus allocator buffer and context."""
    if inp.gpus > 1:
        return cannot("DNNMem knows one GPU only")
    graph = inp.graph if inp.graph is not None else _trace(inp)
    # A mixed-precision run is taken for a 16-bit one: there is no second width.
    width = 2 if inp.mixed else inp.dtype_bytes
    layers = _layer_names(inp.model) if inp.gradient_checkpointing else ()
    parts = peak_of(graph, width, layers)
    parts |= {"allocator_buffer": ALLOCATOR_BUFFER, "m_base": inp.m_base}
    return Answer(bytes=sum(parts.values()), parts=parts, leaves_out=list(LEAVES_OUT))


def peak_of(
    graph: fx.GraphModule, dtype_bytes: int, checkpointed: Sequence[str] = ()
) -> dict[str, int]:
    """Bytes by kind at the peak of the walk over ``graph``; floats are ``dtype_bytes`` wide.

    Kinds: ``weights``, ``inputs``, ``weight_gradients``, ``outputs``, ``output_gradients``.
    ``checkpointed`` are the module paths of checkpointed layers, found again in the nodes'
    ``nn_module_stack``.
    """
    walk = _Walk(graph, dtype_bytes, checkpointed)
    walk.forward()
    walk.backward()
    return walk.at_peak


@dataclass
class _Op:
    """A graph node: the storages its outputs lie in, those it made, and whether a gradient
    passes."""

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

    def __init__(
        self, graph: fx.GraphModule, dtype_bytes: int, checkpointed: Sequence[str] = ()
    ) -> None:
        self.module = graph
        self.dtype_bytes = dtype_bytes
        self.checkpointed = frozenset(checkpointed)
        self.order = _topological(graph.graph)
        self.ops: dict[fx.Node, _Op] = {}
        self.sizes: dict[str, int] = {}
        self.ledger = _Ledger()
        for node in self.order:
            self.ops[node] = self._read(node)
        self.weights = {k for op in self.ops.values() if op.is_weight for k in op.made}

    @property
    def at_peak(self) -> dict[str, int]:
        return self.ledger.at_peak

    def forward(self) -> None:
        """Weights and inputs first, then every op's outputs; drop what no backward will want."""
        for node in self.order:
            if node.op in ("get_attr", "placeholder"):
                given = node.op == "placeholder" and not self.ops[node].is_weight
                for key in self.ops[node].made:
                    self.ledger.add("inputs" if given else "weights", key, self.sizes[key])
        dying = self._dying_in_forward()
        for node in self.order:
            if node.op == "call_function":
                for key in self.ops[node].made:
                    self.ledger.add("outputs", key, self.sizes[key])
            for key in dying.get(node, ()):
                self.ledger.drop("outputs", key)

    def backward(self) -> None:
        """Each op in reverse: gradients of its inputs appear, then its own outputs and theirs
        go."""
        for node in reversed(self.order):
            op = self.ops[node]
            if node.op == "output":
                self._gradients_of(node)
            if node.op != "call_function" or not (op.differentiable and op.made):
                continue
            self._gradients_of(node)
            for key in op.made:
                self.ledger.drop("output_gradients", key)
                self.ledger.drop("outputs", key)

    def _gradients_of(self, node: fx.Node) -> None:
        """Gradients of what ``node`` reads; that of a weight's view is the weight's."""
        for used in node.all_input_nodes:
            source = self.ops[used]
            for key in source.storages if source.differentiable else ():
                kind = "weight_gradients" if key in self.weights else "output_gradients"
                self.ledger.add(kind, key, self.sizes[key])

    def _dying_in_forward(self) -> dict[fx.Node, list[str]]:
        """Per node, the storages that nothing after it needs, forward or backward."""
        layers = {node: self._layer(node) for node in self.order}
        uses: dict[str, list[fx.Node]] = {}
        for node in self.order:
            for used in node.all_input_nodes:
                for key in self.ops[used].storages:
                    uses.setdefault(key, []).append(node)
        dying: dict[fx.Node, list[str]] = {}
        for node, op in self.ops.items():
            layer = layers[node]
            for key in op.made if node.op == "call_function" else ():
                users = uses.get(key, [node])
                inner = layer is not None and all(layers[user] == layer for user in users)
                if inner or not op.differentiable:
                    dying.setdefault(users[-1], []).append(key)
        return dying

    def _layer(self, node: fx.Node) -> str | None:
        """The checkpointed layer that the op belongs to; traced paths may have a prefix."""
        for path, _ in node.meta.get("nn_module_stack", {}).values() if self.checkpointed else ():
            while path not in self.checkpointed and "." in path:
                path = path.split(".", 1)[1]
            if path in self.checkpointed:
                return str(path)
        return None

    def _read(self, node: fx.Node) -> _Op:
        if node.op in ("get_attr", "placeholder"):
            value = self._attribute(node) if node.op == "get_attr" else None
            # A tied weight is one tensor under two names.
            made = self._make(node, f"tensor {id(value)}" if value is not None else node.name)
            trains = bool(getattr(value, "requires_grad", False)) or any(
                getattr(t, "requires_grad", False) for t in _tensors(node)
            )
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
        made = self._make(node, node.name)
        return _Op(made, made, passes)

    def _make(self, node: fx.Node, name: str) -> list[str]:
        keys = []
        for index, tensor in enumerate(_tensors(node)):
            key = f"{name}.{index}"
            self.sizes[key] = self._aligned(tensor)
            keys.append(key)
        return keys

    def _aligned(self, tensor: Any) -> int:
        if tensor is None:
            return 0
        width = self.dtype_bytes if tensor.dtype.is_floating_point else tensor.dtype.itemsize
        nbytes = math.prod(map(int, tensor.shape)) * int(width)
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value


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
    if schema is None or not node.all_input_nodes:
        return False
    name = schema.name.split("::")[-1]
    source, result = (next(_tensors(n), None) for n in (node.all_input_nodes[0], node))
    if name in MAY_COPY and source is not None and result is not None:
        return bool(source.dtype == result.dtype and source.is_contiguous())
    return name in UNMARKED_VIEWS or any(r.alias_info is not None for r in schema.returns)


def _passes_gradient(node: fx.Node) -> bool:
    detached = "detach" in str(node.target)
    return not detached and any(
        t is not None and t.dtype.is_floating_point for t in _tensors(node)
    )


def _layer_names(model: nn.Module) -> list[str]:
    layers = set(layer_stack(model))
    return [name for name, module in model.named_modules() if module in layers]


def _trace(inp: BaselineInput) -> fx.GraphModule:
    import torch

    from llmem.trace.fx import forward_fx

    tokens = torch.zeros(inp.batch, inp.seq, dtype=torch.int64, device="meta")
    graph: fx.GraphModule = forward_fx(inp.model, {"input_ids": tokens, "labels": tokens})
    return graph
