"""What the notebooks share: units, and `experiments` (which is not installed) on the path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def gib(nbytes: Any) -> Any:
    """Bytes, or an array of bytes, in GiB."""
    return nbytes / 2**30
