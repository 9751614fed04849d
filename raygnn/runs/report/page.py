"""The page: what was read, as HTML that needs nothing else."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from raygnn import __version__
from raygnn.runs.report import balance, curves, split, tables, usage
from raygnn.runs.report.chart import Chart, as_json
from raygnn.runs.report.source import Source

_HERE = Path(__file__).parent


def html(source: Source) -> str:
    """The whole page. All text that comes from files is escaped."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    training = curves.charts(source.records)
    steps = split.charts(source.records, source.ranks, tables.hosts(source))
    used = usage.charts(source.ranks)
    parts = [chart] if (chart := balance.chart(source.partition)) else []
    drawn: list[Chart] = [*training, *steps, *used, *parts]
    data = {chart.name: chart.data() for chart in drawn}
    return environment.get_template("page.html").render(
        name=source.path.name,
        path=str(source.path),
        error=tables.text(source.summary.get("error")),
        faults=source.faults,
        tiles=tables.tiles(source),
        started=tables.when(source.summary.get("started")),
        written=tables.when(datetime.now(timezone.utc).isoformat(timespec="seconds")),
        version=__version__,
        training=training,
        steps=steps,
        used=used,
        slow_ranks=tables.slow_ranks(source),
        advice=tables.advice(source),
        parts=parts,
        part_rows=balance.table(source.partition),
        partition=source.partition,
        verdict=tables.text(source.preflight.get("verdict")),
        findings=tables.findings(source),
        nodes=tables.nodes(source),
        events=tables.events(source),
        machine=tables.machine(source),
        config=tables.config_text(source),
        style=Markup((_HERE / "page" / "page.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "page" / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs() if drawn else ""),
        data=Markup(as_json(data)),
    )


def figure(source: Source) -> Any:
    """The curves and the split as one figure of plotly's, for a notebook."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    found = [
        curves.loss(source.records),
        curves.metrics(source.records),
        curves.speed(source.records),
        *split.charts(source.records, source.ranks, tables.hosts(source))[:1],
    ]
    shown = [chart for chart in found if chart is not None]
    if not shown:
        return go.Figure(layout={"title": {"text": "no records yet"}})
    fig = make_subplots(
        rows=len(shown),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.25 / (len(shown) + 1),
        subplot_titles=[chart.title for chart in shown],
    )
    for row, chart in enumerate(shown, start=1):
        for trace in chart.traces:
            fig.add_trace({**trace, "legend": f"legend{row if row > 1 else ''}"}, row=row, col=1)
        fig.update_yaxes(chart.layout.get("yaxis", {}), row=row, col=1)
        domain = fig.layout[f"yaxis{row if row > 1 else ''}"].domain
        fig.update_layout({f"legend{row if row > 1 else ''}": {"y": domain[1], "yanchor": "top"}})
    fig.update_xaxes(title_text="step", row=len(shown), col=1)
    fig.update_layout(
        height=90 + 240 * len(shown),
        barmode="stack",
        template="plotly_white",
        hovermode="x unified",
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
    )
    return fig
