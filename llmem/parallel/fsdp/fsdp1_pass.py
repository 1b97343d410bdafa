"""FSDP1 (``FullyShardedDataParallel``), as torch 2.2 to 2.13 runs it, played over a trace.

Read in torch/distributed/fsdp (``_runtime_utils.py`` for the hooks, ``_flat_param.py`` for the
buffers, ``_exec_order_utils.py`` for what is prefetched):

* before the first forward the buffers of every unit are allocated and freed once (``_lazy_init``);
* unsharding casts the shard to the computed dtype if that differs (``_mp_shard``, freed after the
  all-gather) and allocates the gathered parameter. It is freed after forward, but not the root's,
  nor any under SHARD_GRAD_OP, and after the unit's gradients are there;
* the pre-backward hook gathers the unit, then prefetches the one that ran before it in forward
  (BACKWARD_PRE; BACKWARD_POST does so after the unit's backward);
* autograd keeps every parameter's gradient until the last of its unit is there, then concatenates
  them to one flat gradient (the backward of the split into views). The root's first gradient, the
  head's, so lives until the end of backward;
* the flat gradient is cast to the reduce dtype, padded to the number of ranks if needed,
  reduce-scattered to a new shard, and that is cast to the dtype of the parameter;
* without synchronisation (``no_sync``) the flat gradient stays, and later ones are added to it;
* what one stream makes and another uses is recorded (``record_stream``; see ``fsdp1_limiter``);
* ``CPUOffload(offload_params=True)`` keeps the shard on the host and copies it to the GPU at every
  unshard, also when the parameter is still gathered (``pre_unshard``). The reduced gradient is
  copied to the host, but its shard stays on the GPU until backward ends (``_saved_grad_shard``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llmem.lifetimes import NEVER, Category, Parameter, Phase, Recorded, Trace
from llmem.parallel.editor import Editor
from llmem.parallel.fsdp.fsdp1_calls import Call, Hook, calls_of
from llmem.parallel.fsdp.fsdp1_flat import ITEMSIZE, FlatParameter
from llmem.parallel.fsdp.fsdp1_limiter import FreeEventQueue
from llmem.parallel.fsdp.fsdp1_reentrant import leaf_of_recompute
from llmem.parallel.gradients import added_gradients, gradient_rows
from llmem.parallel.units import Unit

UNSHARD_STREAM, PRE_UNSHARD_STREAM, POST_BACKWARD_STREAM, ALL_REDUCE_STREAM = 1, 2, 3, 4
"""The split into views runs on the unshard stream, so its backward, which makes the flat gradient,
does too (autograd runs a node on the stream of its forward)."""

Prefetch = Literal["pre", "post", "none"]

@dataclass(frozen=True)
class Fsdp1Options:
    """Arguments of ``FullyShardedDataParallel`` that change what is alive.

    ``free_after_forward``: FULL_SHARD (False: SHARD_GRAD_OP); ``prefetch``: ``BackwardPrefetch``.
    ``reentrant``: blocks are checkpointed by reentrant checkpointing around their calls, whose
    forwards run without gradients. ``inputs_require_grad``: the embedding's output does, whatever
    is trained (reentrant checkpointing needs it). ``ignored``: keys of trained parameters that are
    no unit's. ``offload``: ``CPUOffload``.
    """

    free_after_forward: bool = True
    prefetch: Prefetch = "pre"
    use_orig_params: bool = False
    reentrant: bool = False
    inputs_require_grad: bool = False
    offload: bool = False
    hybrid: bool = False
    """HYBRID_SHARD: reduced shards are all-reduced and cast on a stream of their own."""
    ignored: frozenset[int] = frozenset()


@dataclass
class _Handle:
    """A unit's ``FlatParamHandle``: its flags and its buffers (handles of the editor)."""

    unit: Unit
    flat: FlatParameter
    gathered: int | None = None
    launched: int = 0
    """A tick after its all-gather was launched."""
    in_backward: bool = False
    prefetched: bool = False
    needs_pre_backward: bool = False
    ran_pre_backward: bool = False
    position: int | None = None
    """``_post_forward_index``"""
    unreduced: int | None = None
    """The flat gradient that waits for synchronisation."""


