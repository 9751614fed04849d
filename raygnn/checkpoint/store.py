"""Checkpoints in the run directory: whole or not there.

``checkpoints/step-<n>/`` holds Lightning's ``state.ckpt``, learned rows of nodes if there are some
(see `raygnn.checkpoint.learned_rows`), and a ``manifest.json`` that says what they belong to and
size and SHA-256 of each. It is written under another name and renamed, so that what has the final
name is complete; reading verifies it all the same and passes over a damaged one.
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
from raygnn.checkpoint.hashed_files import difference, nothing, save_tensors
from raygnn.config.rules import changes
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.util.files import LARGEST_JSON, read_regular, retry, sync, write_json

STATE, MANIFEST = "state.ckpt", "manifest.json"
_ASIDE = "passed-over-"
SENDING = ".sending-"  # a checkpoint that is on its way, and must not go meanwhile
_SAID = 300  # characters of what torch says
# what torch's readers raise of a file that makes no sense
_GARBLED = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError)
# of a file, not of the storage
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.EIO)
NAME = re.compile(r"step-\d{10}")


Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


class RowFile(BaseModel):
    """A file of learned rows of nodes.

    Attributes:
        name: within its directory.
        ntype: of the nodes.
        rows: how many there are.
        arrays: names of the arrays, in order: ``row``, and what belongs to it.
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
    """All files of one state of the rows, of all ranks.

    Attributes:
        dim: width of a row.
        steps: that the optimizer has made.
    """

    model_config = ConfigDict(frozen=True)

    dim: Count
    steps: Count
    files: tuple[RowFile, ...]

    @model_validator(mode="after")
    def _sizes(self) -> RowFiles:
        for file in self.files:
            if file.bytes != file.rows * (8 + 4 * self.dim * len(file.arrays)):
                raise ValueError(f"no file of rows: {file.name}")
        return self


