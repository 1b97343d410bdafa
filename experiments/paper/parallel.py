"""LLMem's methods on four V100 of 16 GB, traced: ``python -m experiments.paper.parallel``.

4DP is Gemini over four GPUs, 4TP Colossal-AI's 1-D tensor parallelism over four, 2DP+2TP Gemini over two
pairs that split tensors. For each: the batch that Algorithm 1 finds by the paper's equations, for two
bases; whether one rank's trace fits the card there, under the allocator model; the largest batch that
does; and Table 3's cell (kind 3: published; seconds, or OOM).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache

from experiments.paper.setting import GPU, MIB, clipped_mb, loss_of_4_29, rows, spec_of
from experiments.paper.table3 import BASES, decide
from llmem.baselines.algorithm1 import largest_batch
from llmem.estimate import Estimate, estimate_trace
from llmem.lifetimes import Trace
from llmem.scaling import Scaled, scaled
from llmem.spec import RunSpec
from llmem.trace.run import trace_spec

MODELS = ("opt-2.7b", "bloom-1b7", "bloom-3b", "codegen-2b", "gpt-neo-1.3b")
GPUS = 4
METHODS = {"4DP": ("ADP", 1), "2DP+2TP": ("DP+TP", 2), "4TP": ("TP", 4)}
"""Name in print -> (Algorithm 1's name, tensor-parallel degree)."""


def spec_at(model: str, batch: int, tp: int) -> RunSpec:
    """A run of the paper on four GPUs, ``tp`` of which split tensors."""
    plan = {"tp": tp, "tp_plan": "colossal"} if tp > 1 else {}
    return spec_of(model, batch, GPUS).model_copy(update=plan)


@cache
def trace_at(model: str, batch: int, tp: int) -> Trace:
    with loss_of_4_29(model):
        return trace_spec(spec_at(model, batch, tp), compute_dtype="float16")


@cache
def lines_of(model: str, tp: int) -> Scaled | None:
    return scaled(trace_at(model, 2, tp), trace_at(model, 4, tp), 2, 4)


@cache
def traced(model: str, batch: int, tp: int) -> Estimate:
    """The estimate at any batch, from two traces where bytes lie on lines."""
    lines = lines_of(model, tp)
    trace = trace_at(model, batch, tp) if lines is None else lines.at(batch)
    return estimate_trace(trace, spec_at(model, batch, tp))


def fits(model: str, batch: int, tp: int) -> bool:
    found = traced(model, batch, tp).fit
    return found is not None and found.fits


@dataclass(frozen=True)
class Row:
    """One method of one model: batches by the equations, by trace, and the published cell."""

    model: str
    method: str
    asked: dict[int, int]
    """Base, MiB -> the batch of Algorithm 1 (0: not even one sequence)."""
    largest: int
    published: str
    """Seconds, ``OOM``, or '' where Table 3 has no such row."""

    @property
    def agrees(self) -> bool | None:
        """Whether the trace finds room for a sequence where the paper's run went through."""
        return None if not self.published else (self.largest > 0) == (self.published != "OOM")


def row_of(model: str, method: str) -> Row:
    name, tp = METHODS[method]
    asked = {
        base: next(s.batch for s in decide(model, base).scores if s.method == name) for base in BASES
    }
    published = next((row[method] for row in rows("table3") if row["model"] == model), "")
    # Cached blocks may serve a larger batch and not a smaller one, which bisection does not see.
    also = [batch for batch in asked.values() if batch and fits(model, batch, tp)]
    largest = max([largest_batch(lambda b: fits(model, b, tp)), *also])
    return Row(model, method, asked, largest, published)


def show(row: Row) -> None:
    tp = METHODS[row.method][1]
    cells = []
    for base, batch in row.asked.items():
        verdict = "no batch" if not batch else "fits" if fits(row.model, batch, tp) else "OOM"
        cells.append(f"{base:4} MiB: {batch:3} {verdict:8}")
    at = traced(row.model, max(row.largest, 1), tp)
    same = {None: "not in Table 3", True: "agrees", False: "DIFFERS"}[row.agrees]
    print(f"  {row.method:8} {'  '.join(cells)}  trace: largest {row.largest:3} "
          f"({at.worst.peak.allocated / MIB:6,.0f} MiB allocated, {clipped_mb(at):6,.0f} on the card)  "
          f"paper {row.published or '-':>6}  {same}", flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models whose name contains this text")
    given = parser.parse_args(arguments)
    verdicts = []
    print(f"4 x {GPU}, 512 tokens, Gemini in fp16, gradient checkpointing; batches per replica")
    for model in MODELS:
        if given.only in model:
            print(f"\n{model}: Algorithm 1 by base, what the trace says there")
            for method in METHODS:
                row = row_of(model, method)
                show(row)
                verdicts.append(row.agrees)
    known = [verdict for verdict in verdicts if verdict is not None]
    print(f"\nwhether a method runs at all: trace and paper agree in {sum(known)} of {len(known)} cells")
    print(NOTES)


NOTES = """
- The batches of Table 3's runs are not published. A cell agrees if one sequence fits where the paper has
  seconds, or none where it has OOM.
- Equation (9) adds, over the layers, the parts of other ranks that backward's all-gathers receive. In the
  trace each gather makes the tensors of its list (together the whole gradient, of which (tp-1)/tp is
  equation (9)'s term), NCCL's flat copy of them, and what is put side by side; all but the last are
  freed at once, so the sum over layers never lives together."""


if __name__ == "__main__":
    main()
