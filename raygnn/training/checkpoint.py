"""Checkpoints in the run directory: whole or not there.

``checkpoints/step-<n>/`` holds Lightning's ``state.ckpt`` and a ``manifest.json`` with its size
and SHA-256; ``checkpoints/selected.pt`` holds the weights of a finished run. Each is written
under another name and renamed, so that what has the final name is complete; reading verifies it
all the same and passes over a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from raygnn.errors import InputError
from raygnn.graph.atomic import sync

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

_STATE, _MANIFEST = "state.ckpt", "manifest.json"


def save(directory: Path, trainer: pl.Trainer, keep: int) -> None:
    """Write the state after the current step; the oldest beyond ``keep`` go. Collective."""
    final = state_at(directory, trainer.global_step).parent
    draft = directory / f".{final.name}.tmp"
    if trainer.is_global_zero:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    trainer.save_checkpoint(draft / _STATE)
    if not trainer.is_global_zero:
        return
    state = draft / _STATE
    manifest = {"step": trainer.global_step, "bytes": state.stat().st_size, "sha256": _sha(state)}
    (draft / _MANIFEST).write_text(json.dumps(manifest))
    sync(state)
    sync(draft / _MANIFEST)
    if final.exists():  # the same step again, after a restart
        shutil.rmtree(final)
    os.rename(draft, final)
    sync(directory)
    for old in _all(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def save_weights(directory: Path, model: nn.Module) -> None:
    """Write the weights that were tested to ``selected.pt``: plain tensors by parameter name.

    ``torch.load(path, weights_only=True)`` reads it, ``model.load_state_dict`` takes it.
    """
    import torch

    draft = directory / ".selected.tmp"
    torch.save(model.state_dict(), draft)
    sync(draft)
    os.rename(draft, directory / "selected.pt")
    sync(directory)


def latest(directory: Path) -> Path | None:
    """The state file of the newest checkpoint that is whole, or None."""
    for candidate in reversed(_all(directory)):
        if _is_whole(candidate):
            return candidate / _STATE
    return None


def newest(directory: Path) -> str:
    """Name of the newest checkpoint, whole or not; empty when there is none."""
    found = _all(directory)
    return found[-1].name if found else ""


def sweep(directory: Path) -> None:
    """Remove what writers that were killed left unfinished."""
    for draft in directory.glob(".step-*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)


def check_contents(state: Path) -> None:
    """Refuse a state file that holds more than plain values and tensors, and so could run code.

    Raises:
        InputError: it does.
    """
    import torch

    try:
        torch.load(state, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"this checkpoint holds more than numbers: {error}",
            where=str(state),
            remedy="delete it; it was not written by raygnn as it is",
        ) from error


def state_at(directory: Path, step: int) -> Path:
    """The state file of one step's checkpoint."""
    return directory / f"step-{step:010d}" / _STATE


def step_of(state: Path) -> int:
    """The optimizer step after which a state file was written."""
    return int(state.parent.name.removeprefix("step-"))


def _all(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*"))


def _is_whole(checkpoint: Path) -> bool:
    state = checkpoint / _STATE
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
        return state.stat().st_size == manifest["bytes"] and _sha(state) == manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
