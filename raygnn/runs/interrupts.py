"""Handling of SIGTERM, SIGHUP and Ctrl-C, from the signal to the end of the ranks.

1. `stoppable` turns the signal into one `KeyboardInterrupt` in the main thread. While a job is
   watched, `held` delays it until the next `sleep`.
2. `raygnn.driver.session` requests a last checkpoint and waits for it and its upload, at most
   ``fault.save_timeout``. The ranks make no step after it (`raygnn.checkpoint.lifecycle`). A second
   signal, 3 s after the first or later, ends the wait.
3. It stops the job: each rank's watch thread (`raygnn.worker.main`) writes the crash dump and
   exits, whatever collective the rank waits in. A process that does not end in time is killed.
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
_AGAIN = signal.SIGURG  # ignored by processes without a handler, and sorts after all of STOPS
_IMPATIENT = 3.0  # seconds
_PAUSE, _JOIN = 0.2, 1.0  # seconds
_MOST = 3000  # reminders
_DEEPEST = 100  # of a chain of errors
# an error in here can leave the import lock taken, and all threads hanging
_IMPORTING = "importlib._bootstrap"
_CALLED_FROM_C = "llvmlite.binding."  # a compiler that breaks if its callback raises
_ONCE = "torch"  # an import after an interrupted one ends the process


class _Stop:
    """State of a stop, shared by the signal handlers and the thread that repeats the signal."""

    def __init__(self) -> None:
        self.taken = True
        self.over = True  # no reminder is needed
        self.held = True  # the command has not begun, or has ended: an error would do harm
        self.last = -math.inf

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.last > _IMPATIENT:
            self.last, self.taken = now, False
            self._raise(frame)

    def again(self, signum: int, frame: FrameType | None) -> None:
        """Raise the interrupt that was delayed or swallowed, unless the main thread is ending."""
        self.over = self.taken = self.taken or _handled(KeyboardInterrupt)
        # a generator is closed before its loop's error is seen
        if not self.taken and not _handled(GeneratorExit):
            self._raise(frame)

    def _raise(self, frame: FrameType | None) -> None:
        if not self.held and not _critical(frame):  # or it waits for the reminder
            raise KeyboardInterrupt

    def release(self) -> None:
        """Let a signal interrupt, also one that has already arrived."""
        self.held = False
        if not self.taken:
            raise KeyboardInterrupt


_stop = _Stop()  # of the command of this process


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM (a job manager's stop) and SIGHUP (a closed terminal) do what Ctrl-C does.

    A second signal within 3 s, from an impatient user or sent to all processes of a group, does not
    disturb the shutdown. Python can lose a `KeyboardInterrupt`: raised in a callback from C or a
    destructor, it is printed and dropped, and a signal just before a wait in C is seen only after
    it. So the main thread is reminded until it ends.
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
    """Let an interrupt end the block and nothing else."""
    try:
        yield
    except KeyboardInterrupt:
        _stop.taken = True


@contextmanager
def held() -> Iterator[None]:
    """Delay an interrupt within the block to the next `sleep`, so that an iteration of a loop that
    calls it is completed."""
    _stop.held = True
    try:
        yield
    except BaseException:
        _stop.held = False
        raise
    _stop.release()


def sleep(seconds: float) -> None:
    """Sleep between two iterations of a loop in `held`. Raises KeyboardInterrupt after a signal."""
    time.sleep(seconds)
    if not _stop.taken:
        raise KeyboardInterrupt


def take_pending() -> bool:
    """Return True if an interrupt is pending, or has caused the error that is being handled; it is
    then no longer pending."""
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
        with suppress(RuntimeError):  # without a thread, there are no reminders
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
    """Wake the main thread while an interrupt is pending, until the other end closes."""
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
