"""``python -m raygnn.training.loggers RUN STEP``: the process; ended by a line on standard input.

That line is the status of the run. Where the input closes without one, its command has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

from raygnn.runs.events import LOGGERS, Events
from raygnn.runs.metrics import MetricsTail, Record
from raygnn.runs.run import Run
from raygnn.runs.store import LOGS, METRICS
from raygnn.training.loggers.feeder import Feeder
from raygnn.training.loggers.kinds import KINDS, Status
from raygnn.training.loggers.process import DIRECTORY, END, FLUSH

_POLL = 0.5  # seconds between looks at the records
_NICE = 19


def main(argv: Sequence[str]) -> None:
    """Be the process.

    Args:
        argv: the run directory, and the step of the first record of this command.
    """
    _give_way()
    # Lightning's loggers log on rank 0 alone, and a job manager may give this process another
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        os.environ.pop(name, None)
    ended: list[Status] = []
    threading.Thread(target=_read_end, args=(ended,), daemon=True).start()
    code = 1
    try:
        feed(Path(argv[0]), int(argv[1]), ended)
        code = 0
    except Exception:
        traceback.print_exc()
    # without what the libraries do at the end of a process, which may wait for a server for ever
    sys.stderr.flush()
    os._exit(code)


def _give_way() -> None:
    """Take what the ranks leave of this machine's processors, if they are on it, too."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    # Linux may weigh sessions against each other, and the niceness only within one
    if os.getsid(0) == os.getpid():  # or it would be that of who started us
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE))


def feed(path: Path, step: int, ended: Sequence[Status]) -> None:
    """Feed the loggers of a run until it ends.

    Args:
        path: of the run.
        step: of the first record of this command.
        ended: gets the status of the run when it ended, from another thread.
    """
    events = Events(path / LOGS / LOGGERS)
    config = Run(path).config
    kinds = [
        KINDS[name](path / DIRECTORY, config["logging"].get(name, {}), config)
        for name in config["logging"]["loggers"]
    ]
    whole = [kind.whole or kind.fresh for kind in kinds]
    feeders = [Feeder(kind, events.tell, step) for kind in kinds]
    for feeder in feeders:
        feeder.start()
    tail, follow = MetricsTail(path / METRICS), _Follow()
    while True:
        last = bool(ended)
        room = last or all(feeder.has_room() for feeder in feeders)
        records = _poll(tail) if room else []
        back = follow.goes_back(records)
        step = step if back is None else min(step, back)
        news = [record for record in records if record["step"] >= step]
        for kind, wants_all, feeder in zip(kinds, whole, feeders):
            if back is None:
                feeder.add(records if wants_all else news)
            else:
                feeder.go_back(back, _all(path) if kind.whole else news)
            feeder.look()
        if last and not records:
            break
        if not records:
            time.sleep(_POLL)
    _finish(feeders, ended[0], events)
    events.close()


def _poll(tail: MetricsTail) -> list[Record]:
    """The new records that say to which step they belong."""
    return [record for record in tail.poll() if isinstance(record.get("step"), int)]


def _all(path: Path) -> Iterator[Record]:
    tail = MetricsTail(path / METRICS)
    while records := _poll(tail):
        yield from records


class _Follow:
    """Notices that a run went on from an earlier step."""

    def __init__(self) -> None:
        self._step = -1
        self._kinds: set[frozenset[str]] = set()  # which values the records of that step had

    def goes_back(self, records: Sequence[Record]) -> int | None:
        """The step, if it did."""
        back = [record["step"] for record in records if self._is_back(record)]
        return min(back) if back else None

    def _is_back(self, record: Record) -> bool:
        step, values = record["step"], frozenset(record)
        again = step < self._step or (step == self._step and values in self._kinds)
        self._kinds = {values} if step != self._step else self._kinds | {values}
        self._step = step
        return again


def _read_end(ended: list[Status]) -> None:
    line = sys.stdin.readline().strip()
    # whatever hangs here, in Python or not, ends then
    signal.setitimer(signal.ITIMER_REAL, FLUSH + END)
    ended.append(cast(Status, line) if line in get_args(Status) else "failed")


def _finish(feeders: Sequence[Feeder], status: Status, events: Events) -> None:
    deadline = time.monotonic() + FLUSH
    for feeder in feeders:
        feeder.finish(status)
    for feeder in feeders:
        feeder.join(max(0.0, deadline - time.monotonic()))
    for feeder in feeders:
        if feeder.is_alive() or feeder.left():
            name = feeder.name.removeprefix("raygnn-")
            events.tell(f"{name} did not get {feeder.left():,} records; metrics.jsonl has them all")


if __name__ == "__main__":
    main(sys.argv[1:])
