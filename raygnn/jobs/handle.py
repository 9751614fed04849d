"""Handle of a training in the background, and its display: a card in a notebook, else lines."""

from __future__ import annotations

import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.errors import DataError, InputError, RaygnnError
from raygnn.runs.run import Run, open_run

if TYPE_CHECKING:
    import pandas

_ENDED = ("done", "failed", "interrupted")
_COLOURS = {
    "pending": "#6b7280",
    "running": "#2563eb",
    "done": "#15803d",
    "failed": "#b91c1c",
    "interrupted": "#b45309",
}
_ERROR = re.compile(
    # lines up to the place or the remedy; without these, those that are indented
    r"^error: (?P<what>.*(?:\n(?!error: |  at |  → ).+)*(?=\n  (?:at |→ ))|.*(?:\n  .*)*)"
    r"(?:\n  at (?P<where>(?:rank (?P<rank>\d+)\b)?.*))?(?:\n  → (?P<remedy>.*))?",
    re.MULTILINE,
)
_LAST_LINES = 3
_BETWEEN = 1.0  # seconds between updates


class Handle(ABC):
    """Handle of a training in another process."""

    name: str  # name of its run

    @property
    @abstractmethod
    def status(self) -> str:
        """``pending``, ``running``, ``done``, ``failed`` or ``interrupted``."""

    @abstractmethod
    def logs(self, lines: int | None = None) -> str:
        """Return its output, or the last ``lines`` lines of it."""

    @abstractmethod
    def stop(self, timeout: float = 120.0) -> None:
        """Interrupt it and wait for at most ``timeout`` seconds until it has saved a checkpoint;
        then a local one is killed, and can resume from an older checkpoint."""

    @abstractmethod
    def _wait(self, deadline: float | None) -> None:
        """Wait until it has ended, or until a deadline of the monotonic clock."""

    @abstractmethod
    def _error(self) -> RaygnnError:
        """Return the error of a training that failed or was interrupted."""

    @property
    @abstractmethod
    def run(self) -> Run | None:
        """Opened run directory; None before it exists, or if it is not visible from here."""

    @property
    def over(self) -> bool:
        """True if it has ended."""
        return self.status in _ENDED

    def metrics(self) -> pandas.DataFrame:
        """Return one row per record so far, as `Run.metrics`; empty before the first one, and if
        the run directory is not visible from here. Raises DataError if a record is damaged."""
        import pandas

        run = self.run
        return pandas.DataFrame() if run is None else run.metrics

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until it is done, for at most ``timeout`` seconds, and return its run.

        Raises:
            TimeoutError: it is still in progress.
            RaygnnError: it failed or was interrupted; see `raygnn.train`.
        """
        self._wait(None if timeout is None else time.monotonic() + timeout)
        if not self.over:
            raise TimeoutError(f"{self.name} is still {self.status} after {timeout:g} s")
        if self.status != "done":
            raise self._error()
        run = self.run
        if run is None:
            what = "the run is done, but its directory is not visible from here"
            remedy = "open it where its storage is mounted"
            raise InputError(what, where=self.name, remedy=remedy)
        return run

    def __repr__(self) -> str:
        try:
            status = self.status
        except RaygnnError as error:  # debuggers call this: it must not raise
            status = error.what
        return f"{type(self).__name__}({self.name!r}, {status})"

    def _repr_html_(self) -> str | None:
        try:
            status = self.status
            share = 1.0 if status == "done" else self._share()
            return card(self.name, status, share, self.logs(50))
        except RaygnnError:
            return None  # a notebook shows the plain text instead

    def _share(self) -> float | None:
        """Return the share of its steps that is done; None if unknown."""
        step, total = (0, None) if (run := self.run) is None else run.progress
        return min(step / total, 1.0) if total else None


def said_error(text: str) -> dict[str, str]:
    """Parse the last error in a command's output, see `Display.error`; {} without one."""
    found = [*_ERROR.finditer(text)]
    return {key: value for key, value in found[-1].groupdict().items() if value} if found else {}


def run_of(path: str | Path, job: str) -> Run | None:
    """Open the run that a job writes at ``path``; None if there is none, or only an earlier or
    unrelated one."""
    try:
        run = open_run(path)
        return run if run.summary.get("job") == job else None
    except (InputError, DataError):
        return None


def card(name: str, status: str, share: float | None, log: str) -> str:
    """Return a training as HTML: its state, the ``share`` of its steps that is done, if known, its
    last progress line and its last other lines."""
    parts = [
        f"<b>{escape(name)}</b> <span style='color:#fff;background:{_COLOURS[status]};"
        f"padding:0 6px;border-radius:3px'>{escape(status)}</span>"
    ]
    if share is not None:
        parts.append(f"<progress value='{share:.4f}' max='1' style='width:100%'></progress>")
    lines = [line for line in log.splitlines() if line.strip()]
    progress = [line for line in lines if line.startswith("epoch ")]
    parts += [f"<div>{escape(line)}</div>" for line in progress[-1:]]
    if lines := [line for line in lines if line not in progress]:
        parts.append(
            "<pre style='margin:4px 0 0;white-space:pre-wrap;font-size:85%;color:#6b7280'>"
            f"{escape(chr(10).join(lines[-_LAST_LINES:]))}</pre>"
        )
    box = "border:1px solid #d1d5db;border-radius:6px;padding:8px 12px;max-width:640px"
    return f"<div style='{box}'>{''.join(parts)}</div>"


def show_card(draw: Callable[[], str | None], ended: threading.Event) -> bool:
    """Show a card in a notebook's cell, updated once a second until the training has ended; return
    False elsewhere. ``draw`` returns the current HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return False
    from IPython.display import HTML, display

    last = draw()
    shown: Any = display(HTML(last), display_id=True)

    def redraw() -> None:
        nonlocal last
        over = False
        while not over:
            over = ended.wait(_BETWEEN)
            with suppress(Exception):  # a failed update ends nothing
                if (html := draw()) != last:
                    shown.update(HTML(html))
                    last = html

    threading.Thread(target=redraw, name="raygnn-card", daemon=True).start()
    return True
