"""Generation: prefill, then one forward per token over a cache of keys and values.

What runs is ``generate`` of the installed transformers with the caches it chooses, greedy search
or beam search; only the questions that it asks of values (is every sequence finished?) are
answered here. No sequence ends early. On meta a long generation is not run token by token: a
dynamic cache gets longer by the same bytes at every token, so after the first forwards its
tensors are given the lengths that they have before the last ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

from llmem.errors import LlmemError
from llmem.installed import installed
from llmem.lifetimes import Category, Phase
from llmem.spec import RunSpec
from llmem.trace.batch import Batch
from llmem.trace.recorder import Recorder
from llmem.trace.step import NoWatcher, Watcher
from llmem.trace.tape import BIRTH_OP

WHOLE = 64
"""Generations of at most so many tokens are traced token by token."""

EDGE = 4
"""Of a longer one, so many forwards after the prefill and so many at the end are traced."""


def check_generation(spec: RunSpec) -> None:
    """Raises LlmemError for what ``--task generate`` does not know."""
    if not hasattr(import_module("transformers.cache_utils"), "DynamicSlidingWindowLayer"):
        raise LlmemError(
            "--task generate needs transformers 4.56 or later, whose caches are made of layers; "
            f"{installed('transformers')} is installed"
        )
    if spec.strategy != "none" or spec.gpus > 1:
        raise LlmemError(
            "--task generate is modelled on one GPU; leave out --strategy, --gpus, --tp and --pp"
        )
    if spec.bf16 or spec.fp16:
        raise LlmemError(
            "--bf16 and --fp16 are mixed precision of training; for --task generate say what is "
            "loaded: --param-dtype bf16"
        )
    if spec.liger or spec.kernels != "model" or spec.packed:
        raise LlmemError(
            "--task generate trains nothing; leave out --packed, --liger and --kernels, which are of "
            "training"
        )


@dataclass
class GenerationStep:
    """One call of ``generate`` on one batch of prompts, which the caller keeps meanwhile."""

    model: Any
    make_batch: Callable[[], Batch]
    options: dict[str, Any]
    """Keyword arguments of ``generate``."""
    watcher: Watcher = field(default_factory=NoWatcher)

    def __call__(self) -> None:
        watch = self.watcher
        watch.start_step(0)
        with watch.in_phase(Phase.BATCH):
            prompts = self.make_batch()
        with watch.in_phase(Phase.PREFILL):
            self.model.generate(**prompts, **self.options)


def generation_step(
    model: torch.nn.Module, spec: RunSpec, make_batch: Callable[[], Batch], notes: list[str]
) -> GenerationStep:
    """The step that generates ``spec.max_new_tokens`` tokens with it."""
    if not hasattr(model, "generate"):
        raise LlmemError(f"{type(model).__name__} has no generate(); use --task train")
    if not isinstance(spec.model, torch.nn.Module):
        model.eval()  # as from_pretrained returns it; a module that was given stays as it is
    options: dict[str, Any] = {
        "max_new_tokens": spec.max_new_tokens, "num_beams": spec.num_beams, "do_sample": False
    }  # fmt: skip
    if spec.cache_implementation is not None:
        options["cache_implementation"] = spec.cache_implementation
    search = "greedy search" if spec.num_beams == 1 else f"{spec.num_beams} beams"
    notes.append(
        f"generation: {spec.max_new_tokens} new tokens, {search}, no sequence ends early; step 0 "
        "is the prefill, which gives the first token"
    )
    if spec.cache_implementation == "static":
        notes.append("static cache: decoded eagerly, without torch.compile (disable_compile=True)")
    return GenerationStep(model, make_batch, options)


def forwards_traced(tokens: int, *, whole: bool) -> list[int]:
    """Which of the ``tokens`` forwards of a generation are run; 0 is the prefill.

    >>> forwards_traced(100, whole=False)
    [0, 1, 2, 3, 4, 96, 97, 98, 99]
    """
    every = list(range(tokens))
    return every if whole or tokens <= WHOLE else every[: EDGE + 1] + every[-EDGE:]


def recorder_of(spec: RunSpec, device: str) -> Callable[..., Recorder]:
    """The class of recorder that watches what ``spec`` does."""
    if spec.task == "train":
        return Recorder
    whole = device != "meta" or spec.cache_implementation not in (None, "dynamic")
    return partial(GenerationRecorder, forwards=forwards_traced(spec.max_new_tokens, whole=whole))


class GenerationRecorder(Recorder):
    """A recorder that knows prefill from decode and the cache from other activations.

    Each forward of the model is a step of the trace; the search over its logits belongs to it.
    """

    def __init__(self, *, forwards: list[int], **options: Any) -> None:
        """``forwards``: which of the generation's are run, in order (see ``forwards_traced``)."""
        super().__init__(**options)
        self._forwards = forwards
        self._forward = -1
        self._root = -1
        self._cache: Callable[[], Any] = lambda: None
        self._optimizer = {"name": "none", "state_elements": 0, "state_bytes": 0}

    def watch_modules(self, model: torch.nn.Module, head: set[str]) -> ExitStack:
        stack = super().watch_modules(model, head)
        name, generating = next((n, m) for n, m in model.named_modules() if _generates(m))
        self._root = self._module_id(name)
        stack.callback(
            generating.register_forward_hook(self._after_forward, with_kwargs=True).remove
        )
        if "cpu" in self._devices and hasattr(generating, "_optimize_model_for_decode"):
            # On a GPU, and on meta, experts change their kernels for decode; on a CPU they do not.
            generating.__dict__["_optimize_model_for_decode"] = nullcontext
            stack.callback(generating.__dict__.pop, "_optimize_model_for_decode")
        return stack

    def _enter_module(self, module: int) -> None:
        if module == self._root:
            self._next_forward()
        super()._enter_module(module)
        self._in_head = self._in_head or module in self._head_modules

    def _here(self, node: Any) -> tuple[int, Category]:
        module = self._module_stack[-1]
        if self.phase is Phase.BATCH:
            return module, Category.INPUT
        return module, Category.LOGITS_AND_LOSS if self._in_head else Category.ACTIVATION

    def _next_forward(self) -> None:
        self._forward += 1
        if self._forward == 0:
            return
        self._label_cache()  # beam search has reordered it
        self.start_step(self._forward)
        self._set_phase(Phase.DECODE)
        before, now = self._forwards[self._forward - 1 : self._forward + 1]
        if now > before + 1:
            self._skip_to(now, now - before - 1)

    def _skip_to(self, forward: int, tokens: int) -> None:
        """Let the cache grow by the ``tokens`` that are not generated, or generate them after all."""
        layers = growing_layers(self._cache())
        if layers is None:
            self._forwards = list(range(self._forwards[-1] + 1))
            return
        for layer in layers:
            lengthen(layer, tokens)
        last = self._forwards[-1]
        self.note(
            f"traced: prefill, decode steps 1 to {self._forward - 1} and {forward} to {last}; in "
            "between the cache grows by the same bytes at every step (ids and positions, 16 bytes a "
            "token, left out)"
        )

    def _after_forward(self, model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        from transformers.cache_utils import Cache

        found = [
            value for value in (*kwargs.values(), *outputs.values()) if isinstance(value, Cache)
        ]
        if found:
            self._cache = weakref.ref(found[-1])
            self._label_cache()
        if found and self._forward + 1 == len(self._forwards):
            storages = [tensor.untyped_storage() for tensor in cache_tensors(found[-1])]
            total = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
            self.note(f"KV cache ({type(found[-1]).__name__}): {total:,} bytes at the last token")

    def _label_cache(self) -> None:
        for tensor in cache_tensors(self._cache()):
            self.label(tensor, Category.KV_CACHE)

    def _answer(self, tensor: torch.Tensor) -> bool | float:
        """What generate asks: the first three of transformers/generation/utils.py's own loops.

        ``unfinished_sequences.max() == 0`` ends greedy search, the conjunction of
        ``_beam_search_has_unfinished_sequences`` goes on with beam search, whose results are
        as long as the longest beam (``max``); prompts end without padding (``sum > 0``) and
        special tokens (``torch.tensor(pad_token_id)``) have a number other than 0. Until 5.0 it asks
        whether positions, made by ``- 1`` or ``+ 1``, have run past the ids
        (``cache_position[-1] >= input_ids.shape[1]``); they never have.
        """
        ref = self._live.get(tensor.untyped_storage()._cdata)
        op = self._rows[ref.row][BIRTH_OP] if ref is not None else -1
        question, inputs = self._made_by(op), self._inputs_made_by(op)
        finished = self._forward + 1 == len(self._forwards)
        if question == "eq" and "max" in inputs:
            return finished
        if question == "bitwise_and":
            return not finished
        if question == "max" or (question == "add" and "max" in inputs):
            return self._forward + 1
        if question == "lift_fresh":
            return 1
        if question == "gt" and "sum" in inputs:
            return False
        if question == "ge" and ("sub" in inputs or "add" in inputs):
            return False
        return super()._answer(tensor)


def _generates(module: torch.nn.Module) -> bool:
    """Whether it is the model itself, not what peft wraps around it."""
    from transformers import GenerationMixin

    return isinstance(module, GenerationMixin)


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors that a cache of transformers holds for its layers: keys, values, states."""
    if cache is None:
        return []
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    if parts[0] is not None:
        return [tensor for part in parts for tensor in cache_tensors(part)]
    held = [value for layer in cache.layers for value in vars(layer).values()]
    return [value for value in held if isinstance(value, torch.Tensor)]


def growing_layers(cache: Any) -> list[Any] | None:
    """The layers of a cache that get longer at every token; None if some are not understood."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    own = getattr(cache, "self_attention_cache", cache)  # cross attention's never grow
    if own is None:
        return None
    layers = [layer for layer in own.layers if layer.is_initialized]
    known = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return layers if known else None


def lengthen(layer: Any, tokens: int) -> None:
    """Give keys and values [batch, heads, tokens, head size] the length they have later.

    A sliding window keeps ``window - 1`` tokens, a view of the ``window`` that were last joined.
    """
    window = getattr(layer, "sliding_window", None)
    for name in ("keys", "values"):
        old = getattr(layer, name)
        batch, heads, length, size = old.shape
        if window is None:
            new = old.new_empty(batch, heads, length + tokens, size)
        else:
            new = old.new_empty(batch, heads, min(length + tokens, window), size)
            new = new[:, :, -window + 1 :, :]
        setattr(layer, name, new)
        del old, new
    if window is not None:
        layer.cumulative_length += tokens
