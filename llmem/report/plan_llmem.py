"""LLMem's Algorithm 1, as text."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmem.plan_llmem import LlmemPlan
from llmem.report.text import size


def print_llmem_plan(plan: LlmemPlan, console: Console | None = None) -> None:
    """The four methods, their largest batches and scores, and the pick."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("method", "largest batch per replica", "score", "per GPU", ""):
        table.add_column(name, justify="left" if name in ("method", "") else "right")
    rows = [*plan.methods, *([plan.offload] if plan.offload else [])]
    for row in rows:
        used = "" if row.device_bytes is None else size(row.device_bytes)
        batch = "?" if row.why_not else str(row.batch or "none")
        table.add_row(row.method, batch, f"{row.score:g}", used, escape(row.why_not or ""))
    console.print(table)
    console.print(
        f"[bold]pick: {plan.pick}[/bold] (by {plan.by}, against {size(plan.capacity)} per GPU)"
    )
