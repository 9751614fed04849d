"""``metrics.jsonl`` and ``ranks.jsonl``: a JSON object per line, written as training goes and read
meanwhile. JSON has no NaN or infinity: both are written as null, and null is read back as NaN.

A record of ``metrics.jsonl`` has ``step`` (optimizer steps completed), ``epoch``, ``time`` (seconds
since the start), then ``train/loss``, ``val/accuracy``, …

A record of ``ranks.jsonl`` has each rank's times and resource use in a window of some steps::

    {"step": 120, "time": 31.2, "batches": 10,
     "seconds": {"wait": [0.001, 0.002], "forward": [...], ...},
     "bytes": {"gradients": [...], "exchange": [...]},
     "use": {"cpu": [...], "gpu": [...]},
     "memory": {"rss": [...], "gpu": [...], "gpu_share": [...]},
     "network": {"sent": [...], "received": [...]}}

with values in rank order: seconds and bytes per batch (mean over the window), busy share of the
rank's CPUs and of its GPU, bytes held by its process and its GPU and the share of the GPU's memory,
bytes per second of its host. Unknown values are null or absent; the number of ranks may change. On
CPUs the parts are measured by the host's clock, on GPUs along the compute stream.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from raygnn.errors import DataError
from raygnn.util.files import Appender, open_regular, plain, retry, storage_errors

Record = dict[str, Any]

RANKS = "ranks.jsonl"

# Parts of a step in the training thread, in order; they sum to its time. `wait` is for the next
# batch, `backward` includes the exchange of gradients that it hides, `communicate` is the rest of
# that exchange, `peers` the wait for slower ranks in it, and `rest` records, comparisons between
# ranks and other callbacks.
STEP = ("wait", "transfer", "forward", "backward", "communicate", "peers", "optimizer", "rest")

# in the thread that prepares batches: seeds and neighbours, features, the exchange between ranks
LOADER = ("sample", "features", "exchange")

COMPUTE = ("transfer", "forward", "backward", "optimizer", "rest")  # a rank's own work
GROUPS = ("seconds", "bytes", "use", "memory", "network")

_MOST_WAITING = 64 * 2**20  # bytes
_OF_ONE_CLASS = ("average_precision", "roc_auc", "recall@")  # metrics
_MOST_AT_ONCE = 4 * 2**20  # bytes that are read


class MetricsWriter:
    """Writer of records. A record is in the file when :meth:`write` returns, unless the storage
    is full: then it waits for the next call. ``keep``: last step whose records of earlier
    attempts are kept, so that a resumed run has each step once; None = keep none. ``patience``:
    seconds to wait for storage that is full or away."""

    def __init__(self, path: Path, keep: int | None = None, patience: float = 0.0):
        self.path = path
        self.waiting: OSError | None = None  # why records wait, if they do
        self._file = Appender(path)
        with storage_errors(path):
            descriptor = retry(self._file.open, patience)
            end = 0 if keep is None else _bytes_until(path, keep)
            if os.fstat(descriptor).st_size > end:
                os.ftruncate(descriptor, end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, with scalars of Python, numpy or torch. Raises TrainingError if too
        many records wait for a file that cannot be written."""
        assert {"step", "time"} <= record.keys(), sorted(record)
        line = json.dumps(plain(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
        self.waiting = None
        try:
            self._file.add(line.encode())
        except OSError as error:
            self.waiting = error
            if len(self._file.waiting) > _MOST_WAITING:
                with storage_errors(self.path):
                    raise

    def close(self, seconds: float = 0.0) -> None:
        """Close the file, after waiting up to ``seconds`` for storage that is full or away. Raises
        TrainingError if records cannot be written."""
        try:
            with storage_errors(self.path):
                retry(self._file.flush, seconds)
        finally:
            self._file.close()


class MetricsTail:
    """Reader of a file of records that is still being written, or does not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0
        self._last = b""  # complete line before the offset
        self._given = array("I")  # CRC-32 of each returned line, since there are many
        self._line = 0  # index of the next

    def poll(self) -> list[Record]:
        """Return the records completed since the last call: of a long file some MiB at a time, and
        none at its end.

        A file that shrank, since a run resumed from an earlier step, is read again, even if it has
        grown since, without the lines that were already returned. Invalid lines are skipped, since
        a display must not end a training.
        """
        more, records = True, list[Record]()
        while more and not records:
            lines, more = self._next()
            records = [record for line in lines if (record := parse(line)) is not None]
        return records

    def skip(self) -> None:
        """Skip the present records."""
        while self._next()[1]:
            pass

    def _next(self) -> tuple[list[bytes], bool]:
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._offset, self._line, self._last = 0, 0, b""
                file.seek(self._offset)
                content = file.read(_MOST_AT_ONCE)
                more = len(content) == _MOST_AT_ONCE
                if more:
                    content += file.readline()
        except OSError:
            return [], False
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for line in whole.splitlines(keepends=True):
            self._last = line
            check = crc32(line)
            if self._line == len(self._given) or self._given[self._line] != check:
                del self._given[self._line :]
                self._given.append(check)
                lines.append(line)
            self._line += 1
        if not more:
            del self._given[self._line :]
        return lines, more and bool(whole)


def newest(path: Path) -> Record | None:
    """Return the last record of a file of any length; None if its last line is none."""
    lines = last_lines(path, _MOST_AT_ONCE)
    return parse(lines[-1]) if lines else None


def last_lines(path: Path, most: int) -> list[bytes]:
    """Return the complete lines in the last ``most`` bytes of a file; the first one may be
    truncated. Returns none if the file cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most).rpartition(b"\n")[0].splitlines()
    except OSError:
        return []


def read_metrics(path: Path) -> list[Record]:
    """Return all records of the file, ``[]`` if there is none; an incomplete last line is skipped.
    Raises DataError if another line is no record."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if (record := parse(line)) is None:
            what = "not a record of metrics (a JSON object)"
            raise DataError(what, where=f"{path}: line {number}")
        records.append(record)
    return records


def parse(line: bytes) -> Record | None:
    """Parse a record, with null as NaN; None if the line is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {key: math.nan if item is None else item for key, item in value.items()}


def values(record: Mapping[str, Any], group: str) -> dict[str, list[float]]:
    """Return name → number of each rank, NaN = unknown."""
    names: Mapping[str, list[float | None]] = record.get(group) or {}
    return {name: [number(value) for value in ranks] for name, ranks in names.items()}


def number(value: Any) -> float:
    """Return the value as a float, NaN for None."""
    return math.nan if value is None else float(value)


def long(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row per number: ``step``, ``time``, ``rank``, ``group``, ``name``, ``value``."""
    for record in records:
        at = {"step": record.get("step"), "time": number(record.get("time"))}
        for group in GROUPS:
            for name, ranks in values(record, group).items():
                for rank, value in enumerate(ranks):
                    yield {**at, "rank": rank, "group": group, "name": name, "value": value}


def _bytes_until(path: Path, step: int) -> int:
    """Return the length in bytes of the file's leading records up to ``step``."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            record = parse(line) if line.endswith(b"\n") else None
            if record is None or record["step"] > step:
                break
            if record["step"] == step and not record.keys() & {"train/loss", "seconds"}:
                break  # an evaluation comes after the checkpoint of its step, and will again
            end += len(line)
    return end


def split_order(metric: str) -> int:
    """Return a sort key: test metrics first, then validation metrics."""
    return {"test": 0, "val": 1}.get(metric.partition("/")[0], 2)


def of_class(metric: str, summary: Mapping[str, Any]) -> str:
    """Return `` of 'fraud'`` for a metric of one class, such as ``test/average_precision``; else
    an empty text."""
    split, _, name = metric.rpartition("/")
    positive = (summary.get("positive") or {}).get(split.partition("/")[2])
    return f" of {positive!r}" if positive is not None and name.startswith(_OF_ONE_CLASS) else ""