@dataclass
class Fsdp1Pass:
    """Plays FSDP1's hooks over a trace; one instance per rank.

    ``flats`` has the flat parameter of each of ``units`` (root first), None for units without
    parameters.
    """

    trace: Trace
    units: list[Unit]
    flats: list[FlatParameter | None]
    options: Fsdp1Options
    _order: list[_Handle] = field(default_factory=list)
    """``handles_post_forward_order``"""

    def __post_init__(self) -> None:
        self.editor = Editor(self.trace)
        self._gradients = gradient_rows(self.trace)
        self._added = added_gradients(self.trace)
        self._held: list[int] = []
        self._saved_grad_shards: list[int] = []
        self._free_events = FreeEventQueue(self.editor)
        self._handles = [
            None if flat is None else _Handle(unit, flat)
            for unit, flat in zip(self.units, self.flats, strict=True)
        ]

    def run(self) -> Editor:
        """Replace parameters and gradients by shards, and add what is gathered and reduced."""
        self._shard_parameters()
        calls = calls_of(self.trace, self.units)
        last = {call.step: call.micro for call in calls}
        self._lazy_init(calls[0])
        for call in calls:
            if call.hook is Hook.FINAL:
                self._final(call.tick, sync=call.micro == last[call.step])
                continue
            handle = self._handles[call.unit]
            if handle is None:
                continue
            if call.hook is Hook.PRE_FORWARD:
                self._pre_forward(handle, call)
            elif call.hook is Hook.POST_FORWARD:
                self._post_forward(handle, call)
            elif call.hook is Hook.POST_BACKWARD:
                self._post_backward(handle, call, sync=call.micro == last[call.step])
            elif call.hook is Hook.RESHARD_ONLY:
                self._reshard_only(handle, call, sync=call.micro == last[call.step])
            else:
                self._pre_backward(handle, call)
        return self.editor

    # -- before the first step -------------------------------------------------------------------

    def _shard_parameters(self) -> None:
        ignored = self.options.ignored
        rows = [p.row for p in self.trace.parameters if p.key not in ignored]
        self.editor.drop(np.unique(np.array(rows, np.int64)))
        for handle in [] if self.options.offload else filter(None, self._handles):
            flat = handle.flat
            self._add(handle, flat.shard, flat.kept, 0, category=Category.PARAMETER)

    def _lazy_init(self, first: Call) -> None:
        """``init_flat_param_attributes``: each buffer allocated and its storage freed at once."""
        for handle in filter(None, self._handles):
            flat = handle.flat
            mixed = flat.computed != flat.kept
            buffers = [(flat.shard, flat.computed)] if mixed else []
            buffers.append((flat.padded, flat.computed))
            buffers += [(flat.padded, flat.kept)] if mixed else []
            for numel, dtype in buffers:
                self.editor.free(self._add(handle, numel, dtype, first.tick), first.tick)

    # -- hooks -----------------------------------------------------------------------------------

    def _pre_forward(self, handle: _Handle, call: Call) -> None:
        if handle.in_backward:
            return
        if not handle.prefetched:
            self._unshard(handle, call)

    def _post_forward(self, handle: _Handle, call: Call) -> None:
        if handle.in_backward:
            return
        if not handle.position:  # torch asks for its truth, so the first one is recorded again
            handle.position = len(self._order)
        self._order.append(handle)
        root = handle.unit.is_root
        self._reshard(handle, call.tick, free=self.options.free_after_forward and not root)
        if root or call.recompute or not self.options.reentrant:
            handle.ran_pre_backward = False
            handle.needs_pre_backward = root or self._output_requires_grad(handle.unit)

    def _pre_backward(self, handle: _Handle, call: Call) -> None:
        if handle.ran_pre_backward:
            return
        handle.in_backward = True
        if handle.needs_pre_backward and not handle.prefetched:
            self._unshard(handle, call)
        handle.needs_pre_backward = False
        if self.options.prefetch == "pre":
            self._prefetch(handle, call)
        handle.ran_pre_backward = True

    def _post_backward(self, handle: _Handle, call: Call, *, sync: bool) -> None:
        handle.in_backward = False
        made = self._flat_gradient(handle, call)
        self._after_backward(handle, call, sync=sync)
        if made is None:
            return
        if handle.unreduced is not None:  # added to it in place
            self.editor.free(made, call.tick)
            made = handle.unreduced
        handle.unreduced = None if sync else made
        if sync:
            self._reduce(handle, made, call)

    def _reshard_only(self, handle: _Handle, call: Call, *, sync: bool) -> None:
        handle.in_backward = False
        if self.options.reentrant and not handle.unit.is_root:
            self._held += leaf_of_recompute(self.trace, handle.unit, call.step, call.tick)
        if self._input_requires_grad(handle.unit):  # else the final callback does it
            self._after_backward(handle, call, sync=sync)

    def _after_backward(self, handle: _Handle, call: Call, *, sync: bool) -> None:
        """``_post_backward_reshard``"""
        self._reshard(handle, call.tick, free=sync or self.options.free_after_forward)
        if self.options.prefetch == "post":
            self._prefetch(handle, call)

    def _final(self, tick: int, *, sync: bool) -> None:
        """``_post_backward_final_callback``: what is still gathered is freed."""
        for row in self._held:
            self.editor.end(row, self.editor.at(tick))
        self._held.clear()
        self.editor.free(self._saved_grad_shards, tick)
        self._saved_grad_shards.clear()
        for handle in filter(None, self._handles):
            self._reshard(handle, tick, free=sync or self.options.free_after_forward)
            handle.ran_pre_backward = handle.needs_pre_backward = handle.in_backward = False
            handle.position = None
        self._order.clear()

    # -- buffers ---------------------------------------------------------------------------------

    def _unshard(self, handle: _Handle, call: Call) -> None:
        flat, tick = handle.flat, call.tick
        if handle.gathered is not None:
            if self.options.offload:
                self.editor.free(self._pre_unshard(handle, tick), tick)
            self._free_events.wait(tick)
            return
        phase = Phase.FORWARD if call.hook is Hook.PRE_FORWARD else Phase.BACKWARD
        op = self.editor.op("all_gather", handle.unit.name, phase, call.step, self.editor.at(tick))
        staged = self._pre_unshard(handle, tick, op)
        self._free_events.wait(tick)
        handle.gathered = self._add(
            handle, flat.padded, flat.computed, tick, op=op, stream=UNSHARD_STREAM
        )
        self.editor.record_stream(handle.gathered, Recorded(on_compute=True))
        for shard in staged:
            self.editor.record_stream(shard, Recorded())
        self.editor.free(staged, tick)
        handle.launched = self.editor.at(tick)

    def _pre_unshard(self, handle: _Handle, tick: int, op: int = -1) -> list[int]:
        """The shard as it is gathered: cast, copied from the host, or (nothing made) as it is."""
        flat, stream = handle.flat, PRE_UNSHARD_STREAM
        dtypes = [flat.computed] if flat.computed != flat.kept else []
        dtypes += [flat.kept] if self.options.offload else []
        made = [self._add(handle, flat.shard, d, tick, op=op, stream=stream) for d in dtypes]
        self.editor.free(made[1:], tick)  # the host's copy, once it is cast
        return made[:1]

    def _reshard(self, handle: _Handle, tick: int, *, free: bool) -> None:
        if free and handle.gathered is not None:
            self.editor.free(handle.gathered, tick)
            self._free_events.enqueue(tick, handle.launched)
            handle.gathered = None
        handle.prefetched = False

    def _prefetch(self, handle: _Handle, call: Call) -> None:
        if not handle.position:
            return
        target = self._order[handle.position - 1]
        if target.needs_pre_backward and not target.prefetched:
            self._unshard(target, call)
            target.prefetched = True

    def _flat_gradient(self, handle: _Handle, call: Call) -> int | None:
        """What backward concatenates, with zeros for parameters that no op used."""
        flat, tick, editor = handle.flat, call.tick, self.editor
        parts = [self._gradient_of(piece.parameter, call) for piece in flat.pieces]
        if not any(parts):
            return None
        zeros = [
            self._add(handle, piece.numel, flat.computed, tick, stream=UNSHARD_STREAM)
            for piece, part in zip(flat.pieces, parts, strict=True)
            if not part
        ]
        whole = self._add(
            handle, flat.numel, flat.computed, tick, stream=UNSHARD_STREAM,
            category=Category.GRADIENT,
        )  # fmt: skip
        editor.free(zeros, tick)
        for rows in parts:
            for row in rows:
                editor.end(row, editor.at(tick))
        return whole

    def _gradient_of(self, parameter: Parameter | None, call: Call) -> list[int]:
        """Rows of a parameter's gradient as this micro-batch made it."""
        if parameter is None:
            return []
        if call.micro:
            return self._added.get((call.step, call.micro, parameter.key), [])
        row = self._gradients.get((call.step, parameter.key))
        return [] if row is None else [row]

    def _reduce(self, handle: _Handle, gradient: int, call: Call) -> None:
        """``_reduce_grad``: from the flat gradient to this rank's shard of it."""
        flat, tick, editor = handle.flat, call.tick, self.editor
        name = handle.unit.name
        op = editor.op("reduce_scatter", name, Phase.BACKWARD, call.step, editor.at(tick))
        stream, last = POST_BACKWARD_STREAM, ALL_REDUCE_STREAM if self.options.hybrid else None
        temporary = []
        if flat.reduced != flat.computed:
            temporary.append(self._add(handle, flat.numel, flat.reduced, tick, op=op, stream=stream))
        if flat.padded != flat.numel:
            temporary.append(
                self._add(handle, flat.padded, flat.reduced, tick, op=op, stream=stream)
            )
        category = Category.GRADIENT if flat.reduced == flat.kept else Category.COMMUNICATION
        shard = self._add(
            handle, flat.shard, flat.reduced, tick, op=op, stream=stream, category=category
        )
        editor.record_stream(gradient, Recorded())
        if self.options.hybrid:
            editor.record_stream(shard, Recorded())
        if flat.reduced != flat.kept:
            cast = self._add(
                handle, flat.shard, flat.kept, tick, op=op, stream=last or stream,
                category=Category.GRADIENT,
            )  # fmt: skip
            editor.free(shard, tick)
            shard = cast
        editor.free([*reversed(temporary), gradient], tick)
        if self.options.offload:
            self._saved_grad_shards.append(shard)
            return
        dropped = self._dropped(handle, call)
        if dropped is not None:
            editor.free(shard, dropped)

    def _dropped(self, handle: _Handle, call: Call) -> int | None:
        """When the loop lets go of the step's gradients, None for never.

        With ``use_orig_params`` the parameters' gradients are views; the flat one is dropped in
        the root's next pre-forward (``_reset_flat_param_grad_info_if_needed``).
        """
        rows = [
            self._gradients[call.step, p.key]
            for p in handle.unit.trainable
            if (call.step, p.key) in self._gradients
        ]
        tick = int(self.trace.lifetimes.death[rows].max())
        if tick == NEVER:
            return None
        if not self.options.use_orig_params:
            return tick
        forwards = [t for t, phase, _ in self.trace.phase_ticks if phase is Phase.FORWARD]
        return next((t for t in forwards if t >= tick), tick)

    def _add(
        self,
        handle: _Handle,
        numel: int,
        dtype: str,
        tick: int,
        *,
        category: Category = Category.COMMUNICATION,
        op: int = -1,
        stream: int = 0,
    ) -> int:
        return self.editor.add(
            numel * ITEMSIZE[dtype], self.editor.at(tick), category=category, op=op,
            module=handle.unit.name, key=handle.flat.key, stream=stream,
        )  # fmt: skip

    # -- small questions -------------------------------------------------------------------------

    def _input_requires_grad(self, unit: Unit) -> bool:
        """Whether something trained ran before ``unit`` (or its input was made to require it)."""
        if self.options.inputs_require_grad or self.options.ignored:
            return not unit.is_root
        start = _first_call(unit)
        return not unit.is_root and any(
            u.trainable and _first_call(u) < start for u in self.units
        )

    def _output_requires_grad(self, unit: Unit) -> bool:
        inside = (u for u in self.units if u.name == unit.name or u.name.startswith(unit.name + "."))
        return any(u.trainable for u in inside) or self._input_requires_grad(unit)


def _first_call(unit: Unit) -> int:
    return min((w.start for windows in unit.forward.values() for w in windows), default=0)
