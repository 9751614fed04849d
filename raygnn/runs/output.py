"""Standard output that may be lost: a closed pipe, a closed terminal, a full disk.

A command whose output is lost is stopped as with Ctrl-C, since it would run for hours, and can be
resumed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from typing import IO, Any

from raygnn.errors import Interrupted

LOGGER_THREAD = "raygnn-logger-"  # name prefix of threads for which a command does not wait


class OutputLost(Interrupted):
    """Standard output cannot be written any more."""

    def __init__(self, error: OSError):
        super().__init__(
            f"standard output cannot be written: {error.strerror}",
            remedy="free space, or send it to a process that reads it",
        )
        # True if the reader (head, less) has exited: no message is needed
        self.quiet = error.errno == errno.EPIPE
        if self.quiet:
            self.exit_code = 128 + signal.SIGPIPE


class Output:
    """Stream that raises :class:`OutputLost` once; further writes are dropped, so that the shutdown
    is not disturbed. ``loud``: False = never raise."""

    def __init__(self, stream: IO[str], *, loud: bool = True):
        self._stream = stream
        self._loud = loud
        self._lost = False

    def write(self, text: str) -> int:
        self._do(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, act: Callable[..., object], *args: str) -> None:
        if not self._lost:
            try:
                act(*args)
            except OSError as error:
                self._lost = True
                if self._loud:
                    raise OutputLost(error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def printable(text: str) -> str:
    """Escape control characters, which a terminal could obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def as_text(value: Any) -> str:
    """Format a value for a table: numbers grouped by thousands, others as text, nothing for
    None."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return "" if value is None else value if isinstance(value, str) else str(value)
    number = float(value)
    whole = isinstance(value, Integral) or abs(number) >= 1000
    return f"{number:,.0f}" if whole else f"{number:.4g}"


def say(text: str, end: str = "\n") -> None:
    """Print and flush. Raises OutputLost if it cannot be printed."""
    output = Output(sys.stdout)
    output.write(text + end)
    output.flush()


def open_streams() -> None:
    """Open the null device for standard streams that were closed at the start (``>&-``): the next
    opened file would get their number, and the output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            setattr(sys, name, os.fdopen(descriptor, mode))


def drop_output() -> None:
    """Redirect standard output to the null device, since the interpreter flushes it at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
