"""A rank's log, and the record of its failure: its own cause, not a consequence of another's."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO

from raygnn.errors import (
    InputError,
    PreflightError,
    RaygnnError,
    TrainingError,
    error_text,
    plain_text,
    trace_text,
)
from raygnn.runs.diagnose.causes import of_training
from raygnn.runs.diagnose.state_file import BOX, CRASH, DRIVER, FAILURE, STATE, file_of
from raygnn.runs.run_directory import EVENTS, LOGGERS, SCALING
from raygnn.util.files import storage_error, write_json
from raygnn.worker.ray_nodes import Lost

_LONGEST = 4000  # characters of an error's text

# texts of torch, gloo and our alarm when another rank has gone: a consequence, never the cause
_CONSEQUENCES = (
    "connection reset",
    "connection closed",
    "broken pipe",
    "timed out waiting",
    "could not prepare its batch",
)


@dataclass(frozen=True)
class Failure:
    """Failure of one rank.

    Attributes:
        reached: newest checkpoint at that time.
        final: a restart would meet the failure again.
        kind: name of the exception's class.
        attempt: number of the attempt that it ended.
        blamed: rank that the error itself blames.
        shows_trace: the trace helps the user, since it shows more than the check of bad input.
    """

    rank: int
    time: float
    what: str
    trace: str
    remedy: str | None = None
    where: str | None = None
    exit_code: int = TrainingError.exit_code
    reached: str = ""
    final: bool = False
    kind: str = ""
    attempt: int = 0
    blamed: int | None = None
    shows_trace: bool = True

    @property
    def is_consequence(self) -> bool:
        said = any(phrase in self.what.lower() for phrase in _CONSEQUENCES)
        return said and of_training(self.kind, self.what, self.trace)

    def as_error(self) -> TrainingError:
        place = f"rank {self.rank}" + (f", {self.where}" if self.where else "")
        error = TrainingError(
            self.what,
            where=place,
            remedy=self.remedy,
            rank=self.rank,
            trace=self.trace if self.shows_trace else None,
        )
        error.exit_code, error.final = self.exit_code, self.final
        return error


def describe(
    error: BaseException, rank: int, reached: str, earlier: list[Failure], attempt: int = 0
) -> Failure:
    """Return the failure that an exception stands for.

    Args:
        reached: name of the newest checkpoint.
        earlier: failures of the previous start. The same cause on the same rank again, without a
            new checkpoint in between, is final. Bad input is final at once, and so is storage
            that stays full or read-only.
    """
    trace, kind = trace_text(error), type(error).__name__
    found = Failure(
        rank, time.time(), error_text(error), trace, reached=reached, kind=kind, attempt=attempt
    )
    if isinstance(error, Exception):
        error = storage_error(error) or error
    if isinstance(error, RaygnnError):
        found = replace(
            found,
            what=plain_text(error.what),
            remedy=error.remedy,
            where=error.where,
            exit_code=error.exit_code,
            final=isinstance(error, (InputError, PreflightError)) or getattr(error, "final", False),
            shows_trace=not isinstance(error, InputError) or error.__cause__ is not None,
            blamed=getattr(error, "rank", None),
        )
    same = any((e.rank, e.what, e.reached) == (rank, found.what, reached) for e in earlier)
    return replace(found, final=found.final or (same and not found.is_consequence))


def record(run_dir: Path, failure: Failure) -> None:
    """Write ``logs/rank-<r>.failure.json``; a full disk must not hide the cause."""
    with contextlib.suppress(OSError):
        path = file_of(run_dir / "logs", failure.rank, FAILURE)
        path.write_text(json.dumps(failure.__dict__))


def log_failure(run_dir: Path, rank: int, what: str) -> None:
    """Write the cause of a rank's end to its log, if the rank cannot do so itself."""
    path = run_dir / "logs" / f"rank-{rank}.log"
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 ERROR raygnn: failed\n{what}\n")


def recorded(run_dir: Path) -> list[Failure]:
    """Return the recorded failures, causes first, then by time."""
    found = []
    for path in (run_dir / "logs").glob(f"rank-*{FAILURE}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Failure(**json.loads(path.read_text())))
    return sorted(found, key=lambda failure: (failure.is_consequence, failure.time))


def record_driver(
    run_dir: Path,
    error: TrainingError,
    cause: BaseException | None,
    oom_kills: int,
    lost: Sequence[Lost] = (),
    *,
    ray_died: bool = False,
) -> None:
    """Write ``logs/driver.json``: Ray Train's report on workers that recorded nothing.

    Args:
        error: as the user sees it.
        cause: as Ray Train raised it.
        oom_kills: number of processes that the driver's machine killed for memory during the run.
        lost: ranks whose nodes are gone.
        ray_died: the error is the death of one of Ray's processes.
    """
    workers = getattr(cause, "worker_failures", {})
    facts = {
        "time": time.time(),
        "error": error.what[:_LONGEST],
        "rank": error.rank,
        "ray": {"type": type(cause).__name__, "text": str(cause)[:_LONGEST]} if cause else None,
        "workers": {
            str(rank): {
                "type": type(failure).__name__,
                "text": str(failure)[:_LONGEST],
                "said": isinstance(failure, RaygnnError),
            }
            for rank, failure in workers.items()
        },
        "oom_kills": oom_kills,
        "ray_died": ray_died,
        "lost": {str(each.rank): {"host": each.host, "why": each.why} for each in lost},
    }
    with contextlib.suppress(OSError):
        write_json(run_dir / "logs" / DRIVER, facts)


def clear(run_dir: Path) -> None:
    """Remove the ranks' states and failures and the notices of an earlier command, so that a
    diagnosis is of the new one even if no rank starts."""
    logs = run_dir / "logs"
    notices = (logs / name for name in (DRIVER, EVENTS, SCALING, LOGGERS))
    of_ranks = (logs.glob(f"rank-*{kind}") for kind in (STATE, FAILURE, BOX, CRASH))
    for path in chain(notices, *of_ranks):
        path.unlink(missing_ok=True)


class _Tee:
    """Stream that also writes the prints of user code to the log file."""

    def __init__(self, stream: IO[str], log: IO[str]):
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not fail the print
            self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Copy this rank's logging, warnings and prints to ``path``; lines that a full disk does not
    take are lost without an error."""
    file = open(  # noqa: SIM115
        path, "a", encoding="utf-8", errors="backslashreplace", buffering=1
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = _, ours = logging.getLogger(), logging.getLogger("raygnn")
    for logger in loggers:
        logger.addHandler(handler)
    ours.propagate = False  # other handlers write to the streams that are copied here
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # Lightning's own: a deprecation, DDP created on another stream, and a barrier's device
    for text in (".*LeafSpec.* is deprecated", "The AccumulateGrad node's", r"barrier\(\): using"):
        warnings.filterwarnings("ignore", message=text)
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(out, file), _Tee(err, file)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        logging.captureWarnings(False)
        for logger in loggers:
            logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            file.close()
