"""Checkpoints in the run directory: complete or absent.

``checkpoints/step-<n>/`` holds Lightning's ``state.ckpt``, embedding tables if there are any (see
`raygnn.checkpoint.learned_rows`), and ``manifest.json`` with their origin, sizes and SHA-256. It is
written under a temporary name and renamed, so that it is complete under its final one. Reading
verifies it all the same, and passes over a damaged one. The weights of a finished run are beside
them: see `raygnn.checkpoint.weights`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raygnn import __version__, compat
from raygnn.checkpoint.hashed_files import difference, save_tensors
from raygnn.config.rules import changes
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.graph.partition.manifest import checksum
from raygnn.util.files import LARGEST_JSON, read_regular, retry, sync, write_json

STATE, MANIFEST = "state.ckpt", "manifest.json"
_ASIDE = "passed-over-"
SENDING = ".sending-"  # prefix of a checkpoint that is being uploaded
_LONGEST = 300  # characters of torch's message
# errors of torch's readers for a file of another format
_GARBLED = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError)
# errors of a damaged or missing file; others are of the storage
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.EIO)
NAME = re.compile(r"step-\d{10}")


Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


class RowFile(BaseModel):
    """File of embedding rows.

    Attributes:
        name: name within its directory.
        ntype: node type.
        rows: number of rows.
        arrays: names of the arrays, in order: ``row``, then the optimizer's state.
        bytes, sha256: size and hash of the file.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(pattern=r"^rows-[0-9]{1,9}-[0-9]{1,9}\.bin$")]
    ntype: str
    rows: Count
    arrays: tuple[str, ...]
    bytes: Count
    sha256: str


class RowFiles(BaseModel):
    """All ranks' files of one state of the embedding tables.

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
        config: keys that must not change, see `raygnn.config.rules.fixed`.
        data: fingerprint of the data.
        global_batch: number of seeds per step, over all ranks.
        bytes, sha256: size and hash of Lightning's file.
        rows: files of embedding tables; None = the model has none.
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
    """Complete checkpoint. ``state``: path of Lightning's file."""

    state: Path
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        return self.state.parent.name

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def files(self) -> list[tuple[str, int, str]]:
        """Name, size and SHA-256 of each file beside the manifest."""
        manifest = self.manifest
        rows = () if manifest.rows is None else manifest.rows.files
        state = (STATE, manifest.bytes, manifest.sha256)
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
    """Write the checkpoint of a step. Checkpoints of later steps, from before the run was resumed
    at an earlier one, are renamed to ``passed-over-step-<n>``. The newest ``keep`` of both kinds
    are kept.

    Args:
        state: Lightning's state: plain values and tensors.
        about: facts for the manifest: see `CheckpointManifest`.
        is_current: returns False if a later attempt of the run has taken over, as after this rank
            was suspended or cut off from the network.
        rows: embedding tables, whose files the ranks have written to `draft_of` this step.
        patience: seconds to try again while the storage is full or unavailable.
        moved: called after each piece that was written.

    Raises:
        OSError: the checkpoint cannot be written; earlier checkpoints remain.
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
    """Find the newest usable checkpoint of the run.

    Args:
        config: the run's current configuration.
        data: fingerprint of its data, if known.

    Returns:
        The checkpoint, or None; and ``name: reason`` of each newer checkpoint, which is unusable.

    Raises:
        OSError: the storage is unavailable.
    """
    rejected: list[str] = []
    for candidate in reversed(_all(directory)):
        try:
            return judge(candidate, config, data), rejected
        except DataError as error:
            rejected.append(f"{candidate.name}: {error.what}")
    return None, rejected


def _publish(draft: Path, final: Path) -> None:
    """Rename a draft to its final name, and the checkpoints of later steps, which are passed over
    from now on."""
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
    """Rename a checkpoint, so that it is passed over, and return its new path."""
    aside = checkpoint.with_name(f"{_ASIDE}{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    return aside


def judge(directory: Path, config: Config, data: str | None = None) -> Checkpoint:
    """Read a checkpoint that the run can resume from; see `find`. Raises DataError if it is damaged
    or of another configuration or data, and OSError if the storage is unavailable."""
    checkpoint, what = read(directory), ""
    if changed := changes(checkpoint.manifest.config, config):
        what = f"its configuration differs: {'; '.join(changed)}"
    elif data is not None and checkpoint.manifest.data != data:
        what = "it was trained on other data, or on another split of them"
    if what:
        raise _unusable(directory, what)
    return checkpoint


def unusable(directory: Path, rejected: Sequence[str]) -> InputError:
    """Return the error for a run whose checkpoints are all unusable, so that it never restarts
    silently from scratch."""
    message = f"no checkpoint can be used: {'; '.join(rejected)}"
    remedy = "restore a complete one, or start over with --overwrite"
    return InputError(message, where=str(directory), remedy=remedy)


def newest(directory: Path) -> str:
    """Return the name of the newest checkpoint, even of an unusable one; empty if there is none."""
    with contextlib.suppress(OSError):
        if checkpoints := _all(directory):
            return checkpoints[-1].name
    return ""


def sweep(directory: Path) -> None:
    """Remove the drafts of processes that were killed."""
    for pattern in (".step-*.tmp*", ".selected-rows.tmp", f"{SENDING}*"):
        for draft in directory.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True)


def check_contents(state: Path) -> None:
    """Check that a state file is Lightning's, not compressed, and holds only plain values and
    tensors, so that loading it neither runs code nor fills the memory. Raises InputError if not."""
    import torch

    try:
        check_archive(state)
        content = torch.load(state, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not content.keys() >= compat.LIGHTNING_STATE:
            raise ValueError(f"it lacks {', '.join(sorted(compat.LIGHTNING_STATE))}")
    except (zipfile.BadZipFile, pickle.UnpicklingError, *_GARBLED) as error:
        message = f"this checkpoint cannot be trusted: {' '.join(str(error).split())[:_LONGEST]}"
        remedy = "delete it: its content is not what raygnn writes"
        raise InputError(message, where=str(state), remedy=remedy) from error


def check_archive(file: Path | IO[bytes]) -> None:
    """Check that torch.load neither runs code in a file nor fills the memory from it. Raises
    ValueError or zipfile.BadZipFile if the file differs from what torch.save writes."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("an entry of the archive is compressed")
            if info.filename.endswith("constants.pkl"):
                raise ValueError("it is a TorchScript program")


