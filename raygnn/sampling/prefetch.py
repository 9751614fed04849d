"""A bounded pipeline: batches are made in one background thread while the model trains.

The thread makes exactly the batches that will be consumed, in order, so that its collectives
match those of the other ranks. Whatever goes wrong in it is raised where the batch is awaited, on
the rank itself and, through the alarm, on those that would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from raygnn.errors import error_text
from raygnn.sampling.alarm import Alarm

log = logging.getLogger("raygnn")

T = TypeVar("T")

Note = Callable[..., None]  # told what a thread does: ``note(phase, epoch=…, step=…)``

# Training goes first where the two share a core: what is prepared ahead fills the time in which a
# rank waits for the others, so that the ranks' steps are more alike.
_NICE = 4
_POLL = 0.5  # seconds between looks at whether the other side is still there


def silent(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """A `Note` that nobody reads."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    pass


class Prefetcher(Generic[T]):
    """Iterates ``make(step)`` over ``steps``, up to ``depth`` ahead of the consumer.

    With depth 0 everything happens in the caller's thread. Closing (or dropping) the iterator
    ends the thread after the batch it is making.

    Args:
        alarm: rung when a batch can not be made, and looked at while one is awaited.
        note: told ``"queue"`` when the thread waits for room.

    Attributes:
        failure: what the thread died of, as soon as it has; raised when its turn comes.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        steps: Iterable[int],
        depth: int,
        alarm: Alarm | None = None,
        note: Note | None = None,
    ):
        self._make = make
        self._steps = steps
        self._depth = depth
        self._alarm = alarm
        self._note = note or silent
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        if self._depth == 0:
            yield from map(self._make, self._steps)
            return
        ready: queue.Queue[T | _Failure | _End] = queue.Queue(maxsize=self._depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(ready, stop), name="raygnn-prefetch", daemon=True
        )
        thread.start()
        try:
            while True:
                item = self._next(ready, thread)
                if isinstance(item, _End):
                    return
                if isinstance(item, _Failure):
                    raise item.error
                yield item
        finally:
            stop.set()

    def _next(
        self, ready: queue.Queue[T | _Failure | _End], thread: threading.Thread
    ) -> T | _Failure | _End:
        while True:
            try:
                return ready.get(timeout=_POLL)
            except queue.Empty:
                if self._alarm is not None:
                    self._alarm.check()
                if not thread.is_alive() and ready.empty():
                    raise RuntimeError("the prefetch thread ended without a batch") from None

    def _run(self, ready: queue.Queue[T | _Failure | _End], stop: threading.Event) -> None:
        def put(item: T | _Failure | _End) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL)
                    return True
                except queue.Full:
                    continue
            return False

        os.nice(_NICE)  # this thread's alone, on Linux
        try:
            for step in self._steps:
                made = self._make(step)
                self._note("queue")
                if not put(made):
                    return
        except BaseException as error:
            if not isinstance(error, Exception):  # which would end the process in silence
                ended = RuntimeError(f"{error_text(error)} while a batch was prepared")
                ended.__cause__ = error
                error = ended
            self.failure = error
            log.error("a batch could not be prepared", exc_info=error)
            if self._alarm is not None:
                with contextlib.suppress(Exception):  # the others will time out
                    self._alarm.ring(error)
            put(_Failure(error))
        else:
            put(_End())