class CheckpointManifest(BaseModel):
    """What ``manifest.json`` says of a checkpoint.

    Attributes:
        step: optimizer steps so far.
        config: see `raygnn.config.rules.fixed`.
        data: the fingerprint of the data.
        global_batch: seeds of a step, over all ranks.
        bytes, sha256: of Lightning's file.
        rows: the files of learned rows beside it; None = there are none.
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
    """One that is whole.

    Attributes:
        state: Lightning's file.
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
    moved: Callable[[], None] = nothing,
) -> None:
    """Write the state after a step. Later ones, which the run has passed over, are put aside
    (``passed-over-step-<n>``); of both kinds the oldest beyond ``keep`` go.

    Args:
        state: Lightning's: plain values and tensors.
        about: for the manifest, whose other facts are added: see `CheckpointManifest`.
        is_current: whether no later start of the run has taken over, which a rank that was cut
            off, or asleep, may find when it comes back.
        rows: learned rows, whose files ranks have written to `draft_of` this step.
        patience: seconds to try again while the storage is full or away.
        moved: called whenever the storage has taken something.

    Raises:
        OSError: it cannot be written; those that were there are there still.
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
    """The newest checkpoint that is whole and the run's own.

    Args:
        config: of the run as it is now.
        data: the fingerprint of its data, if that is known.

    Returns:
        It, or None; and of each newer one its name and what is wrong with it.

    Raises:
        OSError: the storage is away, which says nothing of what lies there.
    """
    rejected: list[str] = []
    for candidate in reversed(_all(directory)):
        checkpoint = judge(candidate, config, data)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint, rejected
        rejected.append(f"{candidate.name}: {checkpoint}")
    return None, rejected


def _publish(draft: Path, final: Path) -> None:
    """Give a draft its name, and put those aside that it goes back before."""
    sync(draft)  # the names of its files
    moved: list[tuple[Path, Path]] = []
    try:
        for other in _all(final.parent):
            if other.name >= final.name:  # the same step again, too, after a restart
                moved.append((other, put_aside(other)))
        os.rename(draft, final)
    except BaseException:
        for other, aside in reversed(moved):
            with contextlib.suppress(OSError):
                os.rename(aside, other)
        raise


def put_aside(checkpoint: Path) -> Path:
    """Rename one, so that it is none any more; returns its new place."""
    aside = checkpoint.with_name(f"{_ASIDE}{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    return aside


def judge(directory: Path, config: Config, data: str | None = None) -> Checkpoint | str:
    """A checkpoint, or what is wrong with it; the arguments and errors are those of `find`."""
    checkpoint = read(directory)
    if isinstance(checkpoint, str):
        return checkpoint
    if changed := changes(checkpoint.manifest.config, config):
        return f"it is of another configuration: {'; '.join(changed)}"
    if data is not None and checkpoint.manifest.data != data:
        return "it was trained on other data, or on another split of them"
    return checkpoint


def unusable(directory: Path, rejected: Sequence[str]) -> InputError:
    """Where there are checkpoints and none can be used: nobody is to start over in their place."""
    return InputError(
        f"no checkpoint can be used: {'; '.join(rejected)}",
        where=str(directory),
        remedy="put a whole one back, or start over with --overwrite",
    )


def newest(directory: Path) -> str:
    """Name of the newest checkpoint, whole or not; empty when none can be seen."""
    with contextlib.suppress(OSError):
        if checkpoints := _all(directory):
            return checkpoints[-1].name
    return ""


def sweep(directory: Path) -> None:
    """Remove what writers that were killed left unfinished."""
    for pattern in (".step-*.tmp", ".selected-rows.tmp", f"{SENDING}*"):
        for draft in directory.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True)


def check_contents(state: Path) -> None:
    """Refuse a state file that holds more than plain values and tensors, and so could run code,
    that is compressed, and so could fill the memory, or that is not what we write.

    Raises:
        InputError: it does, or is.
    """
    import torch

    try:
        check_archive(state)
        content = torch.load(state, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not content.keys() >= compat.LIGHTNING_STATE:
            raise ValueError(f"it lacks {', '.join(sorted(compat.LIGHTNING_STATE))}")
    except (zipfile.BadZipFile, pickle.UnpicklingError, *_GARBLED) as error:
        raise InputError(
            f"this checkpoint is not to be trusted: {' '.join(str(error).split())[:_SAID]}",
            where=str(state),
            remedy="delete it; it was not written by raygnn as it is",
        ) from error


def check_archive(file: Path | IO[bytes]) -> None:
    """See that torch.load can neither run what a file holds nor fill the memory with it.

    Raises:
        ValueError, zipfile.BadZipFile: it is not as torch.save writes it.
    """
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("a part of it is compressed")
            if info.filename.endswith("constants.pkl"):
                raise ValueError("it is a program of TorchScript")


def state_at(directory: Path, step: int) -> Path:
    """The state file of one step's checkpoint."""
    return directory / f"step-{step:010d}" / STATE


def draft_of(directory: Path, step: int) -> Path:
    """Where one step's checkpoint is written before it is whole."""
    return directory / f".step-{step:010d}.tmp"


def rows_of(state: Path) -> RowFiles | None:
    """The files of learned rows beside a state file that `find` has found whole.

    Raises:
        InputError: what says so has changed meanwhile.
    """
    checkpoint = _described(state.parent)
    if isinstance(checkpoint, str):
        raise InputError(checkpoint, where=str(state.parent), remedy="resume once more")
    return checkpoint.rows


def files_of(directory: Path) -> list[str]:
    """The names of all files that a checkpoint has beside its manifest, as that says.

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
    """Write both files of a checkpoint, durably."""
    import torch

    try:
        hashed = save_tensors(dict(state), draft / STATE, moved)
    except OSError:
        (draft / STATE).unlink(missing_ok=True)  # what waits for room takes none
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
    """Oldest first; nothing that others may have put there.

    Raises:
        OSError: the directory is there, and cannot be read.
    """
    try:
        return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def read(directory: Path) -> Checkpoint | str:
    """A checkpoint, or what is wrong with it."""
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
    """A checkpoint as its manifest describes it; or what is wrong with that."""
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
    """What is wrong with a file; raises where that is not the file's."""
    if error.errno not in _DAMAGE:
        raise error
    return f"{name} cannot be read: {error.strerror}"


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
