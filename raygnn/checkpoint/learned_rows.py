"""Files of embedding tables and their optimizer's state: each rank writes the rows that it owns.

A file holds plain little-endian arrays of some nodes of one type, one after the other: the global
node ids, int64 ``[n]``, then each array, float32 ``[n, dim]``. The manifest of the checkpoint, or
``selected.json``, has the names of the arrays.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raygnn.checkpoint.hashed_files import Hashed, Write, write_hashed
from raygnn.checkpoint.remote_checkpoints import RemoteCheckpoints
from raygnn.checkpoint.store import RowFile, RowFiles, read_manifest
from raygnn.errors import DataError
from raygnn.graph.available_memory import memory
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.embeddings import ROW, Embeddings
from raygnn.util.files import open_regular, retry

_APART = 0.2  # seconds between polls of the other ranks
_PIECE = 1 << 26  # bytes per read or write


@dataclass
class RowState:
    """Writes a rank's embedding rows in the background, and reads them.

    Attributes:
        control: collectives of the training thread.
        patience: seconds for which the storage may accept nothing, or refuse the final rows.
        place: object store to which each rank uploads its files; None = all ranks see the
            directory.
    """

    embeddings: Embeddings
    control: Exchange
    patience: float
    place: RemoteCheckpoints | None = None

    def __post_init__(self) -> None:
        self._write: Write[list[RowFile]] | None = None
        self._directory = Path()
        self._steps = 0
        self._abandoned = False

    @classmethod
    def from_checkpoint(
        cls,
        embeddings: Embeddings | None,
        control: Exchange,
        patience: float,
        state: Path | None,
        place: RemoteCheckpoints | None = None,
    ) -> RowState | None:
        """Return the state of the run's embedding tables, or None.

        Args:
            state: state file of the checkpoint to resume from, whose rows are read.

        Raises:
            DataError: the checkpoint's manifest or rows cannot be read.
        """
        if embeddings is None:
            return None
        rows = cls(embeddings, control, patience, place)
        if state is not None and (files := read_manifest(state.parent).manifest.rows) is not None:
            rows.read(state.parent, files)
        return rows

    @property
    def pending(self) -> bool:
        """True if rows are to be collected; the same on all ranks."""
        return self._write is not None

    @property
    def busy(self) -> bool:
        """True if this rank is still writing."""
        return self._write is not None and self._write.busy

    @property
    def silence(self) -> float:
        """Seconds since the last piece of this rank was written."""
        return 0.0 if self._write is None else self._write.silence

    def has_room(self) -> bool:
        """Return True if copies of the rows of all ranks of a node fit half of its free memory."""
        arrays = (a for t in self.embeddings.rows for a in self.embeddings.arrays(t).values())
        size = sum(a.numel() * a.element_size() for a in arrays)
        neighbours = min(self.control.world.size, os.cpu_count() or 1)
        return 2 * size * neighbours <= memory()[1]

    def begin(self, directory: Path, *, copy: bool, again: float, rows_only: bool = False) -> None:
        """Begin to write this rank's rows to a new directory; `collect` ends it.

        Args:
            copy: write a copy, so that training may change the rows meanwhile.
            again: seconds to try again while the storage is full or unavailable.
            rows_only: skip the optimizer's state.
        """
        arrays = {
            ntype: {
                name: tensor.to("cpu", copy=copy).numpy()
                for name, tensor in self.embeddings.arrays(ntype).items()
                if name == ROW or not rows_only
            }
            for ntype in self.embeddings.rows
        }
        self._directory, self._steps = directory, self.embeddings.steps
        self._abandoned = False
        self._write = Write(
            lambda moved: retry(lambda: self._put(directory, arrays, moved), again), "raygnn-rows"
        )

    def abandon(self) -> None:
        """Allow rows that are written without a copy to change: `collect` will raise."""
        self._abandoned = True

    def collect(self) -> RowFiles:
        """Return the files that all ranks have written. Collective.

        Raises:
            OSError: a rank failed, or the rows were abandoned; the same on all ranks, and all
                files are removed.
        """
        assert self._write is not None
        write, self._write = self._write, None
        result: dict[str, Any]
        try:
            files = write.result()
            if self._abandoned:
                reason = "training continued before the embedding rows were written"
                raise TimeoutError(errno.ETIMEDOUT, reason)
            result = {"files": [file.model_dump() for file in files]}
        except OSError as error:
            reason = f"{error.strerror or error} (rank {self.control.world.rank})"
            result = {"failed": [error.errno, reason]}
        answers = self.control.gather_json(result)
        if failed := [answer["failed"] for answer in answers if "failed" in answer]:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise OSError(*failed[0])
        written = [RowFile(**file) for answer in answers for file in answer["files"]]
        return RowFiles(dim=self.embeddings.dim, steps=self._steps, files=tuple(written))

    def write(self, directory: Path) -> RowFiles:
        """Write the rows of all ranks, without the optimizer's state, however slow the storage is.
        The rows must not change meanwhile. Collective.

        Raises:
            OSError: a rank failed, or its storage accepted nothing for too long; the same on all
                ranks.
        """
        self.begin(directory, copy=False, again=self.patience, rows_only=True)
        while True:
            state = torch.tensor([self.busy, self.silence >= self.patience], dtype=torch.int64)
            busy, stalled = self.control.sum(state).tolist()
            if not busy:
                return self.collect()
            if stalled:
                raise TimeoutError(errno.ETIMEDOUT, f"it accepted nothing for {self.patience:g} s")
            time.sleep(_APART)

    def read(self, directory: Path, files: RowFiles) -> None:
        """Read the rows of this rank's nodes, and the optimizer's state if the files have it.
        Raises DataError if a file cannot be read, or rows are missing."""
        rows = self.embeddings
        names = {name for file in files.files for name in file.arrays}
        if names - {ROW}:
            rows.begin_state(files.steps, names)
        for ntype, own in rows.rows.items():
            arrays = {name: a.numpy() for name, a in rows.arrays(ntype).items() if name in names}
            original = np.asarray(rows.ids[ntype])
            order = np.argsort(original, kind="stable")
            present = np.zeros(len(original), bool)
            for file in files.files if len(own) and files.dim == rows.dim else ():
                if file.ntype != ntype:
                    continue
                path = directory / file.name
                for ids, found in read_rows(path, file, files.dim, tuple(arrays)):
                    at = order.take(np.searchsorted(original, ids, sorter=order), mode="clip")
                    mine = original[at] == ids
                    for name, values in found.items():
                        arrays[name][at[mine]] = values[mine]
                    present[at[mine]] = True
            if files.dim != rows.dim or not present.all():
                lost = f"{np.count_nonzero(~present):,} of this rank's {len(own):,} {ntype!r} nodes"
                message = f"it has no embedding rows of {lost}"
                remedy = "resume with the graph that the rows were trained on"
                raise DataError(message, where=str(directory), remedy=remedy)

    def _put(
        self,
        directory: Path,
        arrays: Mapping[str, Mapping[str, np.ndarray]],
        moved: Callable[[], None],
    ) -> list[RowFile]:
        moved()
        directory.mkdir(exist_ok=True)
        rank = self.control.world.rank
        written = []
        for number, (ntype, columns) in enumerate(arrays.items()):
            path = directory / f"rows-{rank}-{number}.bin"
            written.append(write_rows(path, ntype, self.embeddings.ids[ntype], columns, moved))
            if self.place is not None:
                self.place.put(path, directory.name.removeprefix(".").removesuffix(".tmp"), moved)
                path.unlink()
        return written


def write_rows(
    path: Path,
    ntype: str,
    ids: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    moved: Callable[[], None] = lambda: None,
) -> RowFile:
    """Write a file, durably. Raises OSError if it cannot be written.

    Args:
        ids: global node ids, ``[n]``.
        arrays: float32 ``[n, dim]`` each.
        moved: called after each piece.
    """

    def fill(file: Hashed) -> None:
        for array, dtype in ((ids, "<i8"), *((array, "<f4") for array in arrays.values())):
            for start, stop in _pieces(len(array), np.dtype(dtype).itemsize * array[:1].size):
                file.write(np.ascontiguousarray(array[start:stop], dtype).data)
                if file.error is not None:
                    return

    hashed = write_hashed(path, fill, moved)
    return RowFile(
        name=path.name,
        ntype=ntype,
        rows=len(ids),
        arrays=tuple(arrays),
        bytes=hashed.bytes,
        sha256=hashed.sha.hexdigest(),
    )


def read_rows(
    path: Path, file: RowFile, dim: int, names: Sequence[str] = ()
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Read a file in pieces.

    Args:
        names: names of the arrays to read; empty = all.

    Yields:
        Global node ids int64 ``[n]``, and name → float32 ``[n, dim]``.

    Raises:
        DataError: the file cannot be read, or is truncated.
    """
    try:
        with open_regular(path) as content:
            for start, stop in _pieces(file.rows, 4 * dim):
                ids, arrays = _read(content, start * 8, stop - start, "<i8"), {}
                for number, name in enumerate(file.arrays):
                    if not names or name in names:
                        at = file.rows * (8 + 4 * dim * number) + 4 * dim * start
                        values = _read(content, at, (stop - start) * dim, "<f4")
                        arrays[name] = values.reshape(-1, dim)
                yield ids, arrays
    except (OSError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        remedy = "restore the file that training wrote"
        raise DataError(message, where=str(path), remedy=remedy) from error


def _read(content: Any, at: int, count: int, dtype: str) -> np.ndarray:
    content.seek(at)
    return np.frombuffer(content.read(count * np.dtype(dtype).itemsize), dtype, count)


def _pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    size = max(1, _PIECE // max(1, row_bytes))
    for start in range(0, rows, size):
        yield start, min(rows, start + size)
