"""A training as a piece of HTML: its state, how far it is, two curves, its last words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from raygnn.errors import DataError
from raygnn.runs.metrics_files import read_metrics
from raygnn.runs.run_directory import METRICS

if TYPE_CHECKING:
    from raygnn.jobs.handle import Handle

_COLOURS = {
    "pending": "#6b7280",
    "running": "#2563eb",
    "done": "#15803d",
    "failed": "#b91c1c",
    "interrupted": "#b45309",
}
_WORDS = 3  # last lines
_WIDTH, _HEIGHT = 220, 48  # of a curve, pixels
_POINTS = 200  # of a curve
_LARGEST = 32 * 2**20  # bytes of records that are read for two small curves

Point = tuple[float, float]


def card(handle: Handle) -> str:
    """The card of a training, as it is now."""
    status = handle.status
    colour = _COLOURS.get(status, "#6b7280")
    head = (
        f"<b>{escape(handle.name)}</b> <span style='color:#fff;background:{colour};padding:0 6px;"
        f"border-radius:3px'>{escape(status)}</span>"
    )
    parts = [head]
    if (told := handle.told) is not None:
        share = 1.0 if status == "done" else told.share
        parts.append(
            f"<progress value='{share:.4f}' max='1' style='width:100%'></progress>"
            f"<div>{escape(told.text)}</div>"
        )
    curves = [_curve(name, points) for name, points in _series(handle) if len(points) > 1]
    parts.append(f"<div style='display:flex;gap:16px'>{''.join(curves)}</div>" if curves else "")
    if words := _words(handle):
        parts.append(
            "<pre style='margin:4px 0 0;white-space:pre-wrap;font-size:85%;color:#6b7280'>"
            f"{escape(words)}</pre>"
        )
    box = "border:1px solid #d1d5db;border-radius:6px;padding:8px 12px;max-width:640px"
    return f"<div style='{box}'>{''.join(parts)}</div>"


def _words(handle: Handle) -> str:
    """The last lines that say something else than the progress."""
    told = handle.told
    lines = [line for line in handle.logs(50).splitlines() if line.strip()]
    lines = [line for line in lines if told is None or not line.startswith("epoch ")]
    return "\n".join(lines[-_WORDS:])


def _series(handle: Handle) -> list[tuple[str, list[Point]]]:
    """The training's loss, and the first validation metric."""
    run = handle.run
    if run is None:
        return []
    file = run.path / METRICS
    try:
        if file.stat().st_size > _LARGEST:
            return []
        records = read_metrics(file)
    except (OSError, DataError):
        return []
    names = dict.fromkeys(key for record in records for key in record)
    val = [name for name in names if name.startswith("val/") and not name.endswith("/loss")]
    return [(name, _points(records, name)) for name in ["train/loss", *val[:1]]]


def _points(records: Sequence[dict[str, float]], name: str) -> list[Point]:
    found = [
        (float(record["step"]), float(record[name]))
        for record in records
        if isinstance(record.get(name), (int, float)) and math.isfinite(record[name])
    ]
    every = math.ceil(len(found) / _POINTS) or 1
    return [*found[:-1:every], *found[-1:]]  # with the last: its value is written beside


def _curve(name: str, points: Sequence[Point]) -> str:
    steps, values = zip(*points)
    left, low = min(steps), min(values)
    wide, high = max(steps) - left or 1.0, max(values) - low or 1.0
    drawn = " ".join(
        f"{(x - left) / wide * _WIDTH:.1f},{(1 - (y - low) / high) * (_HEIGHT - 4) + 2:.1f}"
        for x, y in points
    )
    label = f"{escape(name)} {values[-1]:.4g}"
    return (
        f"<figure style='margin:4px 0'><svg width='{_WIDTH}' height='{_HEIGHT}' role='img' "
        f"aria-label='{label}'><polyline points='{drawn}' fill='none' stroke='#2563eb' "
        f"stroke-width='1.5'/></svg><figcaption style='font-size:85%'>{label}</figcaption></figure>"
    )
