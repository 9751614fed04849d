"""Progress line of a training, from the records of ``metrics.jsonl``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_EVALUATIONS = 1.0
_SHORTEST_BAR, _LONGEST_BAR = 8, 40  # columns
_GAP = "  "
# first word of a column → order in which columns are dropped, the highest first
_DROPPED = {"epoch": 0, "loss": 1, "step": 4}


class TrainingProgress:
    """State of a training, shown as one live line, or passed to ``on_line`` as plain lines.
    ``steps_per_epoch``, ``total_steps``: optimizer steps in an epoch, and in all."""

    def __init__(self, steps_per_epoch: int, total_steps: int):
        # called with each plain line: at an evaluation, at most every second, and every 5 seconds
        # between evaluations, without the metrics of the last one
        self.on_line: Callable[[str], None] | None = None
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._total = max(1, total_steps)
        self._now = time.monotonic
        self._last_line = ""
        self._last_line_at = -math.inf  # by our clock
        self._last_evaluation = -math.inf  # of a line, by the training's clock
        self._first: tuple[int, float] | None = None
        self._step = 0
        self._time = 0.0
        self._values: dict[str, float] = {}

    def update(self, record: Mapping[str, Any]) -> None:
        """Update the state by one record of ``metrics.jsonl``."""
        before, self._step, self._time = self._step, int(record["step"]), float(record["time"])
        if self._first is None:
            # rates are measured from the first record on, without the startup
            self._first = (self._step, self._time)
        shown = ("train/loss", "seeds_per_second", "val/")
        values = {k: v for k, v in record.items() if k.startswith(shown)}
        evaluated = any(key.startswith("val/") for key in values)
        if self.on_line and not evaluated and self._step > before:
            self._values = {k: v for k, v in self._values.items() if not k.startswith("val/")}
        self._values |= {k: v for k, v in values.items() if isinstance(v, (int, float))}
        due = self._now() - self._last_line_at >= _SECONDS_BETWEEN_LINES
        due |= evaluated and self._time - self._last_evaluation >= _SECONDS_BETWEEN_EVALUATIONS
        if self.on_line and due and self.unprinted():
            self._last_line, self._last_line_at = self.line(), self._now()
            if evaluated:
                self._last_evaluation = self._time
            self.on_line(self._last_line)

    def line(self) -> str:
        """Return the state as plain text; empty before the first record."""
        if self._first is None:
            return ""
        epochs = math.ceil(self._total / self._steps_per_epoch)
        epoch = min(epochs, max(1, math.ceil(self._step / self._steps_per_epoch)))
        columns = [f"epoch {epoch}/{epochs}"]
        if self._steps_per_epoch > 1:  # else the step is the epoch
            columns.append(f"step {self._step:,}/{self._total:,}")
        if "train/loss" in self._values:
            columns.append(f"loss {self._values['train/loss']:.4f}")
        columns += [
            f"{key} {value:.4f}"
            for key, value in self._values.items()
            if key.startswith("val/") and not key.endswith("/loss")
        ]
        if "seeds_per_second" in self._values:
            columns.append(f"{self._values['seeds_per_second']:,.0f} seeds/s")
        if (steps := self._step - self._first[0]) > 0 and self._step < self._total:
            rate = (self._time - self._first[1]) / steps
            columns.append(f"{clock((self._total - self._step) * rate)} left")
        return _GAP.join(columns)

    def unprinted(self) -> str:
        """Return the present line; empty if ``on_line`` was called with it."""
        line = self.line()
        return "" if line == self._last_line else line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a bar and the columns; on a narrow terminal the most important columns alone."""
        line = self.line() or "waiting for the first step"
        text = _fitting(line, options.max_width - _SHORTEST_BAR - len(_GAP))
        width = options.max_width - cell_len(text) - len(_GAP)
        if width < _SHORTEST_BAR or self._first is None:
            yield Text(text, no_wrap=True, overflow="crop")
            return
        bar = ProgressBar(total=self._total, completed=self._step, width=min(width, _LONGEST_BAR))
        grid = Table.grid(padding=(0, len(_GAP), 0, 0))
        grid.add_row(bar, Text(text))
        yield grid


def _fitting(line: str, width: int) -> str:
    """Drop the least important columns until the line fits."""
    columns = line.split(_GAP)
    metrics = [column for column in columns if column.startswith("val/")]

    def order(column: str) -> int:
        if column.endswith(" seeds/s"):
            return 6
        if column in metrics[1:]:
            return 5
        return 2 if column.endswith(" left") else _DROPPED.get(column.split(" ")[0], 3)

    while len(columns) > 1 and cell_len(_GAP.join(columns)) > width:
        columns.remove(max(reversed(columns), key=order))
    return _GAP.join(columns)


def clock(seconds: float) -> str:
    """Format a duration: ``0:42``, ``12:05``, ``3:07:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
