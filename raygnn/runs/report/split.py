"""Where the time of a step goes, on each rank: over time, on the whole, and who held up whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from raygnn.runs.metrics_files import LOADER, SHARED_PARTS, STEP, Record
from raygnn.runs.report.arrays import Array, Table, of_means, of_ranks, over, plain
from raygnn.runs.report.chart import PART_COLORS, Chart, Trace, curve

_MOST_NUMBERS = 100_000  # of all ranks' parts over time
_FEW = 40  # points that are drawn as bars
_FIRST = 3  # windows, from which on the first one is left out
_MOST_SHOWN = 512  # ranks
_HIGH = 3.0  # times the 95th percentile, where the axis is cut
_MS = 1e3  # milliseconds of a second
_ALL = "mean over the ranks"


def charts(records: Sequence[Record], ranks: Sequence[Record], hosts: Sequence[str]) -> list[Chart]:
    """Those that there is something to draw of.

    Args:
        records: of ``metrics.jsonl``, which has the means over the ranks.
        ranks: of ``ranks.jsonl``; empty where there is none.
        hosts: where each rank ran, as far as that is known.
    """
    if len(ranks) > _FIRST:
        ranks = ranks[1:]  # the first window has the start in it, beside which all else is small
    table = of_ranks(ranks, "seconds")
    if not table.columns:
        table = of_means(records)
    parts = [part for part in STEP if part in table.columns]
    found = []
    if parts:
        per_rank = table.ranks > 1
        names = [_name(rank, hosts) for rank in range(min(table.ranks, _MOST_SHOWN))]
        found.append(over_time(table, parts, names if per_rank else []))
        if per_rank:
            found.append(by_rank(table, parts, names))
            found += [chart] if (chart := who(table, names)) else []
    return [*found, chart] if (chart := background(table)) else found


def over_time(table: Table, parts: Sequence[str], names: Sequence[str]) -> Chart:
    """The parts of a step, stacked: the mean over the ranks, and each rank to choose."""
    budget = _MOST_NUMBERS // max(1, len(parts) * (len(names) + 1))
    thinned = table.thinned(min(500, max(_FEW, budget)))
    means = {part: over(np.nanmean, thinned.columns[part], 1) for part in parts}
    variants = {_ALL: _stack(thinned, means)}
    for rank, name in enumerate(names):
        own = {part: thinned.columns[part][:, rank] for part in parts}
        variants[name] = _stack(thinned, own)
    axis, about = _from_zero(_MS * over(np.nansum, np.stack(list(means.values())), 0))
    return Chart(
        "split",
        "A step's time, milliseconds",
        variants[_ALL],
        height=320,
        layout={"yaxis": axis, "barmode": "stack", "bargap": 0.1},
        variants=variants if names else {},
        about=about,
    )


def by_rank(table: Table, parts: Sequence[str], names: Sequence[str]) -> Chart:
    """A stacked bar for each rank, its mean over the whole run."""
    traces = []
    for part in parts:
        means = _MS * over(np.nanmean, table.columns[part], 0)[: len(names)]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": [escape(name) for name in names],
                "x": plain(means),
                "marker": {"color": PART_COLORS[part]},
                "hovertemplate": "%{y}: %{x:.4g} ms<extra>%{fullData.name}</extra>",
            }
        )
    return Chart(
        "by-rank",
        "A step's time by rank, milliseconds, mean over the run",
        traces,
        height=90 + _row(names, 28, 16) * len(names),
        layout={
            "barmode": "stack",
            "xaxis": {"title": ""},
            "yaxis": _axis(names),
            "hovermode": "closest",
        },
        about="Ranks are in step with each other: who is busy for longer makes the others’ "
        "“peers” and “communicate” longer.",
    )


def who(table: Table, names: Sequence[str]) -> Chart | None:
    """How long each rank was busy before it met the others, against the median of the others."""
    thinned = table.thinned(min(200, max(20, _MOST_NUMBERS // len(names))))
    own = [p for p in STEP if p in thinned.columns and p not in SHARED_PARTS]
    if not own:
        return None
    columns = np.stack([thinned.columns[part] for part in own])
    busy = over(np.nansum, columns, 0)
    busy[np.isnan(columns).all(0)] = np.nan  # [W, R]
    others = (np.delete(busy, rank, axis=1) for rank in range(len(names)))
    usual = np.stack([over(np.nanmedian, each, 1) for each in others], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(usual > 0, busy[:, : len(names)] / usual, np.nan)
    if not np.isfinite(ratio).any():
        return None
    trace = {
        "type": "heatmap",
        "x": thinned.steps.tolist(),
        "y": [escape(name) for name in names],
        "z": [plain(row) for row in ratio.T],
        "zmin": 0,
        "zmax": 2,
        "colorscale": [[0, "#3f7fd1"], [0.5, "rgba(128,128,128,0.12)"], [1, "#c9485b"]],
        "colorbar": {"tickvals": [0, 1, 2], "ticksuffix": " ×", "thickness": 10, "outlinewidth": 0},
        "xgap": 1 if len(thinned.steps) <= 100 else 0,
        "ygap": 1,
        "hovertemplate": "%{y}, step %{x:,}: %{z:.2f} × the others’ median<extra></extra>",
    }
    return Chart(
        "busy",
        "Who holds up whom: time that a rank is busy, against the others’ median",
        [trace],
        height=90 + _row(names, 26, 14) * len(names),
        layout={"yaxis": _axis(names), "hovermode": "closest"},
        about="Busy is all of a step but waiting for others (peers, communicate). Red rows hold up "
        "the rest.",
    )


def background(table: Table) -> Chart | None:
    """What the thread of the loader does beside the steps."""
    means = {
        part: _MS * over(np.nanmean, table.columns[part], 1)
        for part in LOADER
        if part in table.columns
    }
    if not means:
        return None
    axis, cut = _from_zero(over(np.nanmax, np.stack(list(means.values())), 0))
    steps = table.steps.tolist()
    traces = [
        curve(part, list(zip(steps, values.tolist())), PART_COLORS[part])
        for part, values in means.items()
    ]
    return Chart(
        "loader",
        "Preparing a batch, milliseconds, mean over the ranks",
        traces,
        layout={"yaxis": axis},
        about="This happens in a thread beside the steps. It costs time where it takes longer than "
        f"a step, which then waits. {cut}",
    )


def _from_zero(values: Array) -> tuple[dict[str, Any], str]:
    """The axis for these, and what to say if the longest, such as a first batch, are cut."""
    known = values[np.isfinite(values)]
    usual = float(np.percentile(known, 95)) if len(known) > 2 else math.inf
    if known.max(initial=0.0) <= _HIGH * usual:
        return {"rangemode": "tozero"}, ""
    said = f"The longest, {known.max():,.0f} ms, is cut; a double-click shows it."
    return {"range": [0, 1.5 * usual]}, said


def _stack(table: Table, parts: dict[str, Array]) -> list[Trace]:
    steps, traces = table.steps.tolist(), []
    for part, seconds in parts.items():
        color = PART_COLORS[part]
        trace: Trace = {"name": part, "x": steps, "y": plain(_MS * seconds)}
        trace["hovertemplate"] = "%{y:.4g} ms"
        if len(steps) <= _FEW:
            trace |= {"type": "bar", "marker": {"color": color}}
        else:
            trace |= {"type": "scatter", "mode": "lines", "stackgroup": "one"}
            trace |= {"line": {"width": 0.5, "color": color}, "fillcolor": color}
        traces.append(trace)
    return traces


def _name(rank: int, hosts: Sequence[str]) -> str:
    host = hosts[rank] if rank < len(hosts) else ""
    return f"rank {rank}, {host}" if host else f"rank {rank}"


def _row(names: Sequence[str], few: int, many: int) -> int:
    """Pixels of a rank."""
    return few if len(names) <= 16 else many


def _axis(names: Sequence[str]) -> dict[str, Any]:
    """Ranks from the top down, no more of them named than there is room for."""
    every = math.ceil(len(names) / 64)
    return {"autorange": "reversed", "type": "category", "dtick": every, "ticklabelstandoff": 6}
