"""Autocast for meta tensors, acted out as it works for real tensors.

torch's autocast kernels sit at a dispatch key of the tensors' device and leave meta tensors alone.
While ``autocast_for`` is active, that key counts for meta tensors too, and its kernels are ours:
they cast by the same lists and keep casts of fp32 parameters in a cache that lives as long as
torch's, until the outermost region ends. Sitting in the dispatcher, they also see the ``bmm`` that
``einsum`` or ``matmul`` call inside C++. State (on or off, dtype, nesting) stays torch's own, so
that ``torch.autocast``, nested regions, checkpointing and ``custom_fwd`` need no help; only the
device type "meta" is made to mean the device that is acted out.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.library import Library

from llmem.trace.autocast_lists import Policy, policy_of

aten = torch.ops.aten

_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}


def autocast_on_meta(dtype: str) -> AbstractContextManager[Any]:
    """An autocast region for meta tensors; ``dtype`` is "bfloat16" or "float16".

    Works while ``autocast_for`` is active, as it is in every trace on meta.
    """
    return torch.autocast("meta", dtype=getattr(torch, dtype))


@contextmanager
def autocast_for(device: str) -> Iterator[None]:
    """Autocast regions act on meta tensors as on those of ``device`` ("cuda" or "cpu")."""
    cache = _CastCache()
    name = _KEYS[device]
    key = getattr(torch._C.DispatchKey, name)
    library = Library("aten", "IMPL")  # destroyed below
    with ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that are replaced on purpose
            for op in torch._C._dispatch_get_registrations_for_dispatch_key(name):
                if op.startswith("aten::"):
                    op = op.removeprefix("aten::")
                    kernel = _kernel(op, device, key, cache)
                    library.m.impl(op, name, kernel)  # type: ignore[union-attr]
        torch._C._dispatch_tls_set_dispatch_key_included(key, True)
        stack.callback(torch._C._dispatch_tls_set_dispatch_key_included, key, False)
        stack.enter_context(_meta_means(device))
        stack.enter_context(_cleared_with_torchs(cache))
        yield


# -- casts ---------------------------------------------------------------------------------------


class _CastCache:
    """``cached_cast`` of aten/src/ATen/autocast_mode.cpp."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, value: Any, dtype: torch.dtype, lower: torch.dtype) -> Any:
        """``value`` (a tensor, a list of them, anything): its eligible tensors in ``dtype``."""
        if isinstance(value, (list, tuple)):
            return [self.cast(item, dtype, lower) for item in value]
        if not _eligible(value) or value.dtype == dtype:
            return value
        if not (dtype == lower and _is_weight(value) and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        known = self._casts.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        made = value.to(dtype)
        self._casts[id(value)] = weakref.ref(value), made
        return made


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_meta
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a cast may be cached: an fp32 leaf that is trained (never in inference mode)."""
    return (
        not torch.is_inference_mode_enabled()
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
    )


def _kernel(op: str, device: str, key: Any, cache: _CastCache) -> Callable[..., Any]:
    """The autocast kernel of ``op``: cast the arguments, run the op with autocast off."""
    base, _, overload = op.partition(".")
    func = getattr(getattr(aten, base), overload or "default")
    policy = policy_of(op, device)
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if policy is Policy.BANNED:
                raise RuntimeError(f"{op} is unsafe to autocast")
            if policy is Policy.FP32_RESULT:
                return func(*args, **_with_dtype(func, args, kwargs))
            if policy is Policy.FP32_NORM:
                return _norm(args)
            dtype = {Policy.LOWER: lower, Policy.FP32: torch.float32}.get(policy)
            if dtype is None:
                dtype = _widest(lower, [*args, *kwargs.values()])
            # The C++ kernel casts inside a call's parentheses: GCC makes such temporaries last to
            # first, and C++ drops them first to last.
            named = {k: cache.cast(v, dtype, lower) for k, v in reversed(kwargs.items())}
            casts = [cache.cast(arg, dtype, lower) for arg in reversed(args)][::-1]
            out = func(*casts, **named)
            for position in range(len(casts)):
                casts[position] = None
            return out

    return kernel


def _with_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` with dtype fp32, if the first argument is eligible and no dtype was asked for."""
    names = [argument.name for argument in func._schema.arguments]
    asked = dict(zip(names, args, strict=False)) | kwargs
    if not _eligible(args[0]) or asked.get("dtype") is not None:
        return kwargs
    if names.index("dtype") < len(args):
        raise NotImplementedError(f"{func} was given None for dtype by position")
    return {**kwargs, "dtype": torch.float32}


def _norm(args: tuple[Any, ...]) -> torch.Tensor:
    """``norm(x[, p[, dim[, keepdim]]])`` as the overload that takes a dtype."""
    x, *rest = args
    dtype = torch.float32 if _eligible(x) else x.dtype
    order = rest[0] if rest else 2
    if len(rest) < 2:
        return aten.norm.ScalarOpt_dtype(x, order, dtype=dtype)  # type: ignore[no-any-return]
    keepdim = rest[2] if len(rest) > 2 else False
    return aten.norm.ScalarOpt_dim_dtype(x, order, rest[1], keepdim, dtype=dtype)  # type: ignore[no-any-return]


def _widest(lower: torch.dtype, values: list[Any]) -> torch.dtype:
    """``promote_type``: fp32 if an eligible tensor has it, else the lower precision."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if _widest(lower, list(value)) == torch.float32:
                return torch.float32
        elif _eligible(value) and value.dtype == torch.float32:
            return torch.float32
    return lower


# -- torch's own state, made to know "meta" --------------------------------------------------------


@contextmanager
def _meta_means(device: str) -> Iterator[None]:
    """Wherever code names the device type "meta" to autocast, it means ``device``."""

    def named(device_type: str) -> str:
        return device if device_type == "meta" else device_type

    def translated(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], str):
                args = (named(args[0]), *args[1:])
            elif "device_type" in kwargs:
                kwargs["device_type"] = named(kwargs["device_type"])
            return original(*args, **kwargs)

        return call

    init = torch.autocast.__init__
    cast = autocast_mode._cast

    def init_named(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, named(device_type), *args, **kwargs)

    def cast_inputs(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "meta" if device_type == device else device_type, dtype)

    with ExitStack() as stack:
        replace = _Replacer(stack)
        replace(torch.autocast, "__init__", init_named)
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            replace(torch, name, translated(getattr(torch, name)))
        for module in (torch.amp, autocast_mode):
            replace(module, "is_autocast_available", translated(module.is_autocast_available))
        replace(autocast_mode, "_cast", cast_inputs)  # of custom_fwd(cast_inputs=...)
        if device == "cuda":
            # The region is entered although this machine has no GPU.
            replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
            replace(torch.cuda, "is_bf16_supported", lambda *_: True)
        generic = sys.modules.get("transformers.utils.generic")
        if generic is not None and hasattr(generic, "maybe_autocast"):
            replace(generic.maybe_autocast, "__code__", _maybe_autocast.__code__)
        yield


def _maybe_autocast(
    device_type: str,
    dtype: Any = None,
    enabled: bool = True,
    cache_enabled: Any = None,
) -> Any:
    """``maybe_autocast`` of transformers/utils/generic.py without its exception for meta.

    Its code stands in for that function's, which models have imported under their own names.
    """
    from contextlib import nullcontext

    import torch

    if torch.is_autocast_enabled(device_type) or enabled:
        return torch.autocast(
            device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
        )
    return nullcontext()


@contextmanager
def _cleared_with_torchs(cache: _CastCache) -> Iterator[None]:
    """Clear ``cache`` whenever torch clears its own: when the outermost region ends."""
    original = torch.clear_autocast_cache

    def clear() -> None:
        original()
        cache.clear()

    with ExitStack() as stack:
        _Replacer(stack)(torch, "clear_autocast_cache", clear)
        stack.callback(cache.clear)
        yield


class _Replacer:
    """Sets attributes until a stack unwinds."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, owner: Any, name: str, value: Any) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
