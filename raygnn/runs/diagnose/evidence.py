"""Files of a run that show how it ended.

A run directory may have been copied, and files may be missing, cut off or damaged: such a file is
skipped with a note.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygnn.errors import DataError
from raygnn.runs.diagnose.state_file import (
    BOX,
    CRASH,
    DRIVER,
    FAILURE,
    STATE,
    RankAttempt,
    State,
    read_state,
)
from raygnn.runs.run_directory import (
    CONFIG,
    LOGS,
    PREFLIGHT,
    RANK_FILE,
    SUMMARY,
    is_run,
    read_config,
    read_status,
)
from raygnn.runs.tracebacks import own_modules
from raygnn.util.files import LARGEST_JSON, read_regular

_LARGEST = 8 * 2**20  # bytes of a traceback that are read
_LARGEST_RECORD = 4 * 2**20  # bytes of a crash dump or other record; a larger file is not ours
_SILENT_RANKS = 512  # reported ranks without a file, since the recorded number may be damaged
_DIGITS = 19  # of a number that we write

# keys and types of files in logs/
_BOX = {"rank": int, "attempt": int, "time": (int, float), "reason": str}
_FAILURE = {"rank": int, "time": (int, float), "what": str, "trace": str}
_DRIVER = {"error": str, "workers": dict}


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
    """Evidence in a run directory."""

    run: str
    status: str  # see `raygnn.runs.run.Run.status`; ``unknown`` if its file is damaged
    error: str = ""  # the command's message
    own: tuple[str, ...] = ()  # path suffixes of the user's modules
    attempt: int = 1  # number of the last attempt
    ranks: tuple[Traces, ...] = ()
    driver: Mapping[str, Any] | None = None  # ``logs/driver.json``
    # preflight's estimates of a node's memory, with ``use``, ``bytes`` and ``remedy``
    memory: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()  # skipped files, and why
    now: float = 0.0  # when this was read, seconds since the epoch

    @property
    def ray_text(self) -> str:
        """Text of Ray Train's error; empty if there is none."""
        raised = (self.driver or {}).get("ray")
        return str(raised.get("text")) if isinstance(raised, Mapping) else ""


def read(run: Path) -> Evidence:
    """Read what the run left."""
    return _EvidenceReader(run).evidence()


class _EvidenceReader:
    def __init__(self, path: Path):
        self.path = path
        self.logs = path / LOGS
        self.notes: list[str] = []

    def evidence(self) -> Evidence:
        ranks, attempt = self._traces()
        summary = self._json(SUMMARY, {}, LARGEST_JSON) or {}
        return Evidence(
            run=str(self.path),
            status=self._status(),
            error=str(summary.get("error") or ""),
            own=self._own_modules(),
            attempt=attempt,
            ranks=tuple(ranks),
            driver=self._json(f"{LOGS}/{DRIVER}", _DRIVER),
            memory=self._memory(),
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
        starts = [state.start for state in states.values() if state]
        newest = max(starts, key=lambda start: (start.command, start.attempt), default=None)
        if newest is None:
            attempt = max((box["attempt"] for box in boxes.values() if box), default=1)
            since, world = 0.0, numbers
        else:
            attempt, since = newest.attempt, newest.command
            world = self._world(newest, numbers)

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

    def _world(self, newest: RankAttempt, numbers: Sequence[int]) -> list[int]:
        world = newest.world
        left = {rank for rank in numbers if rank < world}
        reported = left.union(range(min(world, _SILENT_RANKS)))
        if len(reported) < world:
            self.notes.append(f"{world - len(reported):,} more ranks, of {world:,}, left no file")
        return sorted(reported)

    def _status(self) -> str:
        try:
            return read_status(self.path)
        except DataError:  # noted where the summary is read
            return "unknown"

    def _own_modules(self) -> tuple[str, ...]:
        whole = is_run(self.path)
        if not whole:
            self.notes.append(f"{CONFIG} is missing or damaged: judged by the other files alone")
        try:
            return own_modules(read_config(self.path))
        except DataError as error:
            if whole:
                self.notes.append(f"{CONFIG} was passed over: {error.what}")
            return ()

    def _state(self, rank: int) -> State | None:
        try:
            return read_state(self.logs / f"rank-{rank}{STATE}")
        except DataError as error:
            self.notes.append(f"logs/rank-{rank}{STATE} was passed over: {error.what}")
            return None

    def _json(
        self, name: str, types: Mapping[str, Any], most: int = _LARGEST_RECORD
    ) -> dict[str, Any] | None:
        """Read a JSON object; None, with a note, if a key is missing or of another type."""
        try:
            content = read_regular(self.path / name, most)
            numbers: Any = {"parse_int": _int, "parse_float": _float, "parse_constant": _float}
            value = json.loads(content, **numbers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.notes.append(f"{name} was passed over: {error}")
            return None
        if isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in types.items()):
            return value
        self.notes.append(f"{name} was passed over: it is not what raygnn writes there")
        return None

    def _memory(self) -> tuple[Mapping[str, Any], ...]:
        planned = (self._json(PREFLIGHT, {}) or {}).get("memory")
        return tuple(
            item
            for item in (planned if isinstance(planned, list) else [])
            if isinstance(item, dict)
            and isinstance(item.get("bytes"), (int, float))
            and all(isinstance(item.get(key), str) for key in ("use", "remedy"))
        )

    def _crash(self, rank: int, attempt: int) -> str:
        """Return faulthandler's text on a fatal error in this attempt of the rank, or ""."""
        try:
            content = read_regular(self.logs / f"rank-{rank}{CRASH}", _LARGEST, cut=True)
        except OSError:
            return ""
        text = content.decode(errors="replace")
        head, _, last = text.rpartition(f"start {attempt} pid ")
        return last if (head or last != text) and "Fatal Python error" in last else ""


def _last_words(state: State | None, attempt: int) -> dict[str, Any] | None:
    """Return the failure in a rank's state file, where a full disk kept it from recording it."""
    if state is None or state.start.attempt != attempt or not state.words:
        return None
    file = f"rank-{state.start.rank}{STATE}"
    words = {"what": state.words, "trace": "", "file": file}
    return {"rank": state.start.rank, "time": state.life.wall, **words}


def _int(text: str) -> int | None:
    """Parse a number; None for one with more digits than we write, which may overflow."""
    return int(text) if len(text) <= _DIGITS else None


def _float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
