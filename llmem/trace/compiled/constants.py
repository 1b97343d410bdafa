"""Tensors that code makes while Dynamo traces it, from numbers that it has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensorMode


def constants_become_fake() -> AbstractContextManager[Any]:
    """``torch.tensor(numbers)`` and ``x[[1, 2]]`` are traced on meta as on every other device.

    Elsewhere such a tensor is made on the host and lifted, by which it becomes fake. On meta nothing is
    lifted (torch/csrc/utils/tensor_new.cpp): it meets fake tensors as it is, and they refuse it.
    """
    original = FakeTensorMode.__init__

    def begin(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> None:
        original(mode, *args, **(kwargs | {"allow_non_fake_inputs": True}))

    return patch.object(FakeTensorMode, "__init__", begin)
