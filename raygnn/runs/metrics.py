"""``metrics.jsonl``: one JSON object per line, written as training goes and read meanwhile.

A record has ``step`` (optimizer steps completed), ``epoch``, ``time`` (seconds since the start),
then ``train/loss``, ``val/accuracy``, … JSON has no NaN or infinity: both are written as null, and
null is read back as NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from raygnn.errors import DataError
from raygnn.runs.files import plain, storage_errors

Record = dict[str, Any]


class MetricsWriter:
    """Writes records, each reaching the file before :meth:`write` returns.

    Args:
        path: the file; its directory exists.
        keep: records of an earlier start that stay: those up to this step, so that a run that
            goes on from a checkpoint has each step once. None for none of them.

    Raises:
        TrainingError: the file cannot be written.
    """

    def __init__(self, path: Path, keep: int | None = None):
        self.path = path
        with storage_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            end = 0 if keep is None else _bytes_until(path, keep)
            if os.fstat(self._descriptor).st_size > end:
                os.ftruncate(self._descriptor, end)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; scalars of numpy and torch are welcome.

        Raises:
            TrainingError: the file cannot be written (the disk is full, say).
        """
        assert {"step", "epoch", "time"} <= record.keys(), sorted(record)
        line = json.dumps(plain(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
        rest = line.encode()
        with storage_errors(self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsTail:
    """Reads a file of records that is still being written, or does not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0
        self._given: list[int] = []  # hashes of the lines

    def poll(self) -> list[Record]:
        """The records completed since the last call.

        A file that shrank, since a run went on from an earlier step, is read anew, and what it
        still has of the lines that were given is left out.

        Lines that are no record are passed over: a display must not end a training.
        """
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        begins = not self._offset
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.splitlines()
        if begins:
            same = takewhile(lambda pair: hash(pair[0]) == pair[1], zip(lines, self._given))
            known = sum(1 for _ in same)
            del self._given[known:]
            lines = lines[known:]
        self._given += map(hash, lines)
        return [record for line in lines if (record := _parse(line)) is not None]


def read_metrics(path: Path) -> list[Record]:
    """All records of the file, ``[]`` when there is none; a torn last line is left out.

    Raises:
        DataError: another line is no record.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        record = _parse(line)
        if record is None:
            raise DataError(
                "not a record of metrics (a JSON object)", where=f"{path}: line {number}"
            )
        records.append(record)
    return records


def _parse(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {key: math.nan if item is None else item for key, item in value.items()}


def _bytes_until(path: Path, step: int) -> int:
    """Bytes of the whole lines at the file's beginning that are records up to ``step``."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            record = _parse(line) if line.endswith(b"\n") else None
            if record is None or record["step"] > step:
                break
            if record["step"] == step and "train/loss" not in record:
                break  # an evaluation comes after the checkpoint of its step, and will again
            end += len(line)
    return end
