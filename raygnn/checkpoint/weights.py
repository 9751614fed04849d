"""Tested weights of a run, ``checkpoints/selected.pt``, and their description.

Embedding tables are in ``selected-rows/``: see `raygnn.checkpoint.learned_rows`. ``selected.json``
has the SHA-256 of each file, and describes the training data. It is removed first and written
last, so that it never describes other weights.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from raygnn import __version__
from raygnn.checkpoint.hashed_files import difference, save_tensors, sha256
from raygnn.checkpoint.store import RowFiles, check_archive
from raygnn.errors import DataError, InputError
from raygnn.graph.partition.manifest import validated
from raygnn.util.files import read_json, sync, write_json

if TYPE_CHECKING:
    from torch import nn

FILE, ABOUT, ROWS = "selected.pt", "selected.json", "selected-rows"
_RESTORE = "restore the file that training wrote, or train again"

Goal = Annotated[dict[Literal["ntype", "etype", "relation"], str | None], Field(min_length=3)]


class Weights(BaseModel):
    """Tested weights of a run, and their description (``selected.json``).

    Attributes:
        path, sha256: their file, and its hash.
        data: fingerprint of the training data.
        rows: files of embedding tables, in ``selected-rows``; None = the model has none.
        goals: name of each task, "" of the only one → ``ntype``, ``etype`` and ``relation`` of
            its target, each None if it does not apply.
        sizes: see `raygnn.worker.job.Sizes`.
        words: see `raygnn.worker.planes.vocabulary`.
        transforms, columns: see `raygnn.graph.data.GraphData`.
        like: see `Sample.describe`; None for tasks on one graph.
        class_weights: name of each task → weight of each class, as in ``task.class_weights``.
        latest: name of each task on edges with times → the latest time of its edges.
    """

    model_config = ConfigDict(frozen=True)

    path: Path
    sha256: str
    data: str
    rows: RowFiles | None = None
    goals: dict[str, Goal] = {}
    sizes: dict[str, int] = {}
    words: dict[str, list[Any]] = {}
    transforms: dict[str, Any] = {}
    columns: dict[str, list[str]] = {}
    like: dict[str, Any] | None = None
    class_weights: dict[str, list[float]] = {}
    latest: dict[str, int] = {}

    @property
    def about(self) -> Path:
        return self.path.parent / ABOUT

    @property
    def rows_directory(self) -> Path:
        """Directory of the embedding tables' files."""
        return self.path.parent / ROWS


def save(
    directory: Path, model: nn.Module, facts: Mapping[str, Any], rows: RowFiles | None = None
) -> str:
    """Write ``selected.pt``, plain tensors by parameter name, and return its SHA-256. Raises
    OSError if it cannot be written; an earlier file remains.

    ``torch.load(path, weights_only=True)`` reads it for ``model.load_state_dict``.

    Args:
        directory: the run's ``checkpoints``.
        facts: ``data``, ``goals``, ``sizes``, …: see `Weights`.
        rows: embedding tables, which all ranks have written to `rows_draft`.
    """
    from raygnn.models.registry import describe

    draft = directory / ".selected.tmp"
    try:
        hashed = save_tensors(model.state_dict(), draft)
        (directory / ABOUT).unlink(missing_ok=True)
        os.rename(draft, directory / FILE)
        # A retry after a failed write of the description finds the rows moved already.
        if rows is None or rows_draft(directory).exists():
            shutil.rmtree(directory / ROWS, ignore_errors=True)
        if rows is not None and rows_draft(directory).exists():
            os.rename(rows_draft(directory), directory / ROWS)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    digest = hashed.sha.hexdigest()
    about = {**facts, "bytes": hashed.bytes, "sha256": digest, "raygnn": __version__}
    if rows is not None:
        about["rows"] = rows.model_dump(mode="json")
    write_json(directory / ABOUT, {**about, **describe(model)})
    sync(directory)
    return digest


def rows_draft(directory: Path) -> Path:
    """Return the directory where ranks write the embedding tables for `save`."""
    return directory / f".{ROWS}.tmp"


def find(directory: Path) -> Weights:
    """Find the weights in a run's ``checkpoints``. Raises InputError if it has none yet, and
    DataError if they are damaged."""
    file, about = directory / FILE, directory / ABOUT
    try:
        digest = sha256(file)
        if not about.exists():
            raise _damaged(about, f"this file is missing, which describes the weights in {FILE}")
        found = validated(Weights, {**read_json(about), "path": file}, about, _RESTORE)
    except FileNotFoundError:
        message = "this run has no selected weights: they are written when training is over"
        remedy = "wait for it, or resume the run with `raygnn train CONFIG --resume`"
        raise InputError(message, where=str(file), remedy=remedy) from None
    except OSError as error:
        raise _damaged(file, f"cannot be read: {error.strerror}") from error
    if digest != found.sha256:
        raise _damaged(file, "it has changed since it was written: its SHA-256 differs")
    for rows in () if found.rows is None else found.rows.files:
        path = directory / ROWS / rows.name
        try:
            changed = difference(path, rows.bytes, rows.sha256)
        except OSError as error:
            changed = f"cannot be read: {error.strerror}"
        if changed:
            raise _damaged(path, changed)
    return found


def read(weights: Weights) -> Mapping[str, Any]:
    """Read the weights by name. Code in the file is never executed. Raises DataError if the file is
    damaged or was replaced."""
    import torch

    file = weights.path
    try:
        content = file.read_bytes()
        if (digest := hashlib.sha256(content).hexdigest()) != weights.sha256:
            raise _damaged(file, f"it has been replaced: its SHA-256 is {digest}")
        check_archive(io.BytesIO(content))
        state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise _damaged(file, f"it holds more than numbers: {_first_line(error)}") from error
    except Exception as error:  # torch raises many kinds for a file of another format
        raise _damaged(file, f"it cannot be read: {_first_line(error)}") from error
    if not isinstance(state, Mapping):
        raise _damaged(file, f"it holds a {type(state).__name__} instead of weights by name")
    return state


def load(weights: Weights, model: nn.Module) -> None:
    """Load the weights into a model. Raises DataError if they are damaged or do not fit it."""
    state = read(weights)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        why = " ".join(str(error).split())
        message = f"the weights do not belong to the model that the run describes: {why}"
        remedy = "predict with the code and the data that it was trained with"
        raise DataError(message, where=str(weights.path), remedy=remedy) from error


def _damaged(file: Path, what: str) -> DataError:
    return DataError(what, where=str(file), remedy=_RESTORE)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
