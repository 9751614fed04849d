"""A job's output as it comes, also through a connection that breaks."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from raygnn.errors import PreflightError
from raygnn.jobs.server import JobServer

_TICK = 1.0  # seconds between looks where nothing comes
_AWAY = 120.0  # seconds that the server may be away in a row
_AGAIN, _BETWEEN = 2.0, 0.2  # seconds until another try; until another look
_SLOWEST = 10.0  # seconds until another look, where several brought nothing
_SILENT = 15  # looks without a line, after which the server is asked
_MOST_WAITING = 10_000  # pieces of text
_END = 5.0  # seconds for a connection to be closed


def tail(server: JobServer, job: str) -> Iterator[str | None]:
    """The lines of a job's output from its beginning until it is over.

    Yields:
        a line, without its end; None each second in which there is none.

    Raises:
        PreflightError: the server is away for two minutes.
        InputError: there is no such job.
    """
    seen, pause = 0, _BETWEEN
    for over in states(server, job):
        if over is None:
            time.sleep(_AGAIN)
            yield None
            continue
        number, silent, before = 0, 0, seen
        with _Reader(server, job) as reader:
            for line in reader.lines():
                number += line is not None
                silent = 0 if line is not None else silent + 1
                if line is None or number > seen:
                    yield line
                seen = max(seen, number)
                # a connection may be dead without saying so
                if silent % _SILENT == _SILENT - 1 and _over(server, job) is not False:
                    break
        if over or (reader.whole and _over(server, job)):
            if reader.whole and (number or reader.rest):
                if reader.rest:
                    yield reader.rest
            else:
                yield from _others(server, job, seen)
            return
        # each look brings all of it anew, and some never bring more: see _others
        pause = _BETWEEN if seen > before else min(2 * pause, _SLOWEST)
        time.sleep(pause)


def states(server: JobServer, job: str) -> Iterator[bool | None]:
    """Whether a job is over, asked anew each time; None while the server does not answer.

    Raises:
        PreflightError: the server is away for two minutes.
        InputError: there is no such job.
    """
    lost: float | None = None
    while True:
        over = _over(server, job)
        if over is not None:
            lost = None
        elif lost is None:
            lost = time.monotonic()
        elif time.monotonic() - lost > _AWAY:
            raise PreflightError(
                f"the job server has not answered for {_AWAY:g} s",
                where=server.address,
                remedy="the job may still run: raygnn logs --follow goes on when it is back",
            )
        yield over


def _others(server: JobServer, job: str, seen: int) -> Iterator[str]:
    """The lines after so many of a job that is over, where a web socket did not bring them: it
    takes no message of more than 4 MiB, and the job server gives up at bytes that are no UTF-8."""
    try:
        lines = server.log(job).split("\n")
    except PreflightError:
        yield "(the job server cannot read the rest of what it printed)"
        return
    yield from lines[seen : len(lines) - (not lines[-1])]


def _over(server: JobServer, job: str) -> bool | None:
    """Whether the job has ended; None where the server does not say."""
    try:
        return server.info(job).over
    except PreflightError:
        return None


class _Reader:
    """Reads a web socket in a thread with an event loop of its own: a notebook's is taken.

    Attributes:
        whole: whether the server has said all that it had to say.
        rest: the beginning of a line whose end has not come.
    """

    def __init__(self, server: JobServer, job: str):
        self.whole, self.rest = False, ""
        self._texts: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._server = server
        self._job = job
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raygnn-tail", daemon=True)

    def lines(self) -> Iterator[str | None]:
        """Whole lines until the connection ends; None each second without one."""
        while True:
            try:
                text = self._texts.get(timeout=_TICK)
            except queue.Empty:
                yield None
                continue
            if text is None:
                break
            *whole, self.rest = (self.rest + text).split("\n")
            yield from whole

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        self._thread.join(_END)

    def _run(self) -> None:
        self._task = self._loop.create_task(self._read())
        with suppress(asyncio.CancelledError, Exception):  # whoever asks next is told why
            self._loop.run_until_complete(self._task)
        self._put(None)
        self._loop.close()

    async def _read(self) -> None:
        async for text in self._server.tail(self._job):
            self._put(text)
        self.whole = True

    def _put(self, text: str | None) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._texts.put(text, timeout=_TICK)
                return
