"""What a run left, read for its report: whatever is damaged or missing is said, not raised."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from raygnn.errors import DataError
from raygnn.runs.events import EVENTS, LOGGERS, SCALING, TOLD
from raygnn.runs.files import read_json
from raygnn.runs.metrics import Record, parse
from raygnn.runs.ranks import RANKS, number
from raygnn.runs.run import Run
from raygnn.runs.store import LOGS, METRICS, PARTITION, PREFLIGHT

# bytes of a file's records that are looked at; of more, every so many lines
_MOST, _MOST_OF_RANKS = 64 * 2**20, 16 * 2**20
_ALWAYS = (b'"val/', b'"test/')  # lines that are not left out
_MOST_EVENTS = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A run, as far as it can be read.

    Attributes:
        records: of ``metrics.jsonl``, those with a step.
        ranks: of ``ranks.jsonl``, likewise.
        events: ``time`` (seconds since the epoch, NaN where unknown) and ``text``, in order.
        faults: what could not be read, a sentence each.
    """

    run: Run
    status: str
    config: dict[str, Any]
    summary: dict[str, Any]
    preflight: dict[str, Any]
    partition: dict[str, Any]
    records: list[Record]
    ranks: list[Record]
    events: list[dict[str, Any]]
    faults: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: Run) -> Source:
        """Read what there is."""
        faults: list[str] = []

        def read(get: Callable[[], T], otherwise: T) -> T:
            try:
                return get()
            except DataError as error:
                faults.append(str(error))
                return otherwise

        path = run.path
        return cls(
            run=run,
            status=read(lambda: run.status, "unknown"),
            config=read(lambda: run.config, {}),
            summary=read(lambda: run.summary, {}),
            preflight=read(lambda: read_json(path / PREFLIGHT), {}),
            partition=read(lambda: read_json(path / PARTITION), {}),
            records=read_some(path / METRICS, _MOST, _ALWAYS),
            ranks=read_some(path / RANKS, _MOST_OF_RANKS),
            events=_events(path / LOGS),
            faults=faults,
        )


def read_some(path: Path, most: int, always: Sequence[bytes] = ()) -> list[Record]:
    """The records with a step, of a file of any length; what is no record is passed over.

    Args:
        most: bytes; of a longer file every so many lines are read.
        always: what a line holds that is never left out.
    """
    found = []
    try:
        with open(path, "rb") as file:
            every = math.ceil(max(1, path.stat().st_size) / most)
            for index, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # torn, or not yet whole
                if index % every and not any(word in line for word in always):
                    continue
                record = parse(line)
                if record is not None and _is_step(record.get("step")):
                    found.append(record)
    except OSError:
        pass
    return found


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _events(logs: Path) -> list[dict[str, Any]]:
    """What was told, and what ranks left word of that nobody was there to tell."""
    told = _lines(logs / TOLD)
    known = {event["text"] for event in told}
    others = [e for name in (EVENTS, SCALING, LOGGERS) for e in _lines(logs / name)]
    told += [event for event in others if event["text"] not in known]
    return sorted(told, key=lambda event: (math.isnan(event["time"]), event["time"]))[
        -_MOST_EVENTS:
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()[-_MOST:]
    except OSError:
        return []
    found = []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            found.append({"time": number(value.get("time")), "text": value["text"]})
    return found
