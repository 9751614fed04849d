"""A command on a terminal of some size."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import subprocess
import termios
from collections.abc import Sequence

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")


def rows_on_terminal(args: Sequence[str], columns: int, timeout: float = 120) -> list[str]:
    """Return every row that a command drew, from one movement of the cursor to the next.

    Raises:
        AssertionError: it failed, or took longer than ``timeout`` seconds.
    """
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        ["timeout", f"{timeout:g}", *args],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**variables, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(its)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError as error:
        if error.errno != errno.EIO:  # which is how a terminal ends
            raise
    finally:
        os.close(ours)
        code = process.wait(timeout)
    text = _STYLES.sub("", shown.decode())
    assert code == 0, text
    return [row for row in _MOVES.split(text) if row.strip()]
