"""What the ranks used: processors, memory, the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raygnn.runs.metrics_files import Record
from raygnn.runs.report.arrays import Array, Table, of_ranks, over
from raygnn.runs.report.chart import COLORS, Chart, Trace, curve
from raygnn.runs.report.thin import Point

_MOST_LINES = 8  # ranks that have a line each
# units, the smallest first
_SHARE = {"%": 0.01}
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# name in markup, group and name in ranks.jsonl, title, units
_CHARTS = (
    ("cpu", "use", "cpu", "Use of the ranks’ CPUs, {}", _SHARE),
    ("gpu", "use", "gpu", "Use of the GPUs, {}", _SHARE),
    ("rss", "memory", "rss", "Memory of the ranks, {}", _SIZES),
    ("gpu-memory", "memory", "gpu", "Memory on the GPUs, {}", _SIZES),
    ("gradients", "bytes", "gradients", "Gradients that a rank sends, {} a batch", _SIZES),
    ("exchange", "bytes", "exchange", "Ids and features that a rank sends, {} a batch", _SIZES),
    ("sent", "network", "sent", "Sent by the ranks’ hosts, {}/s", _SIZES),
    ("received", "network", "received", "Received by the ranks’ hosts, {}/s", _SIZES),
)


def charts(ranks: Sequence[Record]) -> list[Chart]:
    """Those that there is something to draw of; a line for each of a few ranks, else the median
    with the range of all."""
    groups = dict.fromkeys(group for _, group, *_ in _CHARTS)
    tables = {group: of_ranks(ranks, group) for group in groups}
    found = []
    for name, group, key, title, units in _CHARTS:
        column = tables[group].columns.get(key)
        if column is None or not np.isfinite(column).any():
            continue
        most = column[np.isfinite(column)].max()
        fit = [unit for unit, size in units.items() if most >= 2 * size] or list(units)[:1]
        traces = _lines(tables[group], column / units[fit[-1]])
        layout = {"yaxis": {"rangemode": "tozero"}}
        found.append(Chart(name, title.format(fit[-1]), traces, height=220, layout=layout))
    return found


def _lines(table: Table, column: Array) -> list[Trace]:
    if column.shape[1] <= _MOST_LINES:
        return [
            curve(f"rank {rank}", _points(table, column[:, rank]), COLORS[rank % len(COLORS)])
            for rank in range(column.shape[1])
        ]
    color = COLORS[0]
    edge = {"mode": "lines", "line": {"width": 0, "color": color}, "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": color + "33"}
    return [
        curve("least", _points(table, over(np.nanmin, column, 1)), color, **edge),
        curve("most", _points(table, over(np.nanmax, column, 1)), color, **edge, **fill),
        curve("median", _points(table, over(np.nanmedian, column, 1)), color),
    ]


def _points(table: Table, values: Array) -> list[Point]:
    return list(zip(table.steps.tolist(), values.tolist()))
