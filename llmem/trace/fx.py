"""Traces as ``torch.fx`` graphs, for people who write their own passes.

``trace_to_fx`` lays out a recorded training step: what touches what, in order, without shapes of
single tensors (a trace knows storages). ``forward_fx`` runs a model's forward on meta tensors and
keeps every op with its arguments and the shapes it made. Both are graphs to walk, not to run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from llmem.errors import LlmemError
from llmem.gpu.devices import get_device
from llmem.lifetimes import Category, Phase, Touch, Trace
from llmem.trace.kernels import kernels_of

aten = torch.ops.aten


def trace_to_fx(trace: Trace) -> fx.GraphModule:
    """The recorded ops as ``call_function`` nodes; an edge says that one reads what another wrote.

    Storages that exist before the first op are placeholders. A node's arguments are the last
    writers of the storages it reads. ``node.meta`` of an op: ``op`` (its row in ``trace.ops``),
    ``phase``, ``step``, ``module``, ``recompute``, ``reads`` and ``writes`` (rows of
    ``trace.lifetimes``), ``frees`` (rows that die with it) and ``nbytes`` (bytes born in it); of a
    placeholder: ``row``, ``nbytes``, ``category``, and ``shape``, ``dtype`` for a parameter. The
    output are the last writers of all that outlives the trace.
    """
    table, graph = trace.lifetimes, fx.Graph()
    parameters = {p.row: p for p in trace.parameters}
    writer: dict[int, fx.Node] = {}
    for row in (table.birth_op < 0).nonzero()[0].tolist():
        category = Category(int(table.category[row])).name.lower()
        parameter = parameters.get(row)
        name = parameter.name.replace(".", "_") if parameter else f"{category}_{row}"
        node = writer[row] = graph.placeholder(name)
        node.meta = {"row": row, "nbytes": int(table.nbytes[row]), "category": category}
        if parameter is not None:
            node.meta |= {"shape": parameter.shape, "dtype": parameter.dtype}
    reads, writes = _touched(trace, Touch.READ), _touched(trace, Touch.WRITE)
    frees: dict[int, list[int]] = {}
    for row, op in enumerate(table.death_op.tolist()):
        frees.setdefault(op, []).append(row)
    for op in range(len(trace.ops)):
        sources = dict.fromkeys(writer[row] for row in reads.get(op, ()) if row in writer)
        node = graph.call_function(_target(trace.op_name(op)), tuple(sources))
        made = [row for row in writes.get(op, ()) if table.birth_op[row] == op]
        node.meta = {
            "op": op,
            "phase": Phase(int(trace.ops.phase[op])).label,
            "step": int(trace.ops.step[op]),
            "module": trace.modules[int(trace.ops.module[op])],
            "recompute": bool(trace.ops.recompute[op]),
            "reads": reads.get(op, []),
            "writes": writes.get(op, []),
            "frees": frees.get(op, []),
            "nbytes": int(table.nbytes[made].sum()) if made else 0,
        }
        writer |= dict.fromkeys(writes.get(op, ()), node)
    survivors = (table.death > trace.step_ticks[-1]).nonzero()[0].tolist()
    graph.output(tuple(dict.fromkeys(writer[row] for row in survivors if row in writer)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _touched(trace: Trace, kind: Touch) -> dict[int, list[int]]:
    """op -> rows that it touches in the way of ``kind``, each once, in order."""
    found: dict[int, dict[int, None]] = {}
    mask = trace.touch_kind == kind
    for op, row in zip(trace.touch_op[mask].tolist(), trace.touch_row[mask].tolist(), strict=True):
        found.setdefault(op, {})[row] = None
    return {op: list(rows) for op, rows in found.items()}


def _target(name: str) -> Callable[..., Any]:
    """The op of that name, or a function that only bears it (an op of another namespace)."""
    packet: Callable[..., Any] | None = getattr(aten, name, None)
    if packet is not None:
        return packet

    def other(*_: Any) -> Any:
        raise NotImplementedError(f"{name} is recorded, not runnable")

    other.__name__ = other.__qualname__ = name
    return other


def forward_fx(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], *, gpu: str | None = None
) -> fx.GraphModule:
    """The forward of ``model(**inputs)`` as an aten graph with shapes alone.

    ``model`` and ``inputs`` are on the meta device. Inputs are placeholders, parameters and
    buffers ``get_attr`` nodes of their own name, ops ``call_function`` nodes of overloads; views
    are ops too. ``node.meta["val"]`` is a meta tensor (a tuple for several outputs, which
    ``getitem`` nodes take apart) and ``node.meta["nn_module_stack"]`` the modules around the op,
    outermost first: ``{path: (path, class)}``. The output is the loss if the model returns one,
    else all tensors it returns. Composite ops fall apart as on ``gpu``.

    Raises LlmemError where the forward asks for values that meta tensors do not have.
    """
    from llmem.trace.run import DEFAULT_GPU

    mode = _GraphMode(model, inputs)
    with ExitStack() as stack:
        stack.enter_context(kernels_of(get_device(gpu or DEFAULT_GPU), lambda _: None))
        stack.enter_context(mode.watch_modules(model))
        stack.enter_context(mode)
        try:
            outputs = model(**inputs)
        except (RuntimeError, NotImplementedError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LlmemError(
                f"the forward of {type(model).__name__} cannot be traced to fx: "
                f"{first.rstrip('.')}; trace another attention or expert implementation"
            ) from error
    loss = getattr(outputs, "loss", None)
    return mode.finish(outputs if loss is None else loss)


class _GraphMode(TorchDispatchMode):
    """Writes down every op below autograd as a graph node."""

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._held: list[torch.Tensor] = []  # an id is only good while its tensor lives
        self._path: dict[str, tuple[str, type]] = {}
        self._attributes: dict[str, torch.Tensor] = {}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in named}
        for name, tensor in inputs.items():
            self._note(self._graph.placeholder(name), tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        nodes = tree_map(self._node_of, (args, dict(kwargs or {})))
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(nodes[0][0], args[0])
        out = func(*args, **(kwargs or {}))
        node = self._graph.call_function(func, *nodes)
        node.meta["nn_module_stack"] = dict(self._path)
        if isinstance(out, (list, tuple)):
            node.meta["val"] = tree_map(_shape_of, tuple(out))
            for index, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    taken = self._graph.call_function(operator.getitem, (node, index))
                    taken.meta["nn_module_stack"] = dict(self._path)
                    self._note(taken, item)
        elif isinstance(out, torch.Tensor):
            self._note(node, out)
        return out

    def _answer(self, node: fx.Node, tensor: torch.Tensor) -> bool:
        """As ``Recorder`` answers: masks are full, so all() holds and any() does not."""
        question = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if question not in ("all", "eq", "any"):
            return aten._local_scalar_dense(tensor)  # type: ignore[no-any-return]
        return question != "any"

    def _note(self, node: fx.Node, tensor: torch.Tensor) -> None:
        node.meta["val"] = _shape_of(tensor)
        self._nodes[id(tensor)] = node
        self._held.append(tensor)

    def _node_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._nodes:
            name = self._names.get(id(value), f"constant_{len(self._attributes)}")
            self._attributes[name] = value
            node = self._graph.create_node("get_attr", name)
            self._note(node, value)
        return self._nodes[id(value)]

    @contextmanager
    def watch_modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep the path of the modules that are running."""
        names = {id(m): n for n, m in reversed(list(model.named_modules()))}
        original = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if not name or name in self._path:
                return original(module, *args, **kwargs)
            self._path[name] = (name, type(module))
            try:
                return original(module, *args, **kwargs)
            finally:
                del self._path[name]

        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]

    def finish(self, outputs: Any) -> fx.GraphModule:
        self._graph.output(tree_map(self._node_of, _plain(outputs)))
        graph, attributes = self._graph, self._attributes
        for node in reversed(graph.nodes):  # what autograd takes aside for backward
            if node.target is aten.detach.default and not node.users:
                graph.erase_node(node)
        self._held, self._nodes = [], {}
        return fx.GraphModule(dict(attributes), graph)


def _shape_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device="meta",
        requires_grad=isinstance(value, torch.nn.Parameter) and value.requires_grad,
    )  # fmt: skip


def _plain(outputs: Any) -> Any:
    """A tensor, or the tensors of a model's output as a tuple."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return tuple(value for value in values if isinstance(value, torch.Tensor))
