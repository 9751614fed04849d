"""Checkpoints in the run directory: complete or absent.

``checkpoints/step-<n>/`` holds Lightning's ``state.ckpt``, embedding tables if there are any (see
`raygnn.checkpoint.learned_rows`), and ``manifest.json`` with their origin, sizes and SHA-256. It is
written under a temporary name and renamed, so that it is complete under its final one. Reading
verifies it all the same, and passes over a damaged one.
The weights of a finished run are beside them: see `raygnn.checkpoint.weights`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raygnn import __version__, compat
from raygnn.checkpoint.hashed_files import difference, save_tensors
from raygnn.config.rules import changes
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.util.files import LARGEST_JSON, read_regular, retry, sync, write_json

STATE, MANIFEST = "state.ckpt", "manifest.json"
_ASIDE = "passed-over-"
SENDING = ".sending-"  # prefix of a checkpoint that is being uploaded
_SAID = 300  # characters of torch's message
# errors of torch's readers for a file that is not theirs
_GARBLED = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError)
# errors of a file, not of the storage
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.EIO)
NAME = re.compile(r"step-\d{10}")


Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


class RowFile(BaseModel):
    """File of embedding rows.

    Attributes:
        name: within its directory.
        ntype: node type.
        rows: number of rows.
        arrays: names of the arrays, in order: ``row``, then those of the optimizer's state.
        bytes, sha256: of the file.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(pattern=r"^rows-[0-9]{1,9}-[0-9]{1,9}\.bin$")]
    ntype: str
    rows: Count
    arrays: tuple[str, ...]
    bytes: Count
    sha256: str


class RowFiles(BaseModel):
    """Files of one state of the embedding tables, of all ranks.

    Attributes:
        dim: width of a row.
        steps: number of steps of the optimizer.
    """

    model_config = ConfigDict(frozen=True)

    dim: Count
    steps: Count
    files: tuple[RowFile, ...]

    @model_validator(mode="after")
    def _sizes(self) -> RowFiles:
        for file in self.files:
            if file.bytes != file.rows * (8 + 4 * self.dim * len(file.arrays)):
                raise ValueError(f"not a file of rows: {file.name}")
        return self


class CheckpointManifest(BaseModel):
    """Manifest of a checkpoint (``manifest.json``).

    Attributes:
        step: number of optimizer steps.
        config: see `raygnn.config.rules.fixed`.
        data: fingerprint of the data.
        global_batch: seeds of a step, over all ranks.
        bytes, sha256: of Lightning's file.
        rows: files of embedding tables; None = there are none.
    """

    model_config = ConfigDict(frozen=True)

    step: Count
    config: dict[str, Any]
    data: str
    global_batch: Count
    batch_size: Count
    workers: Count
    bytes: Count
    sha256: str
    rows: RowFiles | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint.

    Attributes:
        state: path of Lightning's file.
    """

    state: Path
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        return self.state.parent.name

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def rows(self) -> RowFiles | None:
        return self.manifest.rows

    @property
    def files(self) -> list[tuple[str, int, str]]:
        """Name, size and SHA-256 of each file beside the manifest."""
        rows = () if self.rows is None else self.rows.files
        state = (STATE, self.manifest.bytes, self.manifest.sha256)
        return [state, *((file.name, file.bytes, file.sha256) for file in rows)]


def write(
    directory: Path,
    state: Mapping[str, Any],
    step: int,
    keep: int,
    about: Mapping[str, Any],
    is_current: Callable[[], bool] = lambda: True,
    rows: RowFiles | None = None,
    patience: float = 0.0,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint of a step. Checkpoints of later steps, which the run has gone back from,
    are put aside (``passed-over-step-<n>``); of both kinds the newest ``keep`` stay.

    Args:
        state: Lightning's: plain values and tensors.
        about: facts for the manifest: see `CheckpointManifest`.
        is_current: returns whether no later start of the run has taken over, as after a rank was
            cut off from the network, or suspended.
        rows: embedding tables, whose files the ranks have written to `draft_of` this step.
        patience: seconds to try again while the storage is full or away.
        moved: called whenever the storage has taken something.

    Raises:
        OSError: it cannot be written; earlier checkpoints remain.
    """
    draft, final = draft_of(directory, step), state_at(directory, step).parent
    if rows is None:
        shutil.rmtree(draft, ignore_errors=True)
    else:
        about = {**about, "rows": rows.model_dump(mode="json")}

    def attempt() -> None:
        moved()
        directory.mkdir(exist_ok=True)
        draft.mkdir(exist_ok=True)
        _fill(draft, state, {**about, "step": step}, moved)
        if not is_current():
            raise OSError(errno.ESTALE, "a later start of the run has taken over")
        _publish(draft, final)

    try:
        retry(attempt, patience)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(directory)
    shutil.rmtree(directory / f"{_ASIDE}{final.name}", ignore_errors=True)
    for old in (*_all(directory)[:-keep], *sorted(directory.glob(f"{_ASIDE}*"))[:-keep]):
        shutil.rmtree(old, ignore_errors=True)


