"""Updates of a service: new rows that it received, in a log that every replica reads."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from raygnn.config.places import unwritable
from raygnn.errors import DataError
from raygnn.runs.run import Run, open_run
from raygnn.serving.questions import Update
from raygnn.storage.remote import AnyPath, RemotePath
from raygnn.storage.replica import AT_ONCE, UPDATES
from raygnn.util.files import sync

_UPDATE = TypeAdapter(Update)
_MOST = 10_000  # updates
_MOST_BYTES = 1 << 28  # of all


class UpdateLog:
    """Updates of a run, each in a file named by its number.

    Raises:
        DataError: the directory, which need not exist, cannot be read or written, or a file is
            missing or no update.
    """

    def __init__(self, directory: AnyPath):
        self._directory, self._lock = directory, threading.Lock()
        self._updates: list[Update] = []
        self._bytes = 0
        if isinstance(directory, Path):
            if (why := unwritable(directory)) is not None:
                raise DataError(why, where=str(directory), remedy="let the service write there")
            directory.mkdir(exist_ok=True)
            sync(directory.parent)
        self._read()

    def _read(self) -> None:
        """Read the files that have not been read yet."""
        found: list[AnyPath] = sorted(self._directory.glob("*.json"), key=str)
        files = found[len(self._updates) :]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for file, content in zip(files, pool.map(lambda file: file.read_bytes(), files)):
                if file.name != _name(len(self._updates)):
                    what = "updates before this one are missing"
                    remedy = f"restore {_name(len(self._updates))}, or move the later ones away"
                    raise DataError(what, where=str(file), remedy=remedy)
                try:
                    self._updates.append(_UPDATE.validate_json(content))
                except ValidationError as error:
                    what = f"the file is not an update: {error.errors()[0]['msg']}"
                    remedy = "move it and the later ones away"
                    raise DataError(what, where=str(file), remedy=remedy) from None
                self._bytes += len(content)

    def since(self, number: int) -> list[Update]:
        """Return the updates from this number on."""
        return self._updates[number:]

    def add(self, number: int, update: Update) -> bool | None:
        """Write an update; False if one with its number exists, None if the log is full. Raises
        OSError, or DataError for an object store, if it cannot be written."""
        content = encoded(update)
        with self._lock:  # callers may give up while a thread writes
            if number < len(self._updates):
                return False
            if number >= _MOST or self._bytes + len(content) > _MOST_BYTES:
                return None
            if not self._write(self._directory / _name(number), content):
                self._read()
                return False
            self._updates.append(update)
            self._bytes += len(content)
            return True

    def _write(self, file: AnyPath, content: bytes) -> bool:
        """Write a new file; False if another service has written it."""
        if isinstance(file, RemotePath):
            if written := not file.exists():
                file.write(content)
            return written
        draft = file.with_suffix(f".{uuid.uuid4().hex}")
        try:
            draft.write_bytes(content)
            sync(draft)
            os.link(draft, file)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        sync(file.parent)
        return True


def encoded(update: Update) -> bytes:
    """Return an update as JSON. Raises ValueError for text that is not Unicode."""
    return _UPDATE.dump_json(update)


def _name(number: int) -> str:
    return f"{number:08}.json"


class Updates:
    """The only writer of a service's logs, one for each served run."""

    def __init__(self) -> None:
        self._logs: dict[str, UpdateLog] = {}
        self._opening = asyncio.Lock()

    async def since(self, run: str, number: int) -> Sequence[Update]:
        """See `UpdateLog.since`."""
        return (await self._log(run)).since(number)

    async def add(self, run: str, number: int, update: Update) -> bool | None:
        """See `UpdateLog.add`."""
        return await asyncio.to_thread((await self._log(run)).add, number, update)

    async def _log(self, run: str) -> UpdateLog:
        async with self._opening:
            if run not in self._logs:
                place = updates_of(await asyncio.to_thread(open_run, run))
                self._logs[run] = await asyncio.to_thread(UpdateLog, place)
            return self._logs[run]


def updates_of(run: Run) -> AnyPath:
    """Return the directory of a run's updates."""
    return (run.path if run.replica is None else run.replica.place) / UPDATES
