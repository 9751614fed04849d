"""Runs as rows of a table."""

from __future__ import annotations

import time
from typing import Any

from raygnn.errors import DataError
from raygnn.runs.metrics import newest
from raygnn.runs.run import Run
from raygnn.runs.store import METRICS

_FIRST = ("test/", "val/")  # metrics that are shown before others


def row_of(run: Run) -> dict[str, str]:
    """``name``, ``state``, ``progress``, ``metric`` and ``age`` of a run, as text."""
    try:
        state, (step, total), summary = run.status, run.progress, run.summary
    except DataError as error:
        return dict(zip(_COLUMNS, (run.name, "damaged", "", error.what, age(run.began))))
    metrics = summary.get("metrics") or newest(run.path / METRICS) or {}
    shown = metric(metrics, summary.get("metric"))
    row = (run.name, state, progress(step, total), shown, age(run.began))
    return dict(zip(_COLUMNS, row))


_COLUMNS = ("name", "state", "progress", "metric", "age")


def progress(step: int, total: int | None) -> str:
    """``80/400 (20 %)``; empty before the first step."""
    if not step:
        return ""
    return f"{step:,}/{total:,} ({min(1.0, step / total):.0%})" if total else f"{step:,}"


def metric(metrics: dict[str, Any], chosen: str | None = None) -> str:
    """The test metric, else the validation's, else the training loss: ``val/accuracy 0.8120``.

    Args:
        chosen: the task's metric, which comes before others.
    """
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    for first in _FIRST:
        names = [n for n in numbers if n.startswith(first) and not n.endswith("/loss")]
        if names:
            name = f"{first}{chosen}" if f"{first}{chosen}" in names else names[0]
            return f"{name} {numbers[name]:.4f}"
    return f"train/loss {numbers['train/loss']:.4f}" if "train/loss" in numbers else ""


def age(began: float | None) -> str:
    """``42 s``, ``5 min``, ``3 h``, ``2 d`` since then."""
    if not began:
        return ""
    seconds = max(0.0, time.time() - began)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
