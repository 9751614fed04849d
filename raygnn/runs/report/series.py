"""What charts are made of: the ranks' numbers over time as arrays, curves, plotly's traces.

In the shapes W is the number of records and R that of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygnn.runs.metrics_files import Record, number, values

Array = NDArray[np.float64]
Point = tuple[float, float]  # step, value
Trace = dict[str, Any]

_MOST_POINTS = 2000  # of a curve
_MOST_NUMBERS = 2**24  # of a table

COLORS = (
    "#3f7fd1",
    "#d9822b",
    "#3aa17e",
    "#c9485b",
    "#8a6fd1",
    "#b59a2a",
    "#3fa3b8",
    "#8a929c",
)


@dataclass(frozen=True)
class Chart:
    """One chart of a page.

    Attributes:
        name: what the page calls it in its markup; letters and hyphens.
        title: what it shows, with the unit.
        traces: plotly's, as dicts of plain types.
        layout: more of plotly's layout.
        variants: other traces to choose instead, by what they show.
        about: one sentence on how to read it.
    """

    name: str
    title: str
    traces: Sequence[Trace]
    height: int = 260
    layout: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Sequence[Trace]] = field(default_factory=dict)
    about: str = ""

    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        variants = list(self.variants.values()) or [self.traces]
        return {"variants": variants, "layout": dict(self.layout), "height": self.height}


def curve(name: str, points: Sequence[Point], color: str, **more: Any) -> Trace:
    """A line through the points; a marker at each where there are few."""
    kept = thin(points)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= 30 else "lines",
        "name": escape(name),
        "x": [step for step, _ in kept],
        "y": [_rounded(value) for _, value in kept],
        "line": {"color": color, "width": 2},
        "marker": {"size": 5},
        **more,
    }


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most ``most`` of the points: of each stretch the lowest and the highest, and the first
    and the last of all, so that no spike is lost. A NaN stays where a whole stretch has nothing
    else, as a gap.
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    stretches = min(len(inner), max(1, (most - 2) // 2))
    kept = [points[0]]
    for index in range(stretches):
        stretch = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        finite = [i for i, (_, value) in enumerate(stretch) if math.isfinite(value)] or [0]
        extremes = (pick(finite, key=lambda i: stretch[i][1]) for pick in (min, max))
        kept += [stretch[i] for i in sorted({*extremes})]
    return [*kept, points[-1]]


@dataclass(frozen=True)
class Table:
    """One group of values of all ranks.

    Attributes:
        steps: of the records, int64 [W].
        columns: name → float64 [W, R], NaN where nothing is known.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Array]

    @property
    def ranks(self) -> int:
        return max((column.shape[1] for column in self.columns.values()), default=0)

    def thinned(self, most: int) -> Table:
        """Means over at most ``most`` stretches, each named by its last step."""
        count = len(self.steps)
        if count <= most:
            return self
        starts = np.arange(most) * count // most
        ends = np.append(starts[1:], count)
        columns = {}
        for name, column in self.columns.items():
            finite = np.isfinite(column)
            sums = np.add.reduceat(np.where(finite, column, 0.0), starts, axis=0)
            counts = np.add.reduceat(finite.astype(np.int64), starts, axis=0)
            columns[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return Table(self.steps[ends - 1], columns)

    def points(self, column: Array) -> list[Point]:
        """Of numbers [W]."""
        return list(zip(self.steps.tolist(), column.tolist()))


def of_ranks(records: Sequence[Record], group: str) -> Table:
    """A group of ``ranks.jsonl``."""
    rows = [(record["step"], row) for record in records if (row := values(record, group))]
    size = max((len(ranks) for _, row in rows for ranks in row.values()), default=0)
    size = min(size, _MOST_NUMBERS // max(1, len(rows)))  # which only a damaged file has more of
    columns: dict[str, Array] = {}
    for name in dict.fromkeys(name for _, row in rows for name in row):
        column = np.full((len(rows), size), np.nan)
        for index, (_, row) in enumerate(rows):
            ranks = row.get(name, [])[:size]
            column[index, : len(ranks)] = ranks
        columns[name] = column
    return Table(_steps([step for step, _ in rows]), columns)


def of_means(records: Sequence[Record]) -> Table:
    """The seconds of ``metrics.jsonl``, means over the ranks, as if there were one."""
    head = "seconds/"
    rows = [record for record in records if any(key.startswith(head) for key in record)]
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(head))
    columns = {
        key.removeprefix(head): np.array([[number(row.get(key))] for row in rows]) for key in keys
    }
    return Table(_steps([row["step"] for row in rows]), columns)


def over(function: Callable[..., Any], array: Any, axis: int) -> Array:
    """``np.nanmean`` and the like, NaN without a warning where there is nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(function(np.asarray(array), axis=axis), dtype=np.float64)


def plain(array: Array) -> list[float | None]:
    """Five digits of each, which is more than a screen shows; None, a gap, for no number."""
    return [_rounded(value) for value in array.tolist()]


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _steps(steps: Sequence[int]) -> NDArray[np.int64]:
    return np.array([min(max(step, -(2**62)), 2**62) for step in steps], dtype=np.int64)
