"""Learned rows and their optimizer's state on storage: each rank writes those that it owns."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raygnn.errors import DataError
from raygnn.runs.files import insist
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.embeddings import ROW, Embeddings
from raygnn.training.checkpoint import rows_of
from raygnn.training.row_files import RowFile, RowFiles, name_of, read_rows, write_rows


@dataclass
class RowState:
    """What is written of a rank's learned rows, and read again.

    Args:
        control: the collectives of the thread that trains.
        patience: seconds that writing may take.
    """

    embeddings: Embeddings
    control: Exchange
    patience: float

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None

    @classmethod
    def of(
        cls,
        embeddings: Embeddings | None,
        control: Exchange,
        patience: float,
        state: Path | None,
    ) -> RowState | None:
        """That of a run's learned rows, if it has some.

        Args:
            state: the state file of the checkpoint to go on from, whose rows are read.
        """
        if embeddings is None:
            return None
        rows = cls(embeddings, control, patience)
        if state is not None and (files := rows_of(state)) is not None:
            rows.read(state.parent, files)
        return rows

    def write(self, directory: Path, *, rows_only: bool = False) -> RowFiles:
        """Write the rows of all ranks to a directory of its own, which is made. Collective; rows
        do not change meanwhile, and no copy of them is made.

        Args:
            rows_only: without what only training needs.

        Raises:
            OSError: a rank could not, or took too long; the same on all ranks.
        """
        said: dict[str, Any]
        try:
            # those of a run that is through are not tried again at the next checkpoint
            again = self.patience / 2 if rows_only else 0.0
            made = self._in_time(lambda: insist(lambda: self._write(directory, rows_only), again))
            said = {"files": [vars(file) for file in made]}
        except OSError as error:
            said = {"failed": f"{error.strerror or error} (rank {self.control.world.rank})"}
        text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        size = self.control.world.size
        received = self.control.counts(np.full((size, 1), len(text)))
        pieces = self.control.pieces([[text]] * size, received)
        heard = [json.loads(bytes(piece.numpy())) for (piece,) in pieces]
        if failed := [each["failed"] for each in heard if "failed" in each]:
            shutil.rmtree(directory, ignore_errors=True)
            raise OSError(failed[0])
        files = [file for each in heard for file in each["files"]]
        rows = self.embeddings
        return RowFiles.parse({"dim": rows.dim, "steps": rows.steps, "files": files})

    def read(self, directory: Path, files: RowFiles) -> None:
        """Take the rows of this rank's nodes, whoever wrote them, and the optimizer's state, if it
        is there.

        Raises:
            DataError: a file cannot be read, or rows are missing.
        """
        rows = self.embeddings
        names = {name for file in files.files for name in file.arrays}
        if names - {ROW}:
            rows.begin_state(files.steps, names)
        for ntype, own in rows.rows.items():
            arrays = {name: a.numpy() for name, a in rows.arrays(ntype).items() if name in names}
            original = np.asarray(rows.ids[ntype])
            order = np.argsort(original, kind="stable")
            there = np.zeros(len(original), bool)
            for file in files.files:
                if file.ntype == ntype:
                    self._take(directory, file, files.dim, original, order, arrays, there)
            if files.dim != rows.dim or not there.all():
                raise DataError(
                    f"it has no learned rows of {int((~there).sum()):,} of the {len(own):,} nodes "
                    f"of type {ntype!r} that this rank owns",
                    where=str(directory),
                    remedy="go on with the graph that the rows were learned on",
                )

    def _take(
        self,
        directory: Path,
        file: RowFile,
        dim: int,
        original: np.ndarray,
        order: np.ndarray,
        arrays: Mapping[str, np.ndarray],
        there: np.ndarray,
    ) -> None:
        """Take from one file what is this rank's.

        Args:
            original: ids of the own nodes; order: that sorts them.
            there: which rows have come so far.
        """
        try:
            for ids, found in read_rows(directory / file.name, file, dim, tuple(arrays)):
                at = np.searchsorted(original, ids, sorter=order)
                at[at == len(original)] = 0
                own = order[at] if len(original) else at
                mine = original[own] == ids if len(original) else np.zeros(len(ids), bool)
                for name, values in found.items():
                    arrays[name][own[mine]] = values[mine]
                there[own[mine]] = True
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot be read: {getattr(error, 'strerror', None) or error}",
                where=str(directory / file.name),
                remedy="put back the file that training wrote",
            ) from error

    def _write(self, directory: Path, rows_only: bool) -> list[RowFile]:
        directory.mkdir(parents=True, exist_ok=True)
        made = []
        for number, ntype in enumerate(self.embeddings.rows):
            arrays = {
                name: tensor.numpy()
                for name, tensor in self.embeddings.arrays(ntype).items()
                if name == ROW or not rows_only
            }
            name = name_of(self.control.world.rank, number)
            ids = self.embeddings.ids[ntype]
            made.append(write_rows(directory / name, ntype, ids, arrays))
        return made

    def _in_time(self, act: Callable[[], list[RowFile]]) -> list[RowFile]:
        """What it returns, or an error if storage that hangs keeps it longer than we wait.

        What such a thread writes later, nobody takes for rows: no manifest speaks of it.
        """
        if self._thread is not None and self._thread.is_alive():
            raise TimeoutError("the last one is still being written")
        done: list[list[RowFile]] = []
        failed: list[OSError] = []

        def run() -> None:
            try:
                done.append(act())
            except OSError as error:
                failed.append(error)

        self._thread = threading.Thread(target=run, name="raygnn-rows", daemon=True)
        self._thread.start()
        self._thread.join(self.patience)
        if failed:
            raise failed[0]
        if not done:
            raise TimeoutError(f"it takes more than {self.patience:g} s")
        return done[0]
