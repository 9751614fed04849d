"""Stops that Python would lose, in real processes with real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

_COMMAND = """
import ctypes, os, signal, sys, time, argparse
from raygnn.cli import carry_out
from raygnn.runs.interrupts import taken
{body}
sys.exit(carry_out(argparse.Namespace(run=lambda args: run())))
"""

_IN_A_CALLBACK = """
def run():
    @ctypes.CFUNCTYPE(None)
    def callback():
        print("begun", flush=True)
        time.sleep(60)
    callback()  # which prints what is raised in it, and drops that
    print("swallowed", flush=True)
    time.sleep(60)
"""

_BEFORE_A_WAIT = """
def run():
    # the signal goes to another thread, and this one's wait is not ended by it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    print("begun", flush=True)
    time.sleep(60)
"""

_MADE_AN_ERROR = """
def run():
    found = []
    @ctypes.CFUNCTYPE(None)
    def callback():
        print("begun", flush=True)
        time.sleep(60)
        found.append(1)
    callback()
    if not found:
        raise RuntimeError("nothing came back")
"""

_COMPILING = """
import numba
from numba.core import codegen
compiled = codegen.JITCodeLibrary._object_compiled_hook.__func__
def hook(cls, *args):
    os.kill(os.getpid(), signal.SIGINT)
    print("hooked", flush=True)
    compiled(cls, *args)
codegen.JITCodeLibrary._object_compiled_hook = classmethod(hook)
def run():
    @numba.njit
    def double(x):
        return 2 * x
    assert double(2) == 4
    print("compiled", flush=True)
    time.sleep(60)
"""

# main has the import lock, and nothing else yet, when it sees the signal
_IMPORTING = """
import _imp, threading
def hold(begun):
    _imp.acquire_lock()
    begun.set()
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_globals["__name__"] != "importlib._bootstrap":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    _imp.release_lock()
def elsewhere():
    import wave
    print("imported\\n", end="", flush=True)
def run():
    begun = threading.Event()
    threading.Thread(target=hold, args=[begun]).start()
    begun.wait()
    try:
        import wave
        time.sleep(60)
    finally:
        thread = threading.Thread(target=elsewhere, daemon=True)
        thread.start()
        thread.join(20)
"""

# torch cannot be imported again after an import that was left halfway
_IMPORTING_TORCH = """
class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == "torch.distributed":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
def run():
    import torch
    print("imported\\n", end="", flush=True)
    time.sleep(60)
"""

_LEAVING = """
def run():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        time.sleep(2.5)
        try:
            {}["nothing"]
        except KeyError:
            time.sleep(2.5)
        print("left", flush=True)
"""

_LEAVING_A_LOOP = """
def lines():
    try:
        while True:
            yield
    finally:  # of a generator that is closed before the error that ends its loop is looked at
        time.sleep(1)
        print("closed", flush=True)
def run():
    with open(os.devnull):
        for _ in lines():
            os.kill(os.getpid(), signal.SIGINT)
"""

_SLOWLY_MADE_AN_ERROR = """
def run():
    try:
        print("begun", flush=True)
        time.sleep(60)
    except BaseException:
        time.sleep(1)
        raise RuntimeError("nothing came back")
"""

# it arrives before all handlers and reminders are in place
_EARLY = """
import threading
begin = threading.Thread.start
def start(self):
    begin(self)
    signal.raise_signal(signal.SIGINT)
threading.Thread.start = start
def run():
    print("begun", flush=True)
before = threading.active_count()
print(carry_out(argparse.Namespace(run=lambda args: run())), threading.active_count() - before)
"""

# something comes when all is done and the handlers are about to be put back
_LATE = """
put = signal.set_wakeup_fd
def late(number, **options):
    if number == -1:
        signal.raise_signal(signal.{})
    return put(number, **options)
signal.set_wakeup_fd = late
def run():
    {}
    return 0
"""

_BETWEEN = """
import raygnn.cli
from contextlib import contextmanager
@contextmanager
def interrupted():
    yield
    os.kill(os.getpid(), signal.SIGINT)
raygnn.cli.stoppable = interrupted
def run():
    return 0
"""

_FORKING = """
import threading
def run():
    if not os.fork():
        signal.pause()
    return 0
def held():
    return os.listdir("/proc/self/fd"), threading.active_count()
