"""Files of a run, read for its report; damaged ones are noted instead of raising."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from raygnn.config.places import Uri
from raygnn.errors import DataError
from raygnn.runs.metrics_files import RANKS, Record, last_lines, number, parse
from raygnn.runs.run_directory import (
    EVENTS,
    LOGGERS,
    LOGS,
    METRICS,
    PARTITION,
    PREFLIGHT,
    SCALING,
    TOLD,
    read_config,
    read_status,
    read_summary,
)
from raygnn.util.files import open_regular, read_json

# bytes of a file's records that are used; of a larger file, every n-th line
_MOST, MOST_OF_RANKS = 32 * 2**20, 16 * 2**20
_LONGEST = 16 * 2**20  # bytes of a line
_EVALUATED = (b'"val/', b'"test/')  # of few lines
_MOST_EVENTS = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Readable contents of a run."""

    path: Path
    status: str
    config: dict[str, Any]
    summary: dict[str, Any]
    preflight: dict[str, Any]
    partition: dict[str, Any]
    records: list[Record]  # of ``metrics.jsonl``, those with a step
    ranks: list[Record]  # of ``ranks.jsonl``, likewise
    # ``time`` (seconds since the epoch, NaN = unknown) and ``text``, in order
    events: list[dict[str, Any]]
    faults: list[str] = field(default_factory=list)  # descriptions of unreadable files

    @property
    def shown(self) -> str:
        """Path or URI of the run."""
        storage = str(self.config.get("storage"))
        return str(self.path) if "://" not in storage else (Uri(storage) / self.path.name).shared

    @classmethod
    def read(cls, path: Path) -> Source:
        faults: list[str] = []

        def read(get: Callable[[], T], otherwise: T) -> T:
            try:
                return get()
            except DataError as error:
                faults.append(str(error))
                return otherwise

        return cls(
            path=path,
            status=read(lambda: read_status(path), "unknown"),
            config=read(lambda: read_config(path), {}),
            summary=read(lambda: read_summary(path), {}),
            preflight=read(lambda: read_json(path / PREFLIGHT), {}),
            partition=read(lambda: read_json(path / PARTITION), {}),
            records=read_some(path / METRICS, _MOST, _EVALUATED),
            ranks=read_some(path / RANKS, MOST_OF_RANKS),
            events=_events(path / LOGS),
            faults=faults,
        )


def read_some(path: Path, most: int, special: Sequence[bytes] = ()) -> list[Record]:
    """Read the records with a step from a file of any length; other lines are skipped.

    Args:
        most: bytes; of a longer file every n-th line is used, and the last.
        special: texts of lines that are used in any case, if they are not as many.
    """
    kept, last, left = list[bytes](), b"", 2 * most
    with suppress(OSError), open_regular(path) as file:
        every = os.fstat(file.fileno()).st_size // most + 1
        for index, line in enumerate(iter(lambda: file.readline(_LONGEST), b"")):
            if not line.endswith(b"\n"):
                break  # incomplete, perhaps only so far
            last = line
            if index % every == 0 or (left > 0 and any(word in line for word in special)):
                kept.append(line)
                left -= len(line)
    if kept and kept[-1] is not last:
        kept.append(last)
    return [r for r in map(parse, kept) if r and type(r.get("step")) is int]


def _events(logs: Path) -> list[dict[str, Any]]:
    """Return the command's events, and those of the ranks that no command has reported."""
    events = _lines(logs / TOLD)
    reported = {event["text"] for event in events}
    for name in (EVENTS, SCALING, LOGGERS):
        events += [event for event in _lines(logs / name) if event["text"] not in reported]
    events.sort(key=lambda event: (math.isnan(event["time"]), event["time"]))
    return events[-_MOST_EVENTS:]


def _lines(path: Path) -> list[dict[str, Any]]:
    records = (parse(line) for line in last_lines(path, _MOST))
    return [
        {"time": number(record.get("time")), "text": record["text"]}
        for record in records
        if record and isinstance(record.get("text"), str)
    ]
