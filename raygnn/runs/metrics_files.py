"""``metrics.jsonl`` and ``ranks.jsonl``: a JSON object per line, written as training goes and read
meanwhile. JSON has no NaN or infinity: both are written as null, and null is read back as NaN.

A record of ``metrics.jsonl`` has ``step`` (optimizer steps completed), ``epoch``, ``time`` (seconds
since the start), then ``train/loss``, ``val/accuracy``, …

One of ``ranks.jsonl`` says what each rank did and used in a window of some steps::

    {"step": 120, "time": 31.2, "batches": 10,
     "seconds": {"wait": [0.001, 0.002], "forward": [...], ...},
     "bytes": {"gradients": [...], "exchange": [...]},
     "use": {"cpu": [...], "gpu": [...]},
     "memory": {"rss": [...], "gpu": [...], "gpu_share": [...]},
     "network": {"sent": [...], "received": [...]}}

with a value of each rank in rank order: seconds and bytes of a batch (mean over the window), busy
share of the rank's CPUs and of its GPU, bytes that its process and its GPU hold and the share of
the GPU's memory, bytes a second of its host. What is unknown is null or absent; the number of ranks
may change. On CPUs the parts are measured by the host's clock, on GPUs along the stream that
computes.
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

# In the thread that trains, in the order of a step; they sum to its time.
STEP = {
    "wait": "wait for the next batch",
    "transfer": "copy it to the device",
    "forward": "forward pass and loss",
    "backward": "backward pass, and the exchange of gradients hidden behind it",
    "communicate": "exchange of gradients that nothing hides",
    "peers": "wait for slower ranks in that exchange",
    "optimizer": "checks and clipping of the gradient, optimizer",
    "rest": "records, comparisons between ranks, other callbacks",
}

# In the thread that prepares batches, hidden as long as there is no wait.
LOADER = {
    "sample": "choose seeds and draw neighbours",
    "features": "gather features",
    "exchange": "structure and features of other ranks",
}

COMPUTE = ("transfer", "forward", "backward", "optimizer", "rest")  # what a rank does on its own
SHARED_PARTS = ("communicate", "peers")  # time that a rank spends for or because of others
GROUPS = ("seconds", "bytes", "use", "memory", "network")

_MOST_WAITING = 64 * 2**20  # bytes
_OF_ONE_CLASS = ("average_precision", "roc_auc", "recall@")  # metrics
_MOST_AT_ONCE = 4 * 2**20  # bytes that are read


class MetricsWriter:
    """Writes records, each reaching the file before :meth:`write` returns, if there is room.

    What the storage does not take now waits for the next call: a disk that is full for a while
    costs nothing.

    Args:
        path: the file; its directory exists.
        keep: records of an earlier start that stay: those up to this step, so that a run that
            goes on from a checkpoint has each step once. None for none of them.
        patience: seconds to wait for storage that is full or away.

    Attributes:
        waiting: why records wait, if they do.

    Raises:
        TrainingError: the file cannot be opened.
    """

    def __init__(self, path: Path, keep: int | None = None, patience: float = 0.0):
        self.path = path
        self.waiting: OSError | None = None
        self._file = Appender(path)
        with storage_errors(path):
            descriptor = retry(self._file.open, patience)
            end = 0 if keep is None else _bytes_until(path, keep)
            if os.fstat(descriptor).st_size > end:
                os.ftruncate(descriptor, end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; scalars of numpy and torch are welcome.

        Raises:
            TrainingError: too many records wait for a file that cannot be written.
        """
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
        """Close the file.

        Args:
            seconds: how long to wait for storage that is full or away.

        Raises:
            TrainingError: there are records that cannot be written.
        """
        try:
            with storage_errors(self.path):
                retry(self._file.flush, seconds)
        finally:
            self._file.close()


class MetricsTail:
    """Reads a file of records that is still being written, or does not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0
        self._last = b""  # whole line before the offset
        self._given = array("I")  # of each line that was given: its CRC-32, since there are many
        self._line = 0  # which of them is the next

    def poll(self) -> list[Record]:
        """The records completed since the last call: of a long file as many as fit into some MiB,
        and none where there are no more.

        A file that shrank, since a run went on from an earlier step, is read anew, also if it has
        grown again meanwhile; what it still has of the lines that were given is left out.

        Lines that are no record are passed over: a display must not end a training.
        """
        more, records = True, list[Record]()
        while more and not records:
            lines, more = self._next()
            records = [record for line in lines if (record := parse(line)) is not None]
        return records

    def skip(self) -> None:
        """Pass over what is there."""
        while self._next()[1]:
            pass

    def _next(self) -> tuple[list[bytes], bool]:
        """Lines that were not given before, and whether there may be more."""
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
    """The last record of a file of any length, as far as it is among its last lines."""
    lines = last_lines(path, _MOST_AT_ONCE)
    return parse(lines[-1]) if lines else None


def last_lines(path: Path, most: int) -> list[bytes]:
    """The whole lines in the last ``most`` bytes of a file, the first of which may be cut; none of
    a file that cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most).rpartition(b"\n")[0].splitlines()
    except OSError:
        return []


def read_metrics(path: Path) -> list[Record]:
    """All records of the file, ``[]`` when there is none; a torn last line is left out.

    Raises:
        DataError: another line is no record.
    """
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
    """A line's record, null as NaN; None where it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {key: math.nan if item is None else item for key, item in value.items()}


def values(record: Mapping[str, Any], group: str) -> dict[str, list[float]]:
    """Name → a number for each rank, NaN where there is none; what is no such thing is left out."""
    names = record.get(group)
    if not isinstance(names, dict):
        return {}
    return {
        str(name): [number(value) for value in ranks]
        for name, ranks in names.items()
        if isinstance(ranks, list)
    }


def number(value: Any) -> float:
    """The value, NaN where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def long(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each number: ``step``, ``time``, ``rank``, ``group``, ``name``, ``value``."""
    for record in records:
        at = {"step": record.get("step"), "time": number(record.get("time"))}
        for group in GROUPS:
            for name, ranks in values(record, group).items():
                for rank, value in enumerate(ranks):
                    yield {**at, "rank": rank, "group": group, "name": name, "value": value}


def _bytes_until(path: Path, step: int) -> int:
    """Bytes of the whole lines at the file's beginning that are records up to ``step``."""
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


def of_class(metric: str, summary: Mapping[str, Any]) -> str:
    """Return `` of 'fraud'`` for a metric of one class, such as ``test/average_precision``; else
    an empty text."""
    split, _, name = metric.rpartition("/")
    words = summary.get("positive")
    word = words.get(split.partition("/")[2]) if isinstance(words, Mapping) else None
    return f" of {word!r}" if word is not None and name.startswith(_OF_ONE_CLASS) else ""
