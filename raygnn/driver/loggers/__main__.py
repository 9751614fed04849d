"""``python -m raygnn.driver.loggers RUN NAME``: the process of one logger.

Standard input brings the step of the first record, and at the end of the run its status, a line
each. Where it closes without a status, the command has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import cast, get_args

from raygnn.driver.loggers.feeder import Feeder
from raygnn.driver.loggers.kinds import PACKAGES, Status, kind_of
from raygnn.driver.loggers.process import END, FLUSH
from raygnn.runs.run_directory import LOGGERS, LOGS, Events

_LOOK = 1.0  # seconds
_NICE = 19


def main(argv: Sequence[str]) -> None:
    """Be the process.

    Args:
        argv: the run directory and the logger's name.
    """
    _give_way()
    # Lightning's loggers log on rank 0 alone, and a job manager may give this process another
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        os.environ.pop(name, None)
    code = 1
    try:
        code = 0 if feed(Path(argv[0]), argv[1]) else 1
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


def feed(path: Path, name: str) -> bool:
    """Feed a logger until the run ends; whether it got all records."""
    kind = kind_of(name, path)
    with contextlib.suppress(Exception):  # which the first record meets again
        import_module(PACKAGES[name])
        import_module("lightning.pytorch.loggers")
    first = sys.stdin.readline().strip()
    if not first.isdecimal():
        return True  # the run ended without a record
    events = Events(path / LOGS / LOGGERS)
    feeder = Feeder(kind, path, events.tell, int(first))
    feeder.start()
    Thread(target=_read_end, args=(feeder,), daemon=True).start()
    while feeder.is_alive():
        feeder.look()
        feeder.join(_LOOK)
    events.close()
    return feeder.done


def _read_end(feeder: Feeder) -> None:
    line = sys.stdin.readline().strip()
    # whatever hangs here, in Python or not, ends then
    signal.setitimer(signal.ITIMER_REAL, FLUSH + END)
    feeder.finish(cast(Status, line) if line in get_args(Status) else "failed")


if __name__ == "__main__":
    main(sys.argv[1:])
