"""What travels with a job: the files of a directory, few and small, and the job as one file.

Data and partitions lie on storage that every node sees; a package that Ray copies to each node, and
keeps in the head node's memory, is no place for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from raygnn.config import places
from raygnn.config.yaml_text import write_yaml
from raygnn.errors import InputError
from raygnn.jobs import ignoring
from raygnn.util.files import storage_errors

MOST_BYTES = 50 * 2**20
MOST_FILES = 10_000

_LOOKED_AT = 200_000  # files and directories, after which nobody counts further
_LARGEST_SHOWN = 3
_NEVER = GitIgnoreSpec.from_lines(
    [".git", ".venv*", "venv", "__pycache__", "*.pyc", ".*_cache", ".hypothesis", "*.egg-info"]
    + ["node_modules", ".ipynb_checkpoints", ".DS_Store", ".nfs*"]
)
_REMEDY = (
    "put data and partitions on storage that every node sees, named by absolute paths; leave other "
    "files out with a .rayignore, or name a smaller directory with --working-dir"
)


@dataclass(frozen=True)
class Found:
    """What would travel of a directory.

    Attributes:
        directory: absolute.
        files: path within it → bytes.
        left_out: links to directories or out of it, what is no regular file, and names that are
            no UTF-8, which Ray cannot pack.
        secrets: files, and directories with a slash at the end, that look like secrets, and stay.
        whole: whether all of it was looked at.
    """

    directory: Path
    files: dict[str, int]
    left_out: tuple[str, ...]
    secrets: tuple[str, ...]
    whole: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(self.files.values())

    def check(self, most: int = MOST_BYTES) -> None:
        """See that it is little.

        Args:
            most: bytes.

        Raises:
            InputError: it is not; with its size and the largest of it.
        """
        if self.whole and self.size <= most and len(self.files) <= MOST_FILES:
            return
        largest = sorted(_shares(self.files).items(), key=lambda item: -item[1])[:_LARGEST_SHOWN]
        shown = ", ".join(f"{name} {places.size(part)}" for name, part in largest)
        whole = f"{'' if self.whole else 'more than '}{places.size(self.size)}"
        raise InputError(
            f"the working directory is too large to travel with a job: {whole} in "
            f"{len(self.files):,} files, of {places.size(most)} and {MOST_FILES:,}; "
            f"the largest: {shown}",
            where=str(self.directory),
            remedy=_REMEDY,
        )


def look(directory: Path, wanted: Sequence[Path] = (), without: Sequence[Path] = ()) -> Found:
    """What travels of a directory: not version control, environments, caches, nor what looks like
    a secret, nor what a ``.gitignore`` or ``.rayignore`` names, in it or above it in its
    repository. Of small files it reads whether they hold a private key.

    Args:
        wanted: files and directories within it that travel, whatever ignore files say.
        without: directories that do not.

    Raises:
        InputError: it is no directory, or cannot be listed.
    """
    if not directory.is_dir():
        raise InputError("there is no such directory", where=str(directory))
    files: dict[str, int] = {}
    left: list[str] = []
    secrets: list[str] = []
    whole, looked = True, 0
    with _reading(directory):
        for path, rules in _walk(directory, wanted, without, secrets):
            looked += 1
            if looked > _LOOKED_AT:
                whole = False
                break
            name = str(path.relative_to(directory))
            size = _size(path, directory)
            if size is None or not _is_text(name):
                left.append(_shown(name))
            elif path not in wanted and ignoring.holds_key(path, size, rules):
                secrets.append(name)
            else:
                files[name] = size
    return Found(directory, files, tuple(left), tuple(secrets), whole)


def pack(found: Found, job: dict[str, object], name: str, target: Path) -> None:
    """Copy what was found into an empty directory, and the job beside it.

    Args:
        job: the configuration, plain JSON types.
        name: of its file; one of that name is replaced.

    Raises:
        InputError: a file cannot be read, or there is no room.
    """
    with storage_errors(target, InputError, "set TMPDIR to another place"):
        for file in found.files:
            place = target / file
            place.parent.mkdir(parents=True, exist_ok=True)
            with _reading(found.directory / file), open(found.directory / file, "rb") as source:
                content = source.read()
            place.write_bytes(content)
        (target / name).write_text(write_yaml(job), encoding="utf-8")


def check_unpacked(directory: Path) -> None:
    """See that what `ray job submit` brought is little, and no repository: for a job that was not
    packed by us, on the node that runs it.

    Raises:
        InputError: it is not; with its size and the remedy.
    """
    found = look(directory, wanted=[directory])
    git = sum(size for name, size in found.files.items() if ".git" in Path(name).parts[:-1])
    if git:
        raise InputError(
            f"the job's package carries a .git of {places.size(git)}",
            where=str(directory),
            remedy="name .git in a .rayignore, or submit with raygnn submit",
        )
    found.check()


def _walk(
    directory: Path, wanted: Sequence[Path], without: Sequence[Path], secrets: list[str]
) -> Iterator[tuple[Path, tuple[ignoring.Rule, ...]]]:
    """Files, and links to directories, each with the rules for it.

    Args:
        secrets: gets the names that look like secrets.
    """
    above = {directory.parent: ignoring.rules_above(directory)}
    ignored = set[Path]()
    for place, folders, names in os.walk(directory, onerror=_raise):
        here = Path(place)
        rules = above[here] = above[here.parent] + tuple(ignoring.rules_in(here))
        for folder in list(folders):
            path = here / folder
            if path.is_symlink():
                folders.remove(folder)
                names.append(folder)
            elif path in without:
                folders.remove(folder)
            elif here in ignored or _stays(path, directory, rules, "/"):
                ignored.add(path)
                if not any(_related(path, each) for each in wanted):
                    folders.remove(folder)
            elif path not in wanted and ignoring.looks_secret(path, rules, "/"):
                secrets.append(_shown(f"{path.relative_to(directory)}/"))
                folders.remove(folder)
        for name in names:
            path = here / name
            if name in (ignoring.GIT, ignoring.RAY):
                continue  # Ray would leave out by it what we have chosen
            if not any(path.is_relative_to(each) for each in wanted) and (
                here in ignored or _stays(path, directory, rules)
            ):
                continue
            if path not in wanted and ignoring.looks_secret(path, rules):
                secrets.append(_shown(str(path.relative_to(directory))))
            else:
                yield path, rules


def _stays(path: Path, top: Path, rules: Sequence[ignoring.Rule], end: str = "") -> bool:
    name = f"{path.relative_to(top).as_posix()}{end}"
    return _NEVER.match_file(name) or bool(ignoring.ignored(path, rules, end))


def _related(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"it cannot be read: {error.strerror or error}",
            where=str(error.filename or path),
            remedy="make it readable for this user, or leave it out with a .rayignore",
        ) from error


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _raise(error: OSError) -> None:
    raise error


def _size(path: Path, directory: Path) -> int | None:
    """Bytes of a regular file that lies within the directory; None for all else."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return None
    if not real.is_relative_to(directory.resolve()) or not real.is_file():
        return None
    return real.stat().st_size


def _shares(files: dict[str, int]) -> dict[str, int]:
    """Bytes of each file or directory at the top."""
    shares: dict[str, int] = {}
    for name, size in files.items():
        parts = Path(name).parts
        top = f"{parts[0]}/" if len(parts) > 1 else parts[0]
        shares[top] = shares.get(top, 0) + size
    return shares
