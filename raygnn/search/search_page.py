"""``search.html``: the trials of a search on one page that opens anywhere."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from raygnn.runs.charts import COLORS, Chart, curve
from raygnn.runs.run_page import Tile, render
from raygnn.search.record import SearchResult, shown, table
from raygnn.util.files import write_atomic

PAGE = "search.html"
_LINES = 300  # best trials in the chart of the settings
_FEW = 4  # completed trials that the importance of settings needs


def write_page(path: Path) -> Path:
    """Write the page of the search in directory ``path``, and return it."""
    facts = SearchResult(path).to_dict()
    trials = facts["trials"]
    known = [one for one in trials if one["value"] is not None]
    done = sorted((one for one in known if one["status"] == "done"), key=lambda one: one["ended"])
    charts, missing = [], ""
    if done:
        charts = [_over_time(facts, done), _settings(facts, known)]
    if len(done) < _FEW:
        missing = f"The importance of the keys needs {_FEW} completed trials."
    elif importlib.util.find_spec("optuna") is None:
        missing = "The importance of the keys needs Optuna: pip install raygnn[optuna]."
    elif bars := _importance(facts, done):
        charts.append(bars)
    best = next((one for one in trials if one["id"] == facts["best"]), None)
    counts = Counter(one["status"] for one in trials).items()
    tiles = [Tile(f"best {facts['metric']}", shown(best["value"]), best["id"])] if best else []
    tiles += [Tile(status, f"{count:,}", f"of {len(trials):,}") for status, count in counts]
    columns, rows = table(facts)
    text = render(
        "search.html",
        charts,
        name=facts["name"],
        path=str(path),
        tiles=tiles,
        charts=charts,
        missing=missing,
        metric=facts["metric"],
        rows=[dict(zip(columns, row)) for row in rows],
        failed=[one for one in trials if one["error"]],
    )
    write_atomic(path / PAGE, text)
    return path / PAGE


def _over_time(facts: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> Chart:
    """Chart the value of each completed trial, and the best value so far."""
    points = [((one["ended"] - facts["started"]) / 60, one["value"]) for one in done]
    better = max if facts["mode"] == "max" else min
    best = list(accumulate(points, lambda before, one: (one[0], better(before[1], one[1]))))
    traces = [
        curve("best so far", best, COLORS[0], line={"color": COLORS[0], "width": 2, "shape": "hv"}),
        curve("completed trials", points, COLORS[1], mode="markers")
        | {"text": [one["id"] for one in done], "hovertemplate": "%{text}: %{y:.4g}"},
    ]
    title = f"{facts['metric']} over the time since the search began, minutes"
    layout = {"xaxis": {"title": {"text": "minutes"}}, "hovermode": "closest"}
    return Chart("over-time", title, traces, layout=layout)


def _settings(facts: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> Chart:
    """Chart the settings of the trials as parallel coordinates."""
    up = facts["mode"] == "max"
    ranked = sorted(known, key=lambda one: one["value"], reverse=up)[:_LINES][::-1]  # best on top
    axes = {key: [one["settings"][key] for one in ranked] for key in facts["space"]}
    axes[facts["metric"]] = [one["value"] for one in ranked]
    heights = {key: _heights(values) for key, values in axes.items()}
    traces = []
    for at, one in enumerate(ranked):
        share = at / max(1, len(ranked) - 1)
        color = f"rgba(63,127,209,{0.15 + 0.75 * share**2:.2f})"
        hover = "<br>".join(f"{escape(key)}: {escape(shown(v[at]))}" for key, v in axes.items())
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "showlegend": False,
                "x": [escape(key) for key in axes],
                "y": [heights[key][at] for key in axes],
                "line": {"color": COLORS[1] if one["id"] == facts["best"] else color, "width": 2},
                "hovertemplate": f"{one['id']}, {one['status']}<br>{hover}<extra></extra>",
            }
        )
    ends = [f"{escape(key)}<br>{_span(values)}" for key, values in axes.items()]
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": "", "tickvals": [escape(key) for key in axes], "ticktext": ends},
        "yaxis": {"showticklabels": False},
    }
    about = (
        "A line for each trial, from the lowest value of a key at the bottom to the highest. "
        "Darker lines are better, and the orange one is the best completed trial."
    )
    return Chart("settings", "Settings of the trials", traces, 340, layout, about)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _heights(values: Sequence[Any]) -> list[float]:
    """Return the position of each value on its axis, 0 to 1: logarithmic if the values span
    decades, and by category if they are not numbers."""
    if not all(map(_is_number, values)):
        names = sorted({shown(value) for value in values})
        values = [names.index(shown(value)) for value in values]
    elif min(values) > 0 and max(values) >= 100 * min(values):
        values = [math.log(value) for value in values]
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]


def _span(values: Sequence[Any]) -> str:
    if all(map(_is_number, values)):
        return f"{shown(min(values))} to {shown(max(values))}"
    return escape(", ".join(sorted({shown(value) for value in values})))


def _importance(facts: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Chart the importance of each key for the metric; None if Optuna cannot estimate it."""
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if facts["mode"] == "max" else "minimize")
    ranges = {}
    for key in facts["space"]:
        values = [one["settings"][key] for one in done]
        if all(map(_is_number, values)):
            low, high = min(values), max(values)
            ranges[key] = FloatDistribution(low, high, log=low > 0 and high >= 100 * low)
        else:
            ranges[key] = CategoricalDistribution(sorted({shown(value) for value in values}))
    for one in done:
        params = {
            key: value if isinstance(ranges[key], FloatDistribution) else shown(value)
            for key, value in one["settings"].items()
        }
        study.add_trial(
            optuna.create_trial(params=params, distributions=ranges, value=one["value"])
        )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found: dict[str, float] = {}
    with suppress(ValueError, RuntimeError):  # too few different values
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    if not found:
        return None
    names = list(found)[::-1]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [escape(name) for name in names],
        "x": [round(found[name], 4) for name in names],
        "marker": {"color": COLORS[0]},
        "hovertemplate": "%{y}: %{x:.2f}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": "", "rangemode": "tozero"},
        "yaxis": {"type": "category"},
        "hovermode": "closest",
    }
    about = "Share of each key in how the best trials differ from the others (PED-ANOVA of Optuna)."
    return Chart("importance", "Importance of the keys", [bar], 80 + 28 * len(names), layout, about)
