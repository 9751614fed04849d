"""Progress of a training: a card in a notebook, lines elsewhere."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from raygnn.errors import DataError
from raygnn.runs.metrics_files import read_metrics
from raygnn.runs.progress_line import ProgressLine
from raygnn.runs.run import Run
from raygnn.runs.run_directory import METRICS

_COLOURS = {
    "pending": "#6b7280",
    "running": "#2563eb",
    "done": "#15803d",
    "failed": "#b91c1c",
    "interrupted": "#b45309",
}
_LAST_LINES = 3
_WIDTH, _HEIGHT = 220, 48  # of a curve, pixels
_POINTS = 200  # of a curve
_LARGEST = 32 * 2**20  # bytes of records, above which no curves are drawn
_BETWEEN = 1.0  # seconds between updates

CurvePoint = tuple[float, float]


def card(name: str, status: str, told: ProgressLine | None, log: str, run: Run | None) -> str:
    """Return a training as HTML: its state, progress, two curves, and its last lines.

    Args:
        told: its last progress line, if any.
        log: the end of its output.
        run: its run directory, if it is visible.
    """
    parts = [
        f"<b>{escape(name)}</b> <span style='color:#fff;background:{_COLOURS[status]};"
        f"padding:0 6px;border-radius:3px'>{escape(status)}</span>"
    ]
    if told is not None:
        share = 1.0 if status == "done" else told.share
        parts.append(
            f"<progress value='{share:.4f}' max='1' style='width:100%'></progress>"
            f"<div>{escape(told.text)}</div>"
        )
    series = _series(run) if run is not None else []
    if curves := "".join(_curve(name, points) for name, points in series if len(points) > 1):
        parts.append(f"<div style='display:flex;gap:16px'>{curves}</div>")
    lines = [line for line in log.splitlines() if line.strip()]
    lines = [line for line in lines if told is None or not line.startswith("epoch ")]
    if lines:
        parts.append(
            "<pre style='margin:4px 0 0;white-space:pre-wrap;font-size:85%;color:#6b7280'>"
            f"{escape(chr(10).join(lines[-_LAST_LINES:]))}</pre>"
        )
    box = "border:1px solid #d1d5db;border-radius:6px;padding:8px 12px;max-width:640px"
    return f"<div style='{box}'>{''.join(parts)}</div>"


def _series(run: Run) -> list[tuple[str, list[CurvePoint]]]:
    """Return the points of the training loss and of the first validation metric."""
    try:
        file = run.files / METRICS
        if file.stat().st_size > _LARGEST:
            return []
        records = read_metrics(file)
    except (OSError, DataError):
        return []
    names = dict.fromkeys(key for record in records for key in record)
    val = [name for name in names if name.startswith("val/") and not name.endswith("/loss")]
    return [(name, _points(records, name)) for name in ["train/loss", *val[:1]]]


def _points(records: Sequence[dict[str, float]], name: str) -> list[CurvePoint]:
    points = [
        (float(record["step"]), float(record[name]))
        for record in records
        if isinstance(record.get(name), (int, float)) and math.isfinite(record[name])
    ]
    every = math.ceil(len(points) / _POINTS) or 1
    return [*points[:-1:every], *points[-1:]]  # with the last, whose value is shown


def _curve(name: str, points: Sequence[CurvePoint]) -> str:
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


class Lines:
    """View that prints each line of a training."""

    def line(self, text: str) -> None:
        """Show a line of its output."""
        with suppress(OSError, ValueError):  # standard output is closed
            print(text, flush=True)

    def end(self) -> None:
        """Show the end of the training."""


class Card(Lines):
    """Card in a notebook's cell, updated once a second.

    Args:
        draw: returns the card's current HTML.
    """

    def __init__(self, draw: Callable[[], str | None]):
        from IPython.display import HTML, display

        self._html = HTML
        self._draw = draw
        self._last = draw()
        self._shown: Any = display(HTML(self._last), display_id=True)
        self._over = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._redraw, name="raygnn-card", daemon=True).start()

    def line(self, text: str) -> None:
        pass  # the card has the last lines

    def end(self) -> None:
        self._over.set()
        self._update()

    def _redraw(self) -> None:
        while not self._over.wait(_BETWEEN):
            self._update()

    def _update(self) -> None:
        with self._lock, suppress(Exception):  # a failed update ends nothing
            html = self._draw()
            if html != self._last:
                self._shown.update(self._html(html))
                self._last = html


def view(draw: Callable[[], str | None]) -> Lines:
    """Return a card in a notebook, else lines on standard output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return Card(draw) if getattr(shell, "kernel", None) is not None else Lines()
