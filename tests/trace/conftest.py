from __future__ import annotations

import pytest
import torch

from .net import Net


@pytest.fixture
def net() -> Net:
    """A fresh one on the meta device."""
    with torch.device("meta"):
        return Net()
