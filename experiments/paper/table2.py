"""LLMem's Table 2, one GPU: ``python -m experiments.paper.table2``.

Published: LLMem's and DNNMem's estimates, nvidia-smi's truth. Ours, at an inferred batch: LLMem's
equations, what its code computes, DNNMem's walk, and the tracer with Gemini under the allocator model,
without a limit and on a card of 16 GB. Batch sizes are not published. The rule: the largest that fits
the card at 512 tokens, since the truths lie at 98.3 to 99.96% of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from experiments.paper.setting import (
    CAPACITY_MB,
    baseline_mb,
    clipped_mb,
    fits,
    rows,
    traced,
    unlimited_mb,
)
from llmem.baselines.algorithm1 import largest_batch

ESTIMATES = ("llmem-paper", "llmem-code", "dnnmem")


def batch_by(name: str, model: str, base_mb: float | None = None) -> int:
    """The largest batch that the baseline's estimate lets onto the card."""

    def fit(batch: int) -> bool:
        found = baseline_mb(name, model, batch, base_mb=base_mb)
        return found is not None and found <= CAPACITY_MB

    return largest_batch(fit)


def nearest_batch(name: str, model: str, published: float, base_mb: float) -> int:
    """The batch whose estimate is nearest to the published one, by bisection and a last look."""
    below = largest_batch(
        lambda batch: (baseline_mb(name, model, batch, base_mb=base_mb) or 0.0) <= published
    )
    return min(
        (max(below, 1), below + 1),
        key=lambda b: abs((baseline_mb(name, model, b, base_mb=base_mb) or 0.0) - published),
    )


def error(value: float, truth: float) -> str:
    return f"{value:10,.0f} {value / truth - 1:+7.1%}"


@dataclass(frozen=True)
class Line:
    """A model of the table, MiB: as published (``truth``, ``llmem``, ``dnnmem``) and ours.

    ``ours`` holds the baselines at ``batch``; ``unlimited`` is the tracer with all the memory it asks
    for, ``clipped`` on the card, which is what the published truth can show.
    """

    model: str
    truth: float
    llmem: float
    dnnmem: float
    batch: int
    ours: dict[str, float]
    unlimited: float
    clipped: float


def line_of(row: dict[str, str]) -> Line:
    """The published row beside our estimates at the inferred batch."""
    model = row["model"]
    batch = largest_batch(lambda b: fits(model, b))
    result = traced(model, batch)
    ours = {name: baseline_mb(name, model, batch) or 0.0 for name in ESTIMATES}
    return Line(
        model, *(float(row[k]) for k in ("truth_mb", "llmem_mb", "dnnmem_mb")), batch, ours,
        unlimited_mb(result), clipped_mb(result),
    )  # fmt: skip


def show(line: Line) -> None:
    """Print a model's block."""
    model, truth, batch = line.model, line.truth, line.batch
    print(f"\n{model}: truth {truth:,.0f} MB (published); inferred batch {batch}")
    print(f"  {'':34}{'MB':>10} {'error':>7}")
    print(f"  {'LLMem, published':34}{error(line.llmem, truth)}")
    print(f"  {'DNNMem, published':34}{error(line.dnnmem, truth)}")
    for name, value in line.ours.items():
        other = baseline_mb(name, model, batch + 1) or 0.0
        print(f"  {name + ', ours':34}{error(value, truth)}   {other - value:+,.0f} for one more")
    print(f"  {'tracer, Gemini, no limit':34}{error(line.unlimited, truth)}")
    print(f"  {'tracer, Gemini, 16 GB card':34}{error(line.clipped, truth)}   the clipped truth")
    sensitivity(model, batch, line.llmem)


def sensitivity(model: str, batch: int, published: float) -> None:
    """What the batch would be by other rules, and by LLMem's own estimate."""
    by = {name: batch_by(name, model) for name in ("llmem-paper", "llmem-code")}
    solved = {
        name: [nearest_batch(name, model, published, base) for base in (1500, 150)] for name in by
    }
    print(f"  batch by the rule: {batch} (tracer), "
          + ", ".join(f"{found} ({name})" for name, found in by.items()))  # fmt: skip
    print("  batch that gives LLMem's published estimate, base 1500 to 150 MiB: "
          + ", ".join(f"{low}-{high} ({name})" for name, (low, high) in solved.items()))  # fmt: skip
    marks = [f"{b}: {clipped_mb(traced(model, b)):,.0f}{'' if fits(model, b) else ' OOM'}"
             for b in (batch - 1, batch, batch + 1) if b > 0]  # fmt: skip
    print(f"  clipped truth by batch: {', '.join(marks)}")


NOTES = """
What the published numbers do not say, or say twice:
- bloom-560m's estimate (16,578) is above the card's 16,384, though the run fitted: as a test for running
  out of memory it is wrong, and it was not made by the code's own search, which stops below the card.
- The paper's equations ignore biases and round once; the code charges each bias 4 MiB and rounds each
  tensor. Table 2 does not tell which of them made it: both give its numbers at nearby batches.
- All truths are within 2% of the card: at the largest batch the allocator fills the card and then gives
  cached blocks back, so the truth is about 16 GB for any model, and any estimate of about the card's
  size has a small error. See "no limit" above for what the same run would take on a larger card; a
  replication on an A100 of 80 GB found 6 to 10% error (github.com/taehokim20/LLMem, issue 1).
- DNNMem is not in the released repository; ours is the variant that llmem.baselines.dnnmem describes."""


def main() -> None:
    lines = [line_of(row) for row in rows("table2")]
    for line in lines:
        show(line)
    ours = fmean(abs(line.clipped / line.truth - 1) for line in lines)
    theirs = fmean(abs(line.llmem / line.truth - 1) for line in lines)
    print(f"\nmean error against the published truth: clipped tracer {ours:.1%}, "
          f"LLMem as published {theirs:.1%}")  # fmt: skip
    print(NOTES)


if __name__ == "__main__":
    main()
