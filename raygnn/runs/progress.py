"""Where a training is: the line about it, from the records of ``metrics.jsonl``."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_EVALUATIONS = 1.0
_SHORTEST_BAR = 8
_GAP = 2


class Progress:
    """The state of a training, shown as one live line, or handed to ``on_line`` line by line.

    Args:
        steps_per_epoch: optimizer steps in an epoch.
        total_steps: steps after which the training ends.
        on_line: called with each plain line: at an evaluation, at most every second,
            and every 5 seconds between them.
    """

    def __init__(
        self,
        steps_per_epoch: int,
        total_steps: int,
        on_line: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.on_line = on_line
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._total = max(1, total_steps)
        self._now = now
        self._said = ""
        self._said_at = -math.inf  # by our clock
        self._said_time = -math.inf  # by the training's
        self._first: tuple[int, float] | None = None
        self._step = 0
        self._time = 0.0
        self._shown: dict[str, float] = {}

    def update(self, record: Mapping[str, Any]) -> None:
        """Take in one record.

        Args:
            record: ``step`` and ``time``; of the rest ``train/loss``, what begins with ``val/``
                and ``seeds_per_second`` are shown.
        """
        self._step, self._time = int(record["step"]), float(record["time"])
        if self._first is None:
            # Rates count from the first record on: what came before was start-up.
            self._first = (self._step, self._time)
        values = {key: value for key, value in record.items() if _shows(key, value)}
        self._shown |= values
        evaluated = any(key.startswith("val/") for key in values)
        due = self._now() - self._said_at >= _SECONDS_BETWEEN_LINES
        due |= evaluated and self._time - self._said_time >= _SECONDS_BETWEEN_EVALUATIONS
        if self.on_line and due and self.unsaid():
            self._said, self._said_at, self._said_time = self.line(), self._now(), self._time
            self.on_line(self._said)

    def line(self) -> str:
        """The state as plain text; empty before the first record."""
        return _join(self._fields()) if self._first else ""

    def unsaid(self, room: int | None = None) -> str:
        """The last line, or nothing if ``on_line`` had it already.

        Args:
            room: columns of characters that it may take; None for any number.
        """
        line = self.line()
        if line == self._said:
            return ""
        return line if room is None else _join(_fitting(self._fields(), room))

    def seconds_left(self) -> float | None:
        """Seconds until the last step at the rate so far; None while there is no rate."""
        if self._first is None or self._step <= self._first[0]:
            return None
        rate = (self._time - self._first[1]) / (self._step - self._first[0])
        return max(0, self._total - self._step) * rate

    def _fields(self) -> list[str]:
        """The columns of the line, in order."""
        epochs = math.ceil(self._total / self._steps_per_epoch)
        epoch = min(epochs, max(1, math.ceil(self._step / self._steps_per_epoch)))
        fields = [f"epoch {epoch}/{epochs}"]
        if self._steps_per_epoch > 1:  # else the epoch says it
            fields.append(f"step {self._step:,}/{self._total:,}")
        if "train/loss" in self._shown:
            fields.append(f"loss {self._shown['train/loss']:.4f}")
        fields += [
            f"{key} {value:.4f}"
            for key, value in self._shown.items()
            if key.startswith("val/") and not key.endswith("/loss")
        ]
        if "seeds_per_second" in self._shown:
            fields.append(f"{self._shown['seeds_per_second']:,.0f} seeds/s")
        left = self.seconds_left()
        if left is not None:
            fields.append(f"{clock(left)} left")
        return fields

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._first is None:
            yield Text("waiting for the first step", no_wrap=True, overflow="crop")
            return
        yield _bar(self._fields(), self._step, self._total, options.max_width)


class Told:
    """The state of a training elsewhere, as its lines tell it; shown as one live line.

    Attributes:
        text: the last line.
        step, total: of it.
    """

    def __init__(self, text: str, step: int, total: int):
        self.text, self.step, self.total = text, step, total

    @classmethod
    def read(cls, line: str) -> Told | None:
        """What `Progress.line` wrote; None for any other line."""
        found = _LINE.fullmatch(line.rstrip())
        if found is None:
            return None
        step, total = found["epoch"], found["epochs"]  # of one step each
        if found["step"]:
            step, total = found["step"], found["total"]
        numbers = [int(number.replace(",", "")) for number in (step, total)]
        return cls(line.strip(), numbers[0], max(1, numbers[1]))

    @property
    def metric(self) -> str:
        """The first validation metric, else the loss; empty where it has neither."""
        fields = self.text.split("  ")
        found = [text for text in fields if text.startswith("val/")]
        found += [f"train/{text}" for text in fields if text.startswith("loss ")]
        return found[0] if found else ""

    @property
    def share(self) -> float:
        """Of the steps, from 0 to 1."""
        return min(1.0, self.step / self.total)

    def fitting(self, room: int) -> str:
        """The line without the columns for which there is no room."""
        return _join(_fitting(self.text.split("  "), room))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _bar(self.text.split("  "), self.step, self.total, options.max_width)


_LINE = re.compile(
    r"epoch (?P<epoch>\d+)/(?P<epochs>\d+)(  step (?P<step>[\d,]+)/(?P<total>[\d,]+))?(  .*)?"
)


def _least_important(fields: list[str]) -> str:
    """The column to leave out first."""
    metrics = [field for field in fields if field.startswith("val/")]

    def rank(field: str) -> int:
        if field.endswith(" seeds/s"):
            return 6
        if field in metrics[1:]:
            return 5
        if field.endswith(" left"):
            return 2
        return {"epoch": 0, "loss": 1, "step": 4}.get(field.split(" ")[0], 3)

    return max(reversed(fields), key=rank)


def _fitting(fields: list[str], room: int) -> list[str]:
    """The most important columns, as many as there is room for."""
    fields = list(fields)
    while len(fields) > 1 and cell_len(_join(fields)) > room:
        fields.remove(_least_important(fields))
    return fields


def _bar(fields: list[str], step: int, total: int, room: int) -> RenderableType:
    """A bar and the columns beside it."""
    text = _join(_fitting(fields, room - _SHORTEST_BAR - _GAP))
    bar = room - cell_len(text) - _GAP
    if bar < _SHORTEST_BAR:
        return Text(text, no_wrap=True, overflow="crop")
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_row(ProgressBar(total=total, completed=step, width=min(bar, 40)), Text(text))
    return grid


def _join(fields: list[str]) -> str:
    return "  ".join(fields)


def _shows(key: str, value: Any) -> bool:
    wanted = key in ("train/loss", "seeds_per_second") or key.startswith("val/")
    return wanted and isinstance(value, (int, float))


def clock(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:07:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
