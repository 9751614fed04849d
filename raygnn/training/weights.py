"""The weights that a run was tested with, ``checkpoints/selected.pt``, and what they belong to.

``selected.json`` beside it has their size and SHA-256, and what stands for the data that they
were trained on. It is removed first and written last, so that it never speaks of other weights.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn import __version__
from raygnn.errors import DataError, InputError
from raygnn.graph.atomic import sync
from raygnn.runs.files import json_text, open_regular, read_json, write_atomic
from raygnn.training.checkpoint import check_archive, sha256
from raygnn.training.checkpoint import save as save_tensors

if TYPE_CHECKING:
    from torch import nn

FILE, ABOUT = "selected.pt", "selected.json"


@dataclass(frozen=True)
class Weights:
    """Those of a run.

    Attributes:
        path: of their file.
        sha256: of its content.
        data: what stands for the data they were trained on; None where that was not recorded.
    """

    path: Path
    sha256: str
    data: str | None


def save(directory: Path, model: nn.Module, data: str) -> None:
    """Write ``selected.pt``: plain tensors by parameter name.

    ``torch.load(path, weights_only=True)`` reads it, ``model.load_state_dict`` takes it.

    Args:
        directory: the run's ``checkpoints``.
        data: what stands for the data.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    draft = directory / ".selected.tmp"
    try:
        hashed = save_tensors(model.state_dict(), draft)
        (directory / ABOUT).unlink(missing_ok=True)
        os.rename(draft, directory / FILE)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    about: dict[str, Any] = {"data": data, "bytes": hashed.bytes, "sha256": hashed.sha.hexdigest()}
    about |= _schema(model)
    write_atomic(directory / ABOUT, json_text({**about, "raygnn": __version__}))
    sync(directory)


def _schema(model: nn.Module) -> dict[str, Any]:
    """What a built-in network must know of the data, for whoever makes it without them."""
    from raygnn.models.export import describe
    from raygnn.models.network import Network

    return {"schema": describe(model.schema)} if isinstance(model, Network) else {}


def find(directory: Path) -> Weights:
    """The weights in a run's ``checkpoints``, as they are now.

    Raises:
        InputError: there are none yet.
        DataError: they are damaged.
    """
    file = directory / FILE
    about = read_json(directory / ABOUT)
    try:
        with open_regular(file):
            pass  # no FIFO, no device
        digest = sha256(file)
    except FileNotFoundError:
        raise InputError(
            "this run has no selected weights: they are written when training is over",
            where=str(file),
            remedy="wait for it, or let it go on with `raygnn train --resume`",
        ) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(file)) from error
    data = about.get("data")
    if about and (digest != about.get("sha256") or not isinstance(data, str)):
        raise _damaged(file, "it has changed since it was written: its SHA-256 is another")
    return Weights(file, digest, data)


def load(weights: Weights, model: nn.Module) -> None:
    """Put the weights into a model. Nothing that the file may hold besides tensors is executed.

    Raises:
        DataError: the file is damaged or another one by now, or its weights are not the model's.
    """
    import torch

    file = weights.path
    try:
        content = file.read_bytes()
        if (digest := hashlib.sha256(content).hexdigest()) != weights.sha256:
            raise _damaged(file, f"it was replaced meanwhile: its SHA-256 is {digest}")
        check_archive(io.BytesIO(content))
        state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise _damaged(file, f"it holds more than numbers: {_first_line(error)}") from error
    except Exception as error:  # torch has no one kind for what is no file of its own
        raise _damaged(file, f"it cannot be read: {_first_line(error)}") from error
    if not isinstance(state, Mapping):
        raise _damaged(file, f"it holds no weights by name but a {type(state).__name__}")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            "these are not the weights of the model that the run describes: "
            + " ".join(str(error).split()),
            where=str(file),
            remedy="predict with the code and the data that it was trained with",
        ) from error


def _damaged(file: Path, what: str) -> DataError:
    return DataError(
        what,
        where=str(file),
        remedy="put back the file that training wrote, or train again",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
