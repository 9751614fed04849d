"""Files of a run that show how it ended.

A run directory may have been copied, and files may be missing, cut off or damaged: such a file is
skipped with a note.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raygnn.errors import DataError
from raygnn.runs.diagnose.causes import own_modules
from raygnn.runs.diagnose.state_file import BOX, CRASH, DRIVER, FAILURE, STATE, State, read_state
from raygnn.runs.run_directory import (
    CONFIG,
    LOGS,
    PREFLIGHT,
    RANK_FILE,
    SUMMARY,
    is_run,
    read_config,
    read_status,
    read_summary,
)
from raygnn.util.files import LARGEST_JSON, read_regular

_LARGEST = 8 * 2**20  # bytes of a traceback that are read
_MOST_RANKS = 2**16

# keys of files in logs/
_BOX = {"rank", "attempt", "time", "reason"}
_FAILURE = {"rank", "time", "what", "trace"}
_DRIVER = {"error", "workers"}


@dataclass(frozen=True)
class Traces:
    """Files of one rank of the last attempt."""

    rank: int
    # its state file; of an earlier attempt, if there is none of the last one
    state: State | None = None
    box: Mapping[str, Any] | None = None  # its crash dump
    failure: Mapping[str, Any] | None = None  # its record of its failure
    crash: str = ""  # faulthandler's text


@dataclass(frozen=True)
class Evidence:
    """Contents of a run directory that bear on its end."""

    run: str
    status: str  # see `raygnn.runs.run.Run.status`; ``unknown`` if its file is damaged
    error: str = ""  # the command's message
    own: tuple[str, ...] = ()  # path suffixes of the user's modules
    attempt: int = 1  # number of the last attempt
    ranks: tuple[Traces, ...] = ()
    driver: Mapping[str, Any] = field(default_factory=dict)  # ``logs/driver.json``
    # preflight's estimates of a node's memory, with ``use``, ``bytes`` and ``remedy``
    memory: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()  # skipped files, and why
    now: float = 0.0  # when this was read, seconds since the epoch

    @property
    def ray_text(self) -> str:
        """Text of Ray Train's error; empty if there is none."""
        return str((self.driver.get("ray") or {}).get("text", ""))


def read(run: Path) -> Evidence:
    """Read the evidence in a run directory."""
    return _EvidenceReader(run).evidence()


class _EvidenceReader:
    def __init__(self, path: Path):
        self.path = path
        self.logs = path / LOGS
        self.notes: list[str] = []

    def evidence(self) -> Evidence:
        ranks, attempt = self._traces()
        try:
            status, error = read_status(self.path), read_summary(self.path).get("error") or ""
        except DataError as damage:
            status, error = "unknown", ""
            self.notes.append(f"{SUMMARY} was skipped: {damage.what}")
        return Evidence(
            run=str(self.path),
            status=status,
            error=error,
            own=own_modules(self._config()),
            attempt=attempt,
            ranks=tuple(ranks),
            driver=self._json(f"{LOGS}/{DRIVER}", _DRIVER) or {},
            memory=tuple((self._json(PREFLIGHT) or {}).get("memory") or ()),
            notes=tuple(self.notes),
            now=time.time(),
        )

    def _traces(self) -> tuple[list[Traces], int]:
        try:
            names = sorted(entry.name for entry in self.logs.iterdir())
        except OSError:
            names = []
        numbers = sorted({int(m[1]) for name in names if (m := RANK_FILE.match(name))})
        states = {rank: self._state(rank) for rank in numbers}
        boxes = {rank: self._json(f"{LOGS}/rank-{rank}{BOX}", _BOX) for rank in numbers}
        failures = {r: self._json(f"{LOGS}/rank-{r}{FAILURE}", _FAILURE) for r in numbers}
        known = filter(None, states.values())
        newest = max(known, key=lambda state: (state.command, state.attempt), default=None)
        attempt = max((box["attempt"] for box in boxes.values() if box), default=1)
        since, world = 0.0, numbers
        if newest is not None:
            attempt, since = newest.attempt, newest.command
            world = [*range(min(newest.world, _MOST_RANKS))]

        def of_last_start(record: dict[str, Any] | None) -> dict[str, Any] | None:
            if record and record.get("attempt", 0) == attempt and record["time"] >= since:
                return record
            return None

        ranks = []
        for rank in world:
            state = states.get(rank)
            failure = of_last_start(failures.get(rank)) or _last_words(state, attempt)
            box, crash = of_last_start(boxes.get(rank)), self._crash(rank, attempt)
            ranks.append(Traces(rank, state, box, failure, crash))
        return ranks, attempt

    def _config(self) -> dict[str, Any]:
        with suppress(DataError):
            if is_run(self.path) and (config := read_config(self.path)):
                return config
        self.notes.append(f"{CONFIG} is missing or damaged: judged by the other files alone")
        return {}

    def _state(self, rank: int) -> State | None:
        try:
            return read_state(self.logs / f"rank-{rank}{STATE}")
        except DataError as error:
            self.notes.append(f"logs/rank-{rank}{STATE} was skipped: {error.what}")
            return None

    def _json(self, name: str, keys: Set[str] = frozenset()) -> dict[str, Any] | None:
        """Read a JSON object; None, with a note, if it is damaged or lacks one of the keys."""
        try:
            value = json.loads(read_regular(self.path / name, LARGEST_JSON))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.notes.append(f"{name} was skipped: {error}")
            return None
        if isinstance(value, dict) and keys <= value.keys():
            return value
        self.notes.append(f"{name} was skipped: it is not what raygnn writes there")
        return None

    def _crash(self, rank: int, attempt: int) -> str:
        """Return faulthandler's text on a fatal error in this attempt of the rank, or ""."""
        try:
            content = read_regular(self.logs / f"rank-{rank}{CRASH}", _LARGEST, cut=True)
        except OSError:
            return ""
        text = content.decode(errors="replace")
        _, begun, last = text.rpartition(f"start {attempt} pid ")
        return last if begun and "Fatal Python error" in last else ""


def _last_words(state: State | None, attempt: int) -> dict[str, Any] | None:
    """Return the failure in a rank's state file, where a full disk kept it from recording it."""
    if state is None or state.attempt != attempt or not state.words:
        return None
    words = {"what": state.words, "trace": "", "file": f"rank-{state.rank}{STATE}"}
    return {"rank": state.rank, "time": state.beat, **words}
