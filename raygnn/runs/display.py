"""Console output of a command: header, stages, progress, tables, closing, error.

On a terminal stages and progress are live lines; elsewhere (a file, a pipe, CI) they are plain
lines at a bounded rate, without control characters. Output that is not UTF-8 is shown in ASCII.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from statistics import median
from typing import IO, Any, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raygnn.errors import RaygnnError
from raygnn.runs.diagnose.causes import shown
from raygnn.runs.metrics_files import of_class, split_order
from raygnn.runs.output import Output, as_text, printable
from raygnn.runs.progress_line import TrainingProgress
from raygnn.runs.run_directory import LOGS, REPORT

_ASCII = str.maketrans({"→": "->", "…": "...", "·": "-", "×": "x", "–": "-", "—": "-", "−": "-"})
_FILE_WIDTH = 200  # no table is folded in a file
_NOTHING = 0.05  # seconds; a shorter stage gets no line
_SHORT = 5.0  # seconds; a stage that fails sooner gets no line beside the error
_SEEN = 0.05  # seconds; less is shown as 0.0
_SPINNER = 2  # columns
_OFTEN = 0.2  # share of a training's windows
_BETWEEN_DETAILS = 3.0  # seconds


class Display:
    """Display of one command. Any method raises `OutputLost` if the output cannot be written.
    ``console``: by default standard output, and standard error for errors; ``verbose``: print a
    stage's details as lines if there is no live line."""

    def __init__(self, console: Console | None = None, *, verbose: bool = False):
        self.console = console or _console()
        self.error_console = console or _console(stderr=True)
        self.verbose = verbose
        self.on_note: Callable[[str], None] | None = None  # called with each note, too

    def header(self, rows: Mapping[str, str]) -> None:
        """Print a line per row, the names aligned."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self._line((f"{name:<{width}}  ", "bold"), value)
        self._line("")

    def note(self, text: str) -> None:
        """Print a note or a warning."""
        self._line(text)
        if self.on_note is not None:
            self.on_note(text)

    @contextmanager
    def stage(self, text: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
        """Show a long step, and at its end a line with its seconds, if it took any.

        Yields a function that shows a detail, on a terminal in the live line. Elsewhere, if
        verbose, each detail that differs up to its first comma is a line, and others are lines at
        most every few seconds. ``lines``: print details that differ up to a comma even if not
        verbose.
        """
        start = time.monotonic()
        try:
            if self.console.is_interactive:
                spinner = "line" if self.console.options.ascii_only else "dots"
                with self.console.status(self._cut(text), spinner=spinner) as status:
                    yield lambda detail: status.update(self._cut(f"{text}: {detail}"))
            else:
                yield self._details(text, lines)
        except BaseException:
            if (seconds := time.monotonic() - start) >= _SHORT:
                self._line(f"{text}: stopped after {seconds:.1f} s")
            raise
        if (seconds := time.monotonic() - start) >= _NOTHING:
            self._line(f"{text}: {seconds:.1f} s")

    def _details(self, text: str, lines: bool) -> Callable[[str], None]:
        word, last = "", -math.inf

        def show(detail: str) -> None:
            nonlocal word, last
            is_new = detail.partition(",")[0] != word
            late = self.verbose and time.monotonic() - last >= _BETWEEN_DETAILS
            if late or (is_new and (self.verbose or lines)):
                word, last = detail.partition(",")[0], time.monotonic()
                self._line(f"{text}: {detail}")

        return show

    @contextmanager
    def progress(
        self, total_epochs: int, steps_per_epoch: int, *, max_steps: int | None = None
    ) -> Iterator[TrainingProgress]:
        """Show a training; yields an object to update with each record of ``metrics.jsonl``.

        Args:
            total_epochs: number of epochs.
            steps_per_epoch: optimizer steps in each.
            max_steps: limit on optimizer steps.
        """
        total = total_epochs * steps_per_epoch
        progress = TrainingProgress(steps_per_epoch, min(total, max_steps or total))
        try:
            if self.console.is_interactive:
                with Live(progress, console=self.console, refresh_per_second=4, transient=True):
                    yield progress
            else:
                progress.on_line = self._line
                yield progress
        finally:
            if line := progress.unprinted():
                self._line(line)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table, or ``no <title>`` without rows; columns of numbers are flush right. Cells
        are folded between words only; if a word is too wide, each row is a block of lines."""
        if not rows:
            self._line(f"no {title}")
            return
        cells = [[as_text(value) for value in row] for row in rows]
        layout = _layout([columns, *cells], self.console.width)
        self._line((title, "bold"))
        if layout is None:
            for row in cells:
                texts = [f"{name}: {value}" for name, value in zip(columns, row) if value]
                self._line("\n" + "\n  ".join(texts))
            self._line("")
            return
        padding, widths = layout
        table = Table(box=box.SIMPLE_HEAD, padding=(0, padding))
        for column, width, values in zip(columns, widths, zip(*rows)):
            right = all(isinstance(value, Real) for value in values)
            justify: Any = "right" if right else "left"
            table.add_column(self._safe(column), justify=justify, overflow="fold", width=width)
        for row in cells:
            table.add_row(*map(self._safe, row))
        self.console.print(table)

    def closing(self, summary: Mapping[str, Any], path: str | Path) -> None:
        """Print the outcome of a run. ``summary``: ``summary.json``; any key may be missing.
        ``path``: run directory, or its URI."""
        rows = {"status": str(summary.get("status", "done"))}
        metrics = _sorted_metrics(summary.get("metrics") or {})
        rows |= {name: f"{value:.4f}{of_class(name, summary)}" for name, value in metrics}
        if (best := summary.get("best_epoch")) is not None:  # counted from 0
            of = "last" if summary.get("selected") == "last" else "best"
            label = f"best epoch, {best + 1}" if of == "best" else "last epoch"
            rows |= {name: f"{rows[name]} ({label})" for name in rows if name.startswith("val/")}
            if of == "last":
                kept = _sorted_metrics(summary.get("best_metrics") or {})
                rows |= {f"{name}, best": f"{value:.4f} (epoch {best + 1})" for name, value in kept}
        if not any(name.startswith("test/") for name in rows):
            # the reported metrics selected the epoch
            last = _sorted_metrics(summary.get("last_metrics") or {})
            rows |= {f"{name}, last epoch": f"{value:.4f}" for name, value in last}
        if (loss := summary.get("train_loss")) is not None:
            rows["train/loss"] = f"{loss:.4f} (the last steps)"
        if summary.get("steps") is not None:
            rows["steps"] = f"{summary['steps']:,}"
        if summary.get("seeds_per_second") is not None:
            rows["seeds/s"] = f"{summary['seeds_per_second']:,.0f} (in steps alone)"
        if summary.get("seconds"):
            rows["seconds"] = _split(summary["seconds"])
        if slow := _slow(summary.get("ranks") or []):
            rows["slow ranks"] = slow
        rows["run directory"] = path = str(path)
        rows["next"] = f"read {path}/logs, then train with --resume or --overwrite"
        if rows["status"] == "done":
            rows["next"] = f"raygnn.open_run({path!r}) in Python"
            if os.path.exists(f"{path}/{REPORT}"):
                rows["next"] = f"open {path}/{REPORT} in a browser, or {rows['next']}"
        self._line("")
        self.header(rows)

    def error(self, error: RaygnnError) -> None:
        """Print the cause, where and the remedy, then a trace's frames of the user's code, or the
        complete trace if verbose, and a pointer to more."""
        self._line(("error: ", "bold red"), error.what, to=self.error_console)
        lines: list[str | tuple[str, str]] = [f"  at {error.where}"] if error.where else []
        lines += [f"  → {error.remedy}"] if error.remedy else []
        trace, run = getattr(error, "trace", None), getattr(error, "run", None)
        if trace:
            stack = [] if self.verbose else shown(trace)
            text = "\n".join(f"  {frame}" for frame in stack) or str(trace).rstrip()
            lines += ["", (text, "dim")]
            if stack:
                log = f"{run}/{LOGS}/rank-{getattr(error, 'rank', None)}.log"
                found = f"in {log}" if run and os.path.exists(log) else "shown with -v"
                lines.append(f"  the complete trace is {found}")
        lines += ["", f"  → raygnn diagnose {shlex.quote(run)}"] if run else []
        for line in lines:
            self._line(line, to=self.error_console)

    def _line(self, *parts: str | tuple[str, str], to: Console | None = None) -> None:
        """Print text without markup; the terminal itself breaks long lines."""
        console, text = to or self.console, Text()
        for part in parts:
            content, style = (part, "") if isinstance(part, str) else part
            text.append(_safe(content, console), style)
        console.print(text, soft_wrap=True, highlight=False)

    def _safe(self, text: str) -> Text:
        return Text(_safe(text, self.console))

    def _cut(self, text: str) -> Text:
        """Truncate a live line to the terminal's width beside its spinner."""
        safe = self._safe(text)
        safe.truncate(max(1, self.console.width - _SPINNER), overflow="crop")
        return safe