def find(
    directory: Path, config: Config, data: str | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest complete checkpoint of the run.

    Args:
        config: of the run as it is now.
        data: fingerprint of its data, if that is known.

    Returns:
        The checkpoint, or None; and ``name: what is wrong with it`` of each newer one.

    Raises:
        OSError: the storage is away.
    """
    rejected: list[str] = []
    for candidate in reversed(_all(directory)):
        checkpoint = judge(candidate, config, data)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint, rejected
        rejected.append(f"{candidate.name}: {checkpoint}")
    return None, rejected


def _publish(draft: Path, final: Path) -> None:
    """Give a draft its final name, and put checkpoints of later steps aside."""
    sync(draft)  # its directory entries
    moved: list[tuple[Path, Path]] = []
    try:
        for other in _all(final.parent):
            if other.name >= final.name:  # also of the same step, after a restart
                moved.append((other, put_aside(other)))
        os.rename(draft, final)
    except BaseException:
        for other, aside in reversed(moved):
            with contextlib.suppress(OSError):
                os.rename(aside, other)
        raise


def put_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint, so that it is passed over; return its new path."""
    aside = checkpoint.with_name(f"{_ASIDE}{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    return aside


def judge(directory: Path, config: Config, data: str | None = None) -> Checkpoint | str:
    """Return a checkpoint, or what is wrong with it; arguments and errors are those of `find`."""
    checkpoint = read(directory)
    if isinstance(checkpoint, str):
        return checkpoint
    if changed := changes(checkpoint.manifest.config, config):
        return f"its configuration differs: {'; '.join(changed)}"
    if data is not None and checkpoint.manifest.data != data:
        return "it was trained on other data, or on another split of them"
    return checkpoint


def unusable(directory: Path, rejected: Sequence[str]) -> InputError:
    """Return the error for a run whose checkpoints are all unusable, so that it never restarts
    silently from scratch."""
    return InputError(
        f"no checkpoint can be used: {'; '.join(rejected)}",
        where=str(directory),
        remedy="restore a complete one, or start over with --overwrite",
    )


def newest(directory: Path) -> str:
    """Return the name of the newest checkpoint, usable or not; empty if there is none."""
    with contextlib.suppress(OSError):
        if checkpoints := _all(directory):
            return checkpoints[-1].name
    return ""


def sweep(directory: Path) -> None:
    """Remove the unfinished files of processes that were killed."""
    for pattern in (".step-*.tmp", ".selected-rows.tmp", f"{SENDING}*"):
        for draft in directory.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True)


def check_contents(state: Path) -> None:
    """Check that a state file can neither run code nor fill the memory, and is one of ours: it
    holds plain values and tensors alone, and is not compressed.

    Raises:
        InputError: it does not, or is.
    """
    import torch

    try:
        check_archive(state)
        content = torch.load(state, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not content.keys() >= compat.LIGHTNING_STATE:
            raise ValueError(f"it lacks {', '.join(sorted(compat.LIGHTNING_STATE))}")
    except (zipfile.BadZipFile, pickle.UnpicklingError, *_GARBLED) as error:
        raise InputError(
            f"this checkpoint cannot be trusted: {' '.join(str(error).split())[:_SAID]}",
            where=str(state),
            remedy="delete it; raygnn did not write it as it is",
        ) from error


def check_archive(file: Path | IO[bytes]) -> None:
    """Check that torch.load neither runs code in a file nor fills the memory from it.

    Raises:
        ValueError, zipfile.BadZipFile: it is not as torch.save writes it.
    """
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("a part of it is compressed")
            if info.filename.endswith("constants.pkl"):
                raise ValueError("it is a TorchScript program")


def state_at(directory: Path, step: int) -> Path:
    """Return the path of a step's state file."""
    return directory / f"step-{step:010d}" / STATE


def draft_of(directory: Path, step: int) -> Path:
    """Return the directory where a step's checkpoint is written before it is complete."""
    return directory / f".step-{step:010d}.tmp"


def rows_of(state: Path) -> RowFiles | None:
    """Return the files of embedding tables of a checkpoint that `find` has found.

    Raises:
        InputError: its manifest has changed in the meantime.
    """
    checkpoint = _described(state.parent)
    if isinstance(checkpoint, str):
        raise InputError(checkpoint, where=str(state.parent), remedy="resume once more")
    return checkpoint.rows


def files_of(directory: Path) -> list[str]:
    """Return the names of a checkpoint's files beside its manifest.

    Raises:
        OSError: the manifest cannot be read, or is damaged.
    """
    checkpoint = _described(directory)
    if isinstance(checkpoint, str):
        raise OSError(errno.EINVAL, checkpoint, str(directory))
    return [name for name, _, _ in checkpoint.files]


def _fill(
    draft: Path, state: Mapping[str, Any], about: Mapping[str, Any], moved: Callable[[], None]
) -> None:
    import torch

    try:
        hashed = save_tensors(dict(state), draft / STATE, moved)
    except OSError:
        (draft / STATE).unlink(missing_ok=True)  # take no space while waiting for some
        raise
    manifest = {
        **about,
        "bytes": hashed.bytes,
        "sha256": hashed.sha.hexdigest(),
        "raygnn": __version__,
        "torch": torch.__version__,
        "time": time.time(),
    }
    write_json(draft / MANIFEST, {**manifest, "digest": _digest(manifest)})


def _all(directory: Path) -> list[Path]:
    """Return all checkpoints, oldest first."""
    try:
        return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def read(directory: Path) -> Checkpoint | str:
    """Read a checkpoint, or return what is wrong with it."""
    checkpoint = _described(directory)
    if isinstance(checkpoint, str):
        return checkpoint
    if checkpoint.state != state_at(directory.parent, checkpoint.step):
        return f"it holds the checkpoint of step {checkpoint.step:,}"
    for name, size, sha in checkpoint.files:
        try:
            if changed := difference(directory / name, size, sha):
                return changed
        except OSError as error:
            return _unreadable(name, error)
    return checkpoint


def _described(directory: Path) -> Checkpoint | str:
    try:
        facts = json.loads(read_regular(directory / MANIFEST, LARGEST_JSON))
        digest = facts.pop("digest")
        manifest = CheckpointManifest.model_validate(facts)
    except OSError as error:
        return _unreadable(MANIFEST, error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is damaged"
    if digest != _digest(facts):
        return f"{MANIFEST} has changed since it was written"
    return Checkpoint(directory / STATE, manifest)


def _unreadable(name: str, error: OSError) -> str:
    """Return what is wrong with a file; raise the error if it is the storage's."""
    if error.errno not in _DAMAGE:
        raise error
    return f"{name} cannot be read: {error.strerror}"


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