before = held()
carry_out(argparse.Namespace(run=lambda args: run()))
print(held() == before, flush=True)
os.kill(0, signal.SIGKILL)
"""

_WITHOUT_THREADS = """
import threading
def none(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = none
def run():
    print("begun", flush=True)
    time.sleep(60)
"""

_TAKEN = """
def run():
    with taken():
        print("begun", flush=True)
        time.sleep(60)
    time.sleep(2.5)
    print("went on", flush=True)
    return 0
"""


def _ended(
    body: str, number: signal.Signals | None = signal.SIGINT, command: str = _COMMAND
) -> tuple[int, str, str]:
    """Run a command, signal it once it reports that it has begun, and return its exit code and
    output."""
    with subprocess.Popen(
        [sys.executable, "-c", command.replace("{body}", body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            if number is not None:
                assert process.stdout.readline() == "begun\n"
                process.send_signal(number)
            out, err = process.communicate(timeout=50)
        finally:
            process.kill()
    return process.returncode, out, err


_INTERRUPTED = "error: interrupted\n"
# code, the signal once it has begun, exit code, standard output and error
_CASES = {
    "just before a wait, SIGTERM": (_BEFORE_A_WAIT, signal.SIGTERM, 130, "", _INTERRUPTED),
    "just before a wait, SIGINT": (_BEFORE_A_WAIT, signal.SIGINT, 130, "", _INTERRUPTED),
    "just before a wait, SIGHUP": (_BEFORE_A_WAIT, signal.SIGHUP, 130, "", _INTERRUPTED),
    "imports go on elsewhere": (_IMPORTING, None, 130, "imported\n", _INTERRUPTED),
    "torch's import is let finish": (_IMPORTING_TORCH, None, 130, "imported\n", _INTERRUPTED),
    "the way out is not disturbed": (_LEAVING, signal.SIGINT, 130, "left\n", _INTERRUPTED),
    "a loop is left undisturbed": (_LEAVING_A_LOOP, None, 130, "closed\n", _INTERRUPTED),
    "becomes an error slowly": (_SLOWLY_MADE_AN_ERROR, signal.SIGINT, 130, "", _INTERRUPTED),
    "early": (_EARLY, None, 130, "130 0\n", ""),
    "too late, SIGINT": (_LATE.format("SIGINT", "pass"), None, 0, "", ""),
    "too late, SIGTERM": (_LATE.format("SIGTERM", "pass"), None, 0, "", ""),
    "too late, SIGHUP": (_LATE.format("SIGHUP", "pass"), None, 0, "", ""),
    "a reminder that comes too late": (
        _LATE.format("SIGURG", "os.kill(os.getpid(), signal.SIGINT)"), None, 130, "", _INTERRUPTED
    ),
    "between two steps of the end": (_BETWEEN, None, 130, "", ""),
    "without a thread": (_WITHOUT_THREADS, signal.SIGINT, 130, "", _INTERRUPTED),
    "ends one thing only": (_TAKEN, signal.SIGINT, 0, "went on\n", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[str, Future[tuple[int, str, str]]]]:
    """All cases, several at a time since they mostly wait."""
    with ThreadPoolExecutor(4) as pool:
        yield {name: pool.submit(_ended, *case[:2]) for name, case in _CASES.items()}


@pytest.mark.parametrize("name", _CASES)
def test_a_stop(name: str, ended: dict[str, Future[tuple[int, str, str]]]) -> None:
    assert ended[name].result() == _CASES[name][2:]


def test_a_stop_in_a_callback() -> None:
    code, out, err = _ended(_IN_A_CALLBACK)
    assert (code, out) == (130, "swallowed\n")
    assert err.startswith("Exception ignored on calling ctypes callback")  # or nothing was tried
    assert err.endswith(_INTERRUPTED)


def test_a_stop_that_becomes_an_error() -> None:
    code, _, err = _ended(_MADE_AN_ERROR)
    assert code == 130
    assert err.endswith(_INTERRUPTED)
    assert "nothing came back" not in err


def test_a_compiler_is_let_finish() -> None:
    code, out, err = _ended(_COMPILING, None)
    assert "hooked\n" in out
    assert (code, err) == (130, _INTERRUPTED)


def test_a_process_that_was_forked_holds_nothing_up() -> None:
    assert _ended(_FORKING, None)[1] == "True\n"


def test_without_a_reminder_a_stop_is_lost() -> None:
    plain = "try:\n    run()\nexcept KeyboardInterrupt:\n    print('stopped')\n"
    body = "import ctypes, time" + _IN_A_CALLBACK.replace("sleep(60)", "sleep(3)") + plain
    assert _ended(body, command="{body}")[1] == "swallowed\n"
