"""Updates of a service: new rows that it was sent, in a log that every replica reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pydantic import TypeAdapter

from raygnn.runs.run import Run, open_run
from raygnn.serving.questions import Update
from raygnn.storage.remote import AnyPath, RemotePath
from raygnn.storage.replica import AT_ONCE, UPDATES
from raygnn.util.files import sync, write_atomic

_UPDATE = TypeAdapter(Update)


class UpdateLog:
    """Updates of a run, a file for each, in the order of their numbers.

    Args:
        directory: it need not exist.
    """

    def __init__(self, directory: AnyPath):
        self._directory = directory
        self._updates: list[Update] = []
        self._read()

    def _read(self) -> None:
        """Read the updates that it does not have."""
        files = sorted(self._directory.glob("*.json"), key=str)[len(self._updates) :]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            texts = pool.map(lambda file: file.read_text("utf-8"), files)
            self._updates += map(_UPDATE.validate_json, texts)

    def since(self, number: int) -> list[Update]:
        """Return the updates of this number and on."""
        return self._updates[number:]

    def add(self, number: int, update: Update) -> bool:
        """Write an update; False if there is one of its number.

        Raises:
            OSError: it cannot be written.
            DataError: the same, in an object store.
        """
        file = self._directory / f"{number:08}.json"
        if number != len(self._updates) or file.exists():  # written by another service
            self._read()
            return False
        if isinstance(file, RemotePath):
            file.write(_UPDATE.dump_json(update))
        else:
            file.parent.mkdir(exist_ok=True)
            write_atomic(file, _UPDATE.dump_json(update).decode())
            sync(file.parent)
        self._updates.append(update)
        return True


class Updates:
    """The only writer of a service's logs, one for each run that it has served."""

    def __init__(self) -> None:
        self._logs: dict[str, UpdateLog] = {}
        self._lock = asyncio.Lock()

    async def since(self, run: str, number: int) -> Sequence[Update]:
        return (await self._log(run)).since(number)

    async def add(self, run: str, number: int, update: Update) -> bool:
        """See `UpdateLog.add`."""
        log = await self._log(run)
        async with self._lock:
            return await asyncio.to_thread(log.add, number, update)

    async def _log(self, run: str) -> UpdateLog:
        async with self._lock:
            if run not in self._logs:
                self._logs[run] = await asyncio.to_thread(lambda: UpdateLog(_place(open_run(run))))
            return self._logs[run]


def _place(run: Run) -> AnyPath:
    """Return the directory of a run's updates."""
    return (run.path if run.replica is None else run.replica.place) / UPDATES
