"""``--strategy zero3``: the pass, the optimizer's step, and one table for all ranks."""

from __future__ import annotations

from llmem.lifetimes import Trace
from llmem.parallel import RankTable
from llmem.parallel.host_step import step_on_host
from llmem.parallel.zero.options import ZeroOptions
from llmem.parallel.zero.stage3 import Zero3Pass
from llmem.parallel.zero.step import trace_step
from llmem.spec import RunSpec


def stage3_ranks(trace: Trace, spec: RunSpec, options: ZeroOptions) -> list[RankTable]:
    """All ranks keep equally many elements, padding included."""
    engine = Zero3Pass(trace, options)
    editor = engine.run()
    if options.offload_optimizer != "none":
        optimizer = step_on_host(editor)
    else:
        step = trace_step(
            engine.group_steps(),
            options,
            spec,
            steps=len(trace.step_ticks) - 1,
            gradient_dtype=options.accumulation_dtype,
        )
        step.splice(editor)
        optimizer = step.trace.optimizer
    lifetimes, named = editor.finish()
    everyone = tuple(range(options.world))
    return [RankTable(0, lifetimes, named, optimizer, list(options.notes), everyone)]
