"""Signals that end a command."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPATIENT = 3.0  # seconds


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM (a job manager's stop) and SIGHUP (a closed terminal) do what Ctrl-C does.

    A second signal at once, from an impatient hand or one that stops all processes of a group,
    does not disturb the way out.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -math.inf

    def interrupt(signum: int, frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _IMPATIENT:
            last = now
            raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in handlers.items():
        if handler not in (signal.SIG_IGN, None):  # by nohup, or for a shell's background job
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one of C's, which Python cannot put back
                signal.signal(number, handler)
