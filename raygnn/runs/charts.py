"""Charts of a run: training, parts of a step's time, resource use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from raygnn.runs.metrics_files import LOADER, STEP, Record, number, values

if TYPE_CHECKING:
    import pandas

Point = tuple[float, float]  # step, value
Trace = dict[str, Any]

_MOST_POINTS = 2000  # of a curve

_SPLITS = {"val": "validation", "test": "test"}
_MOST_METRICS = 12
_FROM_ZERO = {"yaxis": {"rangemode": "tozero"}}

COLORS = ("#3f7fd1", "#d9822b", "#3aa17e", "#c9485b", "#8a6fd1", "#b59a2a", "#3fa3b8", "#8a929c")
_COLORS_OF_PARTS = "d9822b 8a6fd1 6aa5e8 3568b8 c7a52a c9485b 3aa17e 8a929c 3fa3b8 b06fc0 b59a2a"
PART_COLORS = {part: f"#{color}" for part, color in zip((*STEP, *LOADER), _COLORS_OF_PARTS.split())}
_MOST_BARS = 400  # windows of a stack
_FIRST_WINDOWS = 3  # with more windows than these, the first one is omitted
_MOST_SHOWN = 512  # ranks
_MS = 1e3  # milliseconds in a second

_MOST_LINES = 8  # ranks that have a line each
_PERCENT = {"%": 0.01}
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}  # the smallest first
# name in markup, group and name in ranks.jsonl, title, units
_USAGE = (
    ("cpu", "use", "cpu", "Use of the ranks’ CPUs, {}", _PERCENT),
    ("gpu", "use", "gpu", "Use of the GPUs, {}", _PERCENT),
    ("rss", "memory", "rss", "Memory of the ranks, {}", _SIZES),
    ("gpu-memory", "memory", "gpu", "Memory on the GPUs, {}", _SIZES),
    ("gradients", "bytes", "gradients", "Gradients that a rank sends, {} a batch", _SIZES),
    ("exchange", "bytes", "exchange", "Ids and features that a rank sends, {} a batch", _SIZES),
    ("sent", "network", "sent", "Sent by the ranks’ hosts, {}/s", _SIZES),
    ("received", "network", "received", "Received by the ranks’ hosts, {}/s", _SIZES),
)


@dataclass(frozen=True)
class Chart:
    name: str  # in the page's markup; letters and hyphens
    title: str  # with the unit
    traces: Sequence[Trace]  # plotly's, as dicts of plain types
    height: int = 260
    layout: dict[str, Any] = field(default_factory=dict)  # additions to plotly's layout
    about: str = ""  # how to read it


def training_charts(records: Sequence[Record]) -> list[Chart]:
    """Return the charts of `metrics.jsonl` that have data."""
    charts = (loss(records), metrics(records), rate(records), speed(records))
    return [chart for chart in charts if chart]


def loss(records: Sequence[Record]) -> Chart | None:
    """Chart training and validation loss, also of each task; on a logarithmic axis if it spans
    decades."""
    titles = {"train/loss": "training", "val/loss": "validation"}
    for key in _keys(records, ("train/", "val/")):
        head, _, task = key.removesuffix("/loss").partition("/")
        if task and key.endswith("/loss") and len(titles) < _MOST_METRICS:
            titles[key] = f"{task}, {titles[f'{head}/loss']}"
    curves = {title: _points(records, key) for key, title in titles.items()}
    traces = [
        curve(title, points, COLORS[index % len(COLORS)])
        for index, (title, points) in enumerate(curves.items())
        if points
    ]
    if not traces:
        return None
    losses = [value for points in curves.values() for _, value in points]
    finite = [value for value in losses if math.isfinite(value)]
    wide = bool(finite) and min(finite) > 0 and max(finite) > 100 * min(finite)
    holes = len(losses) - len(finite)
    about = f"{holes:,} of the records have no finite loss: the gaps." if holes else ""
    layout = {"yaxis": {"type": "log", "dtick": 1}} if wide else {}
    return Chart("loss", "Loss", traces, layout=layout, about=about)


def metrics(records: Sequence[Record]) -> Chart | None:
    """Chart the validation metrics, and the test metrics as points."""
    keys = [key for key in _keys(records, ("val/", "test/")) if not key.endswith("/loss")]
    names = list(dict.fromkeys(key.partition("/")[2] for key in keys))[:_MOST_METRICS]
    traces = []
    for key in keys:
        split, _, name = key.partition("/")
        if name not in names:
            continue
        color = COLORS[names.index(name) % len(COLORS)]
        mark: dict[str, Any] = {}
        if split == "test":
            mark = {"mode": "markers", "marker": {"size": 10, "symbol": "diamond", "color": color}}
        traces.append(curve(f"{name}, {_SPLITS[split]}", _points(records, key), color, **mark))
    return Chart("metrics", "Metrics", traces) if traces else None


def rate(records: Sequence[Record]) -> Chart | None:
    """Chart the learning rate of each parameter group."""
    keys = [key for key in _keys(records, ("train/lr",)) if not key.endswith("/loss")]
    traces = []
    for key, color in zip(keys, COLORS):
        line = {"color": color, "width": 2, "shape": "hv"}
        traces.append(curve(key.removeprefix("train/"), _points(records, key), color, line=line))
    return Chart("rate", "Learning rate", traces, layout=_FROM_ZERO) if traces else None


def speed(records: Sequence[Record]) -> Chart | None:
    """Chart seeds per second over all ranks."""
    points = _points(records, "seeds_per_second")
    if not points:
        return None
    trace = curve("seeds/s", points, COLORS[2])
    return Chart("speed", "Throughput, seeds per second", [trace], layout=_FROM_ZERO)


def _points(records: Iterable[Record], key: str) -> list[Point]:
    return [(record["step"], number(record[key])) for record in records if key in record]


def _keys(records: Iterable[Record], heads: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(key for r in records for key in r if key.startswith(heads)))


def step_charts(ranks: Sequence[Record], hosts: Sequence[str]) -> list[Chart]:
    """Return the charts of the parts of a step's time that have data. ``ranks``: records of
    ``ranks.jsonl``, possibly none; ``hosts``: of each rank, as far as known."""
    if len(ranks) > _FIRST_WINDOWS:
        ranks = ranks[1:]  # the first window includes the startup, which dwarfs the rest
    table = _MS * of_ranks(ranks, "seconds")
    parts = [part for part in STEP if part in table]
    charts = [over_time(table, parts)] if parts else []
    if parts and table[parts[0]].shape[1] > 1:
        charts.append(by_rank(table, parts, hosts))
    return [*charts, *background(table)]


def over_time(table: pandas.DataFrame, parts: Sequence[str]) -> Chart:
    """Chart the parts of a step, stacked: the mean over the ranks. ``table``: milliseconds, see
    `of_ranks`; longer runs are averaged over stretches, each labelled by its last step."""
    bars = min(len(table), _MOST_BARS)
    stretches = np.arange(len(table)) * bars // len(table)
    steps = table.index.to_series().groupby(stretches).last().tolist()
    traces = [
        {
            "type": "bar",
            "name": part,
            "x": steps,
            "y": rounded(table[part].mean(axis=1).groupby(stretches).mean()),
            "marker": {"color": PART_COLORS[part]},
            "hovertemplate": "%{y:.4g} ms",
        }
        for part in parts
    ]
    return Chart(
        "split",
        "A step's time, milliseconds, mean over the ranks",
        traces,
        height=320,
        layout={**_FROM_ZERO, "barmode": "stack", "bargap": 0.1},
    )


def by_rank(table: pandas.DataFrame, parts: Sequence[str], hosts: Sequence[str]) -> Chart:
    """Chart each rank's mean over the run as a stacked bar. ``table``: milliseconds, see
    `of_ranks`."""
    names = [
        f"rank {rank}, {hosts[rank]}" if rank < len(hosts) and hosts[rank] else f"rank {rank}"
        for rank in range(min(table[parts[0]].shape[1], _MOST_SHOWN))
    ]
    every = math.ceil(len(names) / 64)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": [escape(name) for name in names],
            "x": rounded(table[part].mean())[: len(names)],
            "marker": {"color": PART_COLORS[part]},
            "hovertemplate": "%{y}: %{x:.4g} ms<extra>%{fullData.name}</extra>",
        }
        for part in parts
    ]
    axis = {"autorange": "reversed", "type": "category", "dtick": every, "ticklabelstandoff": 6}
    return Chart(
        "by-rank",
        "A step's time by rank, milliseconds, mean over the run",
        traces,
        height=90 + (28 if len(names) <= 16 else 16) * len(names),
        layout={"barmode": "stack", "xaxis": {"title": ""}, "yaxis": axis, "hovermode": "closest"},
        about="Ranks are in step with each other: a rank that is busy for longer makes “peers” and "
        "“communicate” of the other ranks longer.",
    )


def background(table: pandas.DataFrame) -> list[Chart]:
    """Chart the parts of the loader thread's time, if there are any. ``table``: milliseconds, see
    `of_ranks`."""
    traces = [
        curve(part, table[part].mean(axis=1).items(), PART_COLORS[part])
        for part in LOADER
        if part in table
    ]
    chart = Chart(
        "loader",
        "Preparing a batch, milliseconds, mean over the ranks",
        traces,
        layout=_FROM_ZERO,
        about="A thread prepares batches during the steps. If that takes longer than a step, the "
        "next step waits.",
    )
    return [chart] if traces else []


def usage_charts(ranks: Sequence[Record]) -> list[Chart]:
    """Return the charts of processors, memory and network that have data: a line per rank if there
    are few, else the median with the range."""
    tables = {group: of_ranks(ranks, group) for group in {group for _, group, *_ in _USAGE}}
    charts = []
    for name, group, key, title, units in _USAGE:
        table = tables[group].get(key)
        if table is None or table.isna().all(axis=None):
            continue
        most = table.max(axis=None)
        unit = ([unit for unit, size in units.items() if most >= 2 * size] or list(units)[:1])[-1]
        traces = _rank_lines(table / units[unit])
        charts.append(Chart(name, title.format(unit), traces, height=220, layout=_FROM_ZERO))
    return charts


def _rank_lines(table: pandas.DataFrame) -> list[Trace]:
    if table.shape[1] <= _MOST_LINES:
        return [curve(f"rank {rank}", table[rank].items(), COLORS[rank]) for rank in table]
    color = COLORS[0]
    edge = {"mode": "lines", "line": {"width": 0, "color": color}, "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": color + "33"}
    return [
        curve("least", table.min(axis=1).items(), color, **edge),
        curve("most", table.max(axis=1).items(), color, **edge, **fill),
        curve("median", table.median(axis=1).items(), color),
    ]


def curve(name: str, points: Iterable[Point], color: str, **more: Any) -> Trace:
    """Return a line through the points, with markers if they are few."""
    kept = thin([*points])
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= 30 else "lines",
        "name": escape(name),
        "x": [step for step, _ in kept],
        "y": rounded(value for _, value in kept),
        "line": {"color": color, "width": 2},
        "marker": {"size": 5},
        **more,
    }


def thin(points: Sequence[Point]) -> list[Point]:
    """Reduce the points to a bounded number: the first, the last, and the minimum and maximum of
    each stretch, so that no spike is lost. A stretch of NaNs alone remains, as a gap."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    inner = points[1:-1]
    stretches = min(len(inner), (_MOST_POINTS - 2) // 2)
    kept = [points[0]]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        finite = [i for i, (_, value) in enumerate(stretch) if math.isfinite(value)] or [0]
        extremes = (pick(finite, key=lambda i: stretch[i][1]) for pick in (min, max))
        kept += [stretch[i] for i in sorted({*extremes})]
    return [*kept, points[-1]]


def of_ranks(records: Sequence[Record], group: str) -> pandas.DataFrame:
    """Return a group of ``ranks.jsonl``: a row per record, with its step as index, and a column per
    name and rank, NaN = unknown."""
    import pandas

    rows = [(record["step"], row) for record in records if (row := values(record, group))]
    steps = [step for step, _ in rows]
    columns = {
        name: pandas.DataFrame([row.get(name, []) for _, row in rows], steps, dtype=float)
        for name in dict.fromkeys(name for _, row in rows for name in row)
    }
    return pandas.concat(columns, axis=1) if columns else pandas.DataFrame()


def rounded(values: Iterable[float]) -> list[float | None]:
    """Round to five digits, more than a screen shows; None, a gap, for numbers that are not
    finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
