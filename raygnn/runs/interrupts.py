"""Handling of SIGTERM, SIGHUP and Ctrl-C, from the signal to the end of the ranks.

1. `stoppable` turns the signal into one `KeyboardInterrupt` in the main thread, which nothing on
   the way may swallow. While a job is watched, `held` puts it off until the next `sleep`.
2. `raygnn.driver.session` asks the ranks for a last checkpoint and waits for it and its upload, at
   most ``fault.save_timeout``. The ranks make no step after it (`raygnn.checkpoint.lifecycle`). A
   second signal, 3 s after the first or later, ends the wait.
3. It stops the job: each rank's watch thread (`raygnn.worker.main`) writes the black box and exits,
   whatever collective the rank waits in. What does not end in time is killed.
4. It records ``interrupted`` in the summary, shuts Ray down, and raises
   `raygnn.errors.Interrupted`, which is the command's message and exit code.
"""

from __future__ import annotations

import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN = signal.SIGURG  # ignored by what has no handler, and sorts after those of STOPS
_IMPATIENT = 3.0  # seconds
_PAUSE, _JOIN = 0.2, 1.0  # seconds
_MOST = 3000  # reminders
_DEEPEST = 100  # of a chain of errors
# an error at the wrong place in here leaves the import lock taken, and all threads hanging
_IMPORTING = "importlib._bootstrap"
_CALLED_FROM_C = "llvmlite.binding."  # a compiler that ends half-done where its callback raises
_ONCE = "torch"  # imported again after an import that was left halfway, it ends the process


class _Stop:
    """State of a stop, shared by the signal handlers and the thread that repeats the signal."""

    def __init__(self) -> None:
        self.taken = True
        self.over = True  # nothing is left to remind of
        self.held = True  # the command has not begun, or has ended: an error would do harm
        self.last = -math.inf

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.last > _IMPATIENT:
            self.last, self.taken = now, False
            self._raise(frame)

    def again(self, signum: int, frame: FrameType | None) -> None:
        """Raise what was put off or swallowed; not where the main thread is on its way out."""
        self.over = self.taken = self.taken or _handled(KeyboardInterrupt)
        # a loop that was left closes its generator before anything else knows why it was left
        if not self.taken and not _handled(GeneratorExit):
            self._raise(frame)

    def _raise(self, frame: FrameType | None) -> None:
        if not self.held and not _critical(frame):  # or it waits for the reminder
            raise KeyboardInterrupt

    def release(self) -> None:
        """Let what comes from now on, or has come already, interrupt."""
        self.held = False
        if not self.taken:
            raise KeyboardInterrupt


_stop = _Stop()  # of the command of this process


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM (a job manager's stop) and SIGHUP (a closed terminal) do what Ctrl-C does.

    A second signal at once, from an impatient hand or one that stops all processes of a group,
    does not disturb the way out.

    Python can lose a `KeyboardInterrupt`: one that is raised in a callback from C or a destructor
    is printed and dropped, and a signal that comes just before a wait in C begins is seen only
    after it. So the main thread is reminded until it is on its way out.
    """
    global _stop
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _stop = _stop, _Stop()
    handlers = {number: signal.getsignal(number) for number in (*STOPS, _AGAIN)}
    try:
        for number in STOPS:
            if handlers[number] not in (signal.SIG_IGN, None):  # by nohup, or a background job
                signal.signal(number, _stop.interrupt)
        signal.signal(_AGAIN, _stop.again)
        with _reminded(_stop):
            try:
                _stop.release()
                yield
            finally:
                _stop.held = True
    finally:
        _stop = before
        for number, handler in reversed(handlers.items()):  # SIGINT's, which may raise, last
            if handler is not None:  # one of C's, which Python cannot put back
                signal.signal(number, handler)


@contextmanager
def taken() -> Iterator[None]:
    """Let a stop end what is in here and no more."""
    try:
        yield
    except KeyboardInterrupt:
        _stop.taken = True


@contextmanager
def held() -> Iterator[None]:
    """Let a stop only set a flag in here, which `sleep` reads: what goes on in a loop that calls
    it often is not torn in the middle."""
    _stop.held = True
    try:
        yield
    except BaseException:
        _stop.held = False
        raise
    _stop.release()


def sleep(seconds: float) -> None:
    """Sleep, as a loop in `held` does between two rounds. Raises KeyboardInterrupt if a stop was
    asked for."""
    time.sleep(seconds)
    if not _stop.taken:
        raise KeyboardInterrupt


def take_pending() -> bool:
    """Return True if a stop is unanswered, or the handled error was caused by one. No reminder
    interrupts what reports it."""
    is_pending = not _stop.taken or _handled(KeyboardInterrupt)
    _stop.taken = True
    return is_pending


@contextmanager
def _reminded(stop: _Stop) -> Iterator[None]:
    heard, written = socket.socketpair()
    with heard, written:
        written.setblocking(False)
        reminding = threading.Thread(
            target=_remind, args=(heard, stop), name="raygnn-signals", daemon=True
        )
        with suppress(RuntimeError):  # no thread is to be had: it must do without
            reminding.start()
        others = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(others)
            written.shutdown(socket.SHUT_WR)  # a process that was forked may have it open, too
            if reminding.is_alive():
                reminding.join(_JOIN)


def _remind(heard: socket.socket, stop: _Stop) -> None:
    """Wake the main thread as long as a stop has not been taken, until the other end closes."""
    main = threading.main_thread().ident
    assert main is not None
    left = 0
    while True:
        heard.settimeout(_PAUSE if left else None)
        try:
            numbers = heard.recv(64)
        except TimeoutError:
            left = 0 if stop.over else left - 1
            if left:
                with suppress(ProcessLookupError):
                    signal.pthread_kill(main, _AGAIN)
            continue
        if not numbers:
            return
        if any(number in STOPS for number in numbers):
            # only the main thread knows, after it has seen the signal itself
            stop.over, left = False, _MOST


def _critical(frame: FrameType | None) -> bool:
    """Return True if an exception would do harm at the main thread's position."""
    critical = frame is not None and frame.f_globals.get("__name__") == _IMPORTING
    while frame is not None and not critical:
        name = str(frame.f_globals.get("__name__"))
        loading = frame.f_code.co_name == "<module>" and name.partition(".")[0] == _ONCE
        critical = loading or name.startswith(_CALLED_FROM_C)
        frame = frame.f_back
    return critical


def _handled(kind: type[BaseException]) -> bool:
    """Return True if the error that is being handled is, or was caused by, one of this kind."""
    error = sys.exc_info()[1]
    for _ in range(_DEEPEST):
        if error is None or isinstance(error, kind):
            break
        error = error.__context__
    return isinstance(error, kind)