class NullDisplay(Display):
    """Display without output."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True, force_terminal=False, force_jupyter=False))


def _console(stderr: bool = False) -> Console:
    output = Output(sys.stderr, loud=False) if stderr else Output(sys.stdout)
    console = Console(file=cast(IO[str], output), stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def _layout(rows: Sequence[Sequence[str]], room: int) -> tuple[int, list[int]] | None:
    """Return the padding of a table's cells and the widths of its columns, none below the width of
    a word in it; None if the words do not fit. Spare width goes to the columns that lack least."""
    columns = ["\n".join(column) for column in zip(*rows)]
    widths = [max(map(cell_len, column.split()), default=0) for column in columns]
    lacking = [
        max(map(cell_len, column.split("\n"))) - width for column, width in zip(columns, widths)
    ]
    for padding in (1, 0):
        spare = room - sum(widths) - len(widths) * (2 * padding + 1) - 1
        if spare >= 0:
            order = sorted(range(len(widths)), key=lacking.__getitem__)
            for position, index in enumerate(order):
                extra = min(lacking[index], spare // (len(order) - position))
                widths[index] += extra
                spare -= extra
            return padding, widths
    return None


def _safe(text: str, console: Console) -> str:
    """Replace control characters, and characters that the console cannot encode."""
    shown = printable(text)
    if console.options.ascii_only:
        shown = shown.translate(_ASCII)
        shown = shown.encode(console.encoding, "backslashreplace").decode(console.encoding)
    return shown


def _sorted_metrics(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    numbers = [(name, value) for name, value in metrics.items() if value is not None]
    return sorted(numbers, key=lambda item: split_order(item[0]))


def _slow(ranks: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for slow in (rank for rank in ranks if rank["slow"] >= _OFTEN):
        name = f"rank {slow['rank']}" + (f" on {slow['host']}" if slow.get("host") else "")
        others = median(rank["busy"] for rank in ranks if rank is not slow)
        busy = f"busy for {slow['busy']:.3f} s a batch"
        texts.append(f"{name}: {busy}, the other ranks for {others:.3f} s")
    return "; ".join(texts)


def _split(seconds: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name.replace('first_step', 'start to first step')} {value:.1f}"
        for name, value in seconds.items()
        if (value >= _SEEN or name == "total") and not (name == "compute" and "forward" in seconds)
    )
