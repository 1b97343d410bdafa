"""An estimate as one self-contained page: timeline by category, tables, assumptions."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from llmem.errors import LlmemError
from llmem.estimate import Estimate, Rank
from llmem.explain import largest_at_peak
from llmem.lifetimes import Phase
from llmem.report.ranks import spans, whose
from llmem.report.text import LABELS, size

LABEL_SHARE = 0.05
"""Least distance between the names of two phases, of the width; closer ones have their line alone."""

GREY, GRID, CLEAR = "#777", "rgba(128,128,128,.25)", "rgba(0,0,0,0)"
"""Legible on white and on black: the page follows the reader's colour scheme."""

POINTS = 3000
"""Points per curve; each shows the largest total of its stretch, so no peak is lost."""

GIB = 2**30

COLOURS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer_states": "#55a868",
    "activations": "#c44e52",
    "logits_and_loss": "#8172b3",
    "communication": "#937860",
    "workspace": "#8c8c8c",
    "other": "#ccb974",
}


def write_page(result: Estimate, path: Path) -> None:
    """Write the page. Raises LlmemError if plotly is missing or the file cannot be written."""
    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise LlmemError(f"cannot write {path}: {error.strerror}; choose another --html") from None


def page(result: Estimate) -> str:
    """The page's HTML; every text in it is escaped."""
    from jinja2 import Environment

    source = files("llmem.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(source)
    worst = result.worst
    levels = [
        (name, *(size(getattr(item, name)) for item in (worst.first, worst.steady, worst.peak)))
        for name in vars(worst.peak)
    ]
    total = max(worst.peak.allocated, 1)
    parts = [
        (LABELS.get(name, name), size(nbytes), f"{nbytes / total:.1%}", COLOURS[name])
        for name, nbytes in worst.breakdown.items()
        if nbytes
    ]
    return template.render(
        result=result,
        worst=worst,
        whose=whose(result),
        spans=spans,
        levels=levels,
        parts=parts,
        held=largest_at_peak(worst, 25),
        size=size,
        figure=_figure(worst),
        versions=result.to_json()["versions"],
    )


def _figure(rank: Rank) -> Any:
    """The timeline as markup that needs no network (plotly's own script is inside)."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise LlmemError(
            "--html draws with plotly, which is not installed; pip install 'llmem-estimator[html]'"
        ) from None
    from markupsafe import Markup

    timeline = rank.timeline
    start = timeline.span(rank.table.trace.step_ticks[0], 2**62)[0]
    picked = _picked(timeline.allocated[start:]) + start
    figure = go.Figure()
    for name, curve in timeline.by_part().items():
        values = curve[picked] / GIB
        if values.max() > 0:
            figure.add_scatter(
                x=picked, y=values, name=LABELS.get(name, name), stackgroup="allocated",
                line={"width": 0, "color": COLOURS[name]}, hovertemplate="%{y:.3f} GiB",
            )  # fmt: skip
    figure.add_scatter(
        x=picked, y=timeline.reserved[picked] / GIB, name="reserved",
        line={"color": GREY, "dash": "dot", "width": 1.5}, hovertemplate="%{y:.3f} GiB",
    )  # fmt: skip
    _mark_phases(figure, rank, start)
    peak = rank.peak_at.index
    figure.add_annotation(
        x=peak, y=timeline.allocated[peak] / GIB, text="peak", showarrow=True, arrowhead=2,
        arrowcolor=GREY,
    )  # fmt: skip
    figure.update_layout(
        template="plotly_white", hovermode="x unified", height=520,
        xaxis_title="allocations and frees, in order", yaxis_title="GiB",
        legend={"orientation": "h", "y": -0.15}, margin={"t": 60, "r": 40},
        paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, modebar={"bgcolor": CLEAR, "color": GREY},
        font={"color": GREY}, hoverlabel={"bgcolor": "white", "font": {"color": "#222"}},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False)
    return Markup(figure.to_html(full_html=False, include_plotlyjs=True))


def _picked(curve: np.ndarray) -> np.ndarray:
    """Indices of the maximum of each of POINTS equal stretches."""
    if len(curve) <= POINTS:
        return np.arange(len(curve))
    edges = np.linspace(0, len(curve), POINTS + 1).astype(int)
    return np.array(
        [a + int(np.argmax(curve[a:b])) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    )


def _mark_phases(figure: Any, rank: Rank, start: int) -> None:
    timeline = rank.timeline
    least = LABEL_SHARE * (len(timeline.events) - start)
    last, named = None, -least
    for tick, phase, _ in rank.table.trace.phase_ticks:
        if phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER) or phase == last:
            continue
        last, x = phase, max(timeline.span(tick, tick)[0], start)
        figure.add_vline(x=x, line={"color": GREY, "width": 1, "dash": "dash"}, opacity=0.5)
        if x - named >= least:
            named = x
            figure.add_annotation(
                x=x, y=1, yref="paper", yanchor="bottom", text=phase.label, showarrow=False
            )
