"""Curves of a training: loss, metrics, learning rate, throughput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from raygnn.runs.metrics_files import Record, number
from raygnn.runs.report.chart import COLORS, Chart, curve
from raygnn.runs.report.thin import Point

_SPLITS = {"val": "validation", "test": "test"}
_MOST_METRICS = 12


def charts(records: Sequence[Record]) -> list[Chart]:
    """Those that there is something to draw of."""
    return [
        chart for chart in (loss(records), metrics(records), rate(records), speed(records)) if chart
    ]


def loss(records: Sequence[Record]) -> Chart | None:
    """Training and validation loss, also of each of several tasks; on a logarithmic axis where it
    spans decades."""
    names = {"train/loss": "training", "val/loss": "validation"}
    for key in keys_of(records, ("train/", "val/")):
        head, _, task = key.removesuffix("/loss").partition("/")
        if task and key.endswith("/loss") and len(names) < _MOST_METRICS:
            names[key] = f"{task}, {names[f'{head}/loss']}"
    found = {said: points(records, key) for key, said in names.items()}
    traces = [
        curve(said, values, COLORS[index % len(COLORS)])
        for index, (said, values) in enumerate(found.items())
        if values
    ]
    if not traces:
        return None
    finite = [v for values in found.values() for _, v in values if math.isfinite(v)]
    wide = bool(finite) and min(finite) > 0 and max(finite) > 100 * min(finite)
    holes = sum(not math.isfinite(v) for values in found.values() for _, v in values)
    about = f"{holes:,} of the records have no finite loss: the gaps." if holes else ""
    return Chart(
        "loss",
        "Loss",
        traces,
        layout={"yaxis": {"type": "log", "dtick": 1}} if wide else {},
        about=about,
    )


def metrics(records: Sequence[Record]) -> Chart | None:
    """What was measured on validation; the test's, measured once, as a point."""
    keys = [k for k in keys_of(records, ("val/", "test/")) if not k.endswith("/loss")]
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
        traces.append(curve(f"{name}, {_SPLITS[split]}", points(records, key), color, **mark))
    return Chart("metrics", "Metrics", traces) if traces else None


def rate(records: Sequence[Record]) -> Chart | None:
    """The learning rate, or one for each group of parameters."""
    keys = [k for k in keys_of(records, ("train/lr",)) if not k.endswith("/loss")][: len(COLORS)]
    traces = [
        curve(
            key.removeprefix("train/"),
            points(records, key),
            COLORS[index],
            line={
                "color": COLORS[index],
                "width": 2,
                "shape": "hv",
            },
        )
        for index, key in enumerate(keys)
    ]
    layout = {"yaxis": {"rangemode": "tozero"}}
    return Chart("rate", "Learning rate", traces, layout=layout) if traces else None


def speed(records: Sequence[Record]) -> Chart | None:
    """Seeds of all ranks per second."""
    values = points(records, "seeds_per_second")
    if not values:
        return None
    trace = curve("seeds/s", values, COLORS[2])
    layout = {"yaxis": {"rangemode": "tozero"}}
    return Chart("speed", "Throughput, seeds per second", [trace], layout=layout)


def points(records: Iterable[Record], key: str) -> list[Point]:
    """Step and value of the records that have it; NaN where it is not finite."""
    return [(r["step"], number(r[key])) for r in records if key in r]


def keys_of(records: Iterable[Record], heads: tuple[str, ...]) -> list[str]:
    """The keys that begin so, in order of appearance."""
    return list(dict.fromkeys(key for r in records for key in r if key.startswith(heads)))
