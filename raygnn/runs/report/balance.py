"""How evenly a partition divides the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raygnn.runs.metrics_files import number
from raygnn.runs.report.chart import COLORS, Chart
from raygnn.runs.report.tables import listing, mapping, size, text

_SHOWN = {
    "nodes": "nodes",
    "edges": "in-edges",
    "training_nodes": "training nodes",
    "halo": "nodes of others",
    "cut": "edges from others",
}
_MOST_BARS = 512


def rows(partition: Mapping[str, Any]) -> list[dict[str, float]]:
    """A row for each part, counts over all types, of what ``partition.json`` says."""
    found = []
    for part in listing(partition.get("parts")):
        part = mapping(part)
        splits = [mapping(counts) for counts in mapping(part.get("splits")).values()]
        found.append(
            {
                "nodes": _sum(part.get("nodes")),
                "edges": _sum(part.get("edges")),
                "training_nodes": sum(_count(counts.get("train", 0)) for counts in splits),
                "halo": _count(part.get("halo")),
                "cut": _count(part.get("cut")),
                "bytes": _count(part.get("bytes")),
            }
        )
    return found


def chart(partition: Mapping[str, Any]) -> Chart | None:
    """Bars by part, each kind of count against its mean over the parts."""
    parts = rows(partition)[:_MOST_BARS]
    if len(parts) < 2:
        return None
    traces = []
    for index, (key, said) in enumerate(_SHOWN.items()):
        counts = [part[key] for part in parts]
        known = [count for count in counts if count == count]
        usual = sum(known) / len(known) if known else 0.0
        if not usual > 0:
            continue
        traces.append(
            {
                "type": "bar",
                "name": said,
                "x": [f"part {number}" for number in range(len(parts))],
                "y": [round(count / usual, 4) if count == count else None for count in counts],
                "customdata": [count if count == count else None for count in counts],
                "hovertemplate": "%{x}: %{customdata:,} (%{y:.2f} × the mean)",
                "marker": {"color": COLORS[index]},
            }
        )
    if not traces:
        return None
    return Chart(
        "balance",
        "Balance of the parts, against their mean",
        traces,
        layout={"xaxis": {"title": ""}, "yaxis": {"rangemode": "tozero"}, "barmode": "group"},
        about="A part with more training nodes or in-edges gives its rank more to sample; nodes "
        "and edges of others are what has to be fetched.",
    )


def table(partition: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each part and one for the total; column → cell."""
    parts = rows(partition)
    if not parts:
        return []
    total = {key: sum(part[key] for part in parts) for key in parts[0]}
    named = [(str(index), part) for index, part in enumerate(parts)]
    return [
        {"part": name, **{_SHOWN.get(k, k): _cell(k, v) for k, v in row.items()}}
        for name, row in [*named[:_MOST_BARS], ("total", total)]
    ]


def _cell(key: str, value: float) -> str:
    if value != value:
        return ""
    return size(value) if key == "bytes" else text(int(value))


def _sum(counts: Any) -> float:
    return sum(_count(count) for count in mapping(counts).values())


def _count(value: Any) -> float:
    """NaN where it is none: no graph has as many."""
    found = number(value)
    return found if 0 <= found < 2**63 else math.nan