def state_at(directory: Path, step: int) -> Path:
    """Return the path of a step's state file."""
    return directory / f"step-{step:010d}" / STATE


def draft_of(directory: Path, step: int) -> Path:
    """Return the directory where a step's checkpoint is written before it is complete."""
    return directory / f".step-{step:010d}.tmp"


def _fill(
    draft: Path, state: Mapping[str, Any], about: Mapping[str, Any], moved: Callable[[], None]
) -> None:
    import torch

    try:
        hashed = save_tensors(dict(state), draft / STATE, moved)
    except OSError:
        (draft / STATE).unlink(missing_ok=True)  # use no space while waiting for free space
        raise
    manifest = {
        **about,
        "bytes": hashed.bytes,
        "sha256": hashed.sha.hexdigest(),
        "raygnn": __version__,
        "torch": torch.__version__,
        "time": time.time(),
    }
    write_json(draft / MANIFEST, {**manifest, "digest": checksum(manifest)})


def _all(directory: Path) -> list[Path]:
    """Return all checkpoints, oldest first."""
    try:
        return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def read(directory: Path) -> Checkpoint:
    """Read a checkpoint, and compare its files with their recorded hashes. Raises DataError if it
    is damaged, and OSError if the storage is unavailable."""
    checkpoint = read_manifest(directory)
    if checkpoint.state != state_at(directory.parent, checkpoint.step):
        raise _unusable(directory, f"it holds the checkpoint of step {checkpoint.step:,}")
    for name, size, sha in checkpoint.files:
        with _damage(directory, name):
            if changed := difference(directory / name, size, sha):
                raise _unusable(directory, changed)
    return checkpoint


def read_manifest(directory: Path) -> Checkpoint:
    """Read the manifest of a checkpoint; see `read`."""
    what = f"{MANIFEST} is damaged"
    try:
        with _damage(directory, MANIFEST):
            facts = json.loads(read_regular(directory / MANIFEST, LARGEST_JSON))
        digest = facts.pop("digest")
        manifest = CheckpointManifest.model_validate(facts)
        if digest == checksum(facts):
            return Checkpoint(directory / STATE, manifest)
        what = f"{MANIFEST} has changed since it was written"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise _unusable(directory, what)


@contextlib.contextmanager
def _damage(directory: Path, name: str) -> Iterator[None]:
    """Raise DataError for an OSError of a damaged or missing file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise _unusable(directory, f"{name} cannot be read: {error.strerror}") from error


def _unusable(directory: Path, what: str) -> DataError:
    remedy = "restore the files that training wrote, or remove this checkpoint, and resume again"
    return DataError(what, where=str(directory), remedy=remedy)
