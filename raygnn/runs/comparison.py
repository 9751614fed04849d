"""Runs side by side: settings that differ, metrics, speed, versions; means of seeds; lists."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raygnn.config.rules import leaves
from raygnn.errors import DataError, InputError
from raygnn.runs.metrics_files import newest
from raygnn.runs.run import Run
from raygnn.runs.run_directory import METRICS
from raygnn.util.files import storage_errors, write_atomic

ComparedValues = tuple[str, list[str], list[list[Any]]]  # title, columns, rows

_NAMES = ("name", "storage")  # keys that differ between any two runs
_SEED = "train.seed"
_SPEED = ("status", "steps", "epochs", "workers", "global_batch", "seeds_per_second")


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Compare runs.

    Returns:
        ``runs``, their paths or URIs; ``settings`` that differ, ``metrics``, ``speed`` and
        ``versions``: key → a value for each run, None if missing; and ``mean``, see `mean_of`, None
        unless the runs differ in ``train.seed`` alone.
    """
    configs = [dict(leaves(run.config)) for run in runs]
    summaries = [run.summary for run in runs]
    settings = {
        key: values
        for key, values in _beside(configs).items()
        if key not in _NAMES and any(value != values[0] for value in values)
    }
    totals = [(summary.get("seconds") or {}).get("total") for summary in summaries]
    speed = _beside([{key: summary.get(key) for key in _SPEED} for summary in summaries])
    return {
        "runs": [run.shown for run in runs],
        "settings": settings,
        "metrics": _beside([summary.get("metrics") or {} for summary in summaries]),
        "speed": {**speed, "total seconds": totals},
        "versions": _beside([summary.get("versions") or {} for summary in summaries]),
        "mean": mean_of(runs) if list(settings) == [_SEED] else None,
    }


def mean_of(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return metric → ``mean`` and ``deviation`` (of a sample) over finished runs. Raises
    InputError if one is not finished, or there is only one."""
    for run in runs:
        if run.status != "done" or len(runs) < 2:
            what = "one run has no deviation" if run.status == "done" else f"it is {run.status}"
            raise InputError(what, where=run.shown, remedy="compare two finished runs or more")
    found = _beside([run.summary["metrics"] for run in runs])
    return {
        name: {"mean": statistics.fmean(values), "deviation": statistics.stdev(values)}
        for name, values in found.items()
        if None not in values
    }


def tables(compared: Mapping[str, Any]) -> Iterator[ComparedValues]:
    """Yield title, columns and rows of each table of `compare`."""
    names = [place.rstrip("/").rpartition("/")[2] for place in compared["runs"]]
    names = names if len(set(names)) == len(names) else compared["runs"]
    for title in ("settings", "metrics", "speed", "versions"):
        rows = [[key, *values] for key, values in compared[title].items()]
        about = "settings that differ" if title == "settings" else title
        yield about, [title, *names], rows
    if compared["mean"] is not None:
        yield mean_table(compared["mean"], len(names))


def write_html(compared: Mapping[str, Any], file: Path) -> None:
    """Write the tables of `compare` as a page. Raises InputError if it cannot be written."""
    from raygnn.runs.run_page import render

    shown = [
        (title, [dict(zip(columns, row)) for row in rows])
        for title, columns, rows in tables(compared)
    ]
    text = render("comparison.html", [], name="comparison", runs=compared["runs"], tables=shown)
    with storage_errors(file, InputError, "write it elsewhere"):
        write_atomic(file, text)


def mean_table(found: Mapping[str, Mapping[str, float]], count: int) -> ComparedValues:
    """Return title, columns and rows of `mean_of`."""
    rows = [[name, f"{v['mean']:.4f} ± {v['deviation']:.4f}"] for name, v in found.items()]
    return f"mean ± deviation of {count} seeds", ["metric", "mean ± deviation"], rows


def _beside(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for one in facts for key in one)
    return {key: [one.get(key) for one in facts] for key in keys}


def row_of(run: Run) -> dict[str, str]:
    """Return ``name``, ``state``, ``progress``, ``metric`` and ``age`` of a run as text."""
    names = ("name", "state", "progress", "metric", "age")
    try:
        summary, done, began = run.summary, progress(*run.progress), age(run.began)
        metrics = summary.get("metrics") or newest(run.path / METRICS) or {}
        values = (run.status, done, metric(metrics, summary.get("metric")), began)
    except DataError as error:
        values = ("damaged", "", error.what, "")
    return dict(zip(names, (run.name, *values)))


def progress(step: int, total: int | None) -> str:
    """Format progress, such as ``80/400 (20%)``; empty before the first step."""
    if not step:
        return ""
    return f"{step:,}/{total:,} ({min(1.0, step / total):.0%})" if total else f"{step:,}"


def metric(metrics: dict[str, Any], chosen: str | None = None) -> str:
    """Format the ``chosen`` or first test metric, else validation's, else the training loss:
    ``val/accuracy 0.8120``."""
    numbers = {name: value for name, value in metrics.items() if type(value) in (int, float)}
    for first in ("test/", "val/"):
        names = [n for n in numbers if n.startswith(first) and not n.endswith("/loss")]
        if names:
            name = f"{first}{chosen}" if f"{first}{chosen}" in names else names[0]
            return f"{name} {numbers[name]:.4f}"
    return f"train/loss {numbers['train/loss']:.4f}" if "train/loss" in numbers else ""


def age(began: float | None) -> str:
    """Format the time since then: ``42 s``, ``5 min``, ``3 h``, ``2 d``."""
    if not began:
        return ""
    seconds = max(0.0, time.time() - began)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
