"""Every batch size from two traces.

The bytes of a storage are affine in the micro-batch: weights do not grow, activations do, in
proportion. Two traces of the same step at two batch sizes have the same ops in the same order, so
a third batch size is a line through each row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llmem.lifetimes import Trace


@dataclass(frozen=True)
class Scaled:
    """The lines through two traces of one step, at ``small`` and ``large`` sequences per batch."""

    trace: Trace
    other: Trace
    small: int
    large: int

    def at(self, batch: int) -> Trace:
        """The trace at ``batch`` sequences.

        Exact where both traces were made by the same kernels; scratch that grows in steps (cuts of
        a reduction) is interpolated.
        """
        first, second = self.trace.lifetimes, self.other.lifetimes
        slope = (second.nbytes - first.nbytes) / (self.large - self.small)
        nbytes = np.rint(first.nbytes + slope * (batch - self.small)).astype(np.int64)
        return replace(self.trace, lifetimes=first.with_columns(nbytes=np.maximum(nbytes, 0)))


def scaled(small: Trace, large: Trace, small_batch: int, large_batch: int) -> Scaled | None:
    """The lines through two traces, or None if the two steps did not run the same ops.

    (An attention kernel chosen by size, a router that takes another path.)
    """
    same = (
        small.names == large.names
        and np.array_equal(small.ops.name, large.ops.name)
        and np.array_equal(small.lifetimes.birth, large.lifetimes.birth)
        and np.array_equal(small.lifetimes.death, large.lifetimes.death)
    )
    return Scaled(small, large, small_batch, large_batch) if same else None
