"""The weights that a run was tested with, ``checkpoints/selected.pt``, and their description.

Embedding tables are in ``selected-rows/``: see `raygnn.checkpoint.learned_rows`. ``selected.json``
has size and SHA-256 of each file, and describes the data that they were trained on. It is removed
first and written last, so that it never describes other weights.
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raygnn import __version__
from raygnn.checkpoint.hashed_files import difference, save_tensors, sha256
from raygnn.checkpoint.store import RowFiles, check_archive
from raygnn.errors import DataError, InputError
from raygnn.util.files import open_regular, read_json, sync, write_json

if TYPE_CHECKING:
    from torch import nn

FILE, ABOUT, ROWS = "selected.pt", "selected.json", "selected-rows"


Goal = Annotated[dict[Literal["ntype", "etype", "relation"], str | None], Field(min_length=3)]


class About(BaseModel):
    """Description of the weights (``selected.json``); None where a fact was not recorded.

    Attributes:
        data: fingerprint of the training data.
        rows: files of embedding tables, in ``selected-rows``; None = there are none.
        goals: name of each task, "" of the only one → ``ntype``, ``etype`` and ``relation`` of
            its target, None each where there is none.
        sizes: see `raygnn.worker.job.Sizes`.
        words: see `raygnn.worker.planes.vocabulary`.
        transforms, columns: see `raygnn.graph.data.GraphData`.
        like: see `Sample.describe`; None of one graph, too.
        class_weights: name of each task → weight of each class, as in ``task.class_weights``.
        latest: name of each task on edges with times → the latest time of its edges.
    """

    model_config = ConfigDict(frozen=True)

    data: str | None = None
    rows: RowFiles | None = None
    goals: dict[str, Goal] | None = None
    sizes: dict[str, int] | None = None
    words: dict[str, list[Any]] | None = None
    transforms: dict[str, Any] | None = None
    columns: dict[str, list[str]] | None = None
    like: dict[str, Any] | None = None
    class_weights: dict[str, list[float]] | None = None
    latest: dict[str, int] | None = None


class Weights(About):
    """Weights of a run.

    Attributes:
        path: of their file.
        sha256: of its content.
    """

    path: Path
    sha256: str

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
    """Write ``selected.pt``, plain tensors by parameter name, and return its SHA-256.

    ``torch.load(path, weights_only=True)`` reads it for ``model.load_state_dict``.

    Args:
        directory: the run's ``checkpoints``.
        facts: ``data``, ``goals``, ``sizes``, …: see `About`.
        rows: embedding tables, which all ranks have written to `rows_draft`.

    Raises:
        OSError: the file cannot be written; an earlier one remains.
    """
    from raygnn.models.registry import describe

    draft = directory / ".selected.tmp"
    try:
        hashed = save_tensors(model.state_dict(), draft)
        (directory / ABOUT).unlink(missing_ok=True)
        os.rename(draft, directory / FILE)
        # not of an attempt before this one, which failed at what comes later
        if rows is None or rows_draft(directory).exists():
            shutil.rmtree(directory / ROWS, ignore_errors=True)
        if rows is not None and rows_draft(directory).exists():
            os.rename(rows_draft(directory), directory / ROWS)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    about = dict(facts)
    about |= {"bytes": hashed.bytes, "sha256": hashed.sha.hexdigest()}
    if rows is not None:
        about["rows"] = rows.model_dump(mode="json")
    write_json(directory / ABOUT, {**about, **describe(model), "raygnn": __version__})
    sync(directory)
    return hashed.sha.hexdigest()


def rows_draft(directory: Path) -> Path:
    """Return the directory where ranks write the embedding tables for `save`."""
    return directory / f".{ROWS}.tmp"


def find(directory: Path) -> Weights:
    """Find the weights in a run's ``checkpoints``.

    Raises:
        InputError: there are none yet.
        DataError: they are damaged.
    """
    file = directory / FILE
    values = read_json(directory / ABOUT)
    try:
        with open_regular(file):
            pass  # refuse a FIFO or a device
        digest = sha256(file)
    except FileNotFoundError:
        raise InputError(
            "this run has no selected weights: they are written when training is over",
            where=str(file),
            remedy="wait for it, or resume the run with `raygnn train CONFIG --resume`",
        ) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(file)) from error
    if values and (digest != values.get("sha256") or not isinstance(values.get("data"), str)):
        raise _damaged(file, "it has changed since it was written: its SHA-256 differs")
    try:
        about = About.model_validate(values)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise _damaged(directory / ABOUT, f"its value of {key} is invalid") from None
    _check_rows(directory, about.rows)
    return Weights(path=file, **{**dict(about), "sha256": digest})


def read(weights: Weights) -> Mapping[str, Any]:
    """Read the weights by name. Code in the file is never executed.

    Raises:
        DataError: the file is damaged or was replaced.
    """
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
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise _damaged(file, f"it cannot be read: {_first_line(error)}") from error
    if not isinstance(state, Mapping):
        raise _damaged(file, f"it holds a {type(state).__name__} instead of weights by name")
    return state


def load(weights: Weights, model: nn.Module) -> None:
    """Load the weights into a model.

    Raises:
        DataError: see `read`; or the weights are not the model's.
    """
    state = read(weights)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            "the weights do not belong to the model that the run describes: "
            + " ".join(str(error).split()),
            where=str(weights.path),
            remedy="predict with the code and the data that it was trained with",
        ) from error


def _check_rows(directory: Path, rows: RowFiles | None) -> None:
    for file in () if rows is None else rows.files:
        path = directory / ROWS / file.name
        try:
            changed = difference(path, file.bytes, file.sha256)
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error
        if changed:
            raise _damaged(path, changed)


def _damaged(file: Path, what: str) -> DataError:
    return DataError(
        what, where=str(file), remedy="restore the file that training wrote, or train again"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
