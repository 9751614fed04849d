"""Package of a job: the job and the files of its working directory, few and small.

Ray uploads it, copies it to each node and keeps it in the head node's memory: data and partitions
belong on storage that every node sees.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from pathspec import GitIgnoreSpec

from raygnn.config import places
from raygnn.config.yaml_text import write_yaml
from raygnn.errors import InputError
from raygnn.util.files import storage_errors

MOST_BYTES = 50 * 2**20
MOST_FILES = 10_000

_COUNTED = 200_000  # files, after which counting stops
_LARGEST_SHOWN = 3
_IGNORE_FILES = (".gitignore", ".rayignore")
_GITIGNORE_OFF = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"  # Ray's; "1" = .rayignore alone counts
_NEVER = (
    [".git", ".venv*", "venv", "__pycache__", "*.pyc", ".*_cache", ".hypothesis", "*.egg-info"]
    + ["node_modules", ".ipynb_checkpoints", ".DS_Store", ".nfs*"]
)  # fmt: skip
_SECRETS = GitIgnoreSpec.from_lines(  # of paths in lower case
    ["*.env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", ".envrc"]
    + ["secrets.y*ml", "secrets.json", "secrets.toml", "token.txt"]
    + [".ssh/", ".aws/", ".azure/", ".gnupg/", ".kube/", "kubeconfig", "*.kubeconfig", "gcloud/"]
    + [".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"]
    + ["auth_token", ".vault-token", ".htpasswd", ".docker/"]
    + ["id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub", "*.pem", "*.key", "*.ppk"]
    + ["*.p12", "*.pfx", "*.jks", "*.keystore", "credentials.json", "client_secret*.json"]
    + ["*service_account*.json", "*service-account*.json", "application_default_credentials.json"]
)
_Rules = tuple[Path, GitIgnoreSpec]  # a directory, and the ignored files below it

_LARGEST_KEY = 2**16  # bytes
_KEY = re.compile(rb'(?:^|"private_key": ?")-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----', re.MULTILINE)


@dataclass(frozen=True)
class Contents:
    """Files of a directory that are uploaded."""

    directory: Path  # absolute
    files: dict[str, int]  # path within it → bytes
    # links to directories or out of it, special files, and names that are not UTF-8, which Ray
    # cannot pack
    left_out: tuple[str, ...]
    # files and, with a slash at the end, directories that look like secrets; skipped
    secrets: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(self.files.values())

    def check(self) -> None:
        """Raise InputError, with the largest entries, if it is too large to be uploaded."""
        if self.size <= MOST_BYTES and len(self.files) <= MOST_FILES:
            return
        entries = Counter[str]()
        for name, size in self.files.items():
            top, slash, _ = name.partition("/")
            entries[top + slash] += size
        found = f"{places.size(self.size)} in {len(self.files):,} files"
        found = f"at least {found}" if len(self.files) == _COUNTED else found
        limit = f"{places.size(MOST_BYTES)} and {MOST_FILES:,}"
        largest = [f"{n} {places.size(size)}" for n, size in entries.most_common(_LARGEST_SHOWN)]
        what = f"the working directory is too large to upload with a job: {found}, of {limit}; the "
        remedy = (
            "put data and partitions on storage that every node sees, named by absolute paths; "
            "exclude other files with a .rayignore, or name a smaller directory with --working-dir"
        )
        what += f"largest: {', '.join(largest)}"
        raise InputError(what, where=str(self.directory), remedy=remedy)


def contents_of(
    directory: Path, data: Sequence[Path] = (), without: Path | None = None
) -> Contents:
    """Select the files of a directory to upload: all but version control, environments, caches,
    likely secrets, the directory ``without``, and files that a ``.gitignore`` or ``.rayignore``
    names, which, as for Ray, applies to the files below it. ``data`` is uploaded even if it is
    ignored. Small files are searched for private keys. Raises InputError if the directory does not
    exist, or cannot be read."""
    if not directory.is_dir():
        raise InputError("there is no such directory", where=str(directory))
    files, secrets, left_out = dict[str, int](), dict[str, None](), dict[str, None]()
    with _reading(directory):
        allowed = _allowed(directory)
        paths = chain(
            _travelling(directory, [_rules(directory, _NEVER)], without), *map(_below, data)
        )
        for path in paths:
            if len(files) == _COUNTED:
                break
            name = path.relative_to(directory).as_posix()
            text = name.encode(errors="backslashreplace").decode()
            size = _size(path, directory)
            if size is None or text != name:
                left_out[text] = None
            elif path not in data and (secret := _secret(path, name, size, allowed)):
                secrets[secret] = None
            else:
                files[name] = size
    return Contents(directory, files, tuple(left_out), tuple(secrets))


def pack(contents: Contents, job: dict[str, object], name: str, target: Path) -> None:
    """Copy the files, and the job as a file of this name, into an empty directory. Raises
    InputError if a file cannot be read, or there is no free space."""
    with storage_errors(target, InputError, "set TMPDIR to another place"):
        for file in contents.files:
            copy = target / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _reading(contents.directory / file):
                content = (contents.directory / file).read_bytes()
            copy.write_bytes(content)
        (target / name).write_text(write_yaml(job), encoding="utf-8")


def _rules(base: Path, lines: Iterable[str]) -> _Rules:
    patterns = list[Any]()
    for line in lines:
        with suppress(ValueError):  # as git, ignore invalid patterns
            patterns += GitIgnoreSpec.from_lines([line]).patterns
    return base, GitIgnoreSpec(patterns)


def _travelling(directory: Path, rules: list[_Rules], without: Path | None) -> Iterator[Path]:
    rules = [*rules, *(_rules(directory, lines) for lines in _ignore_files(directory))]
    for path in sorted(directory.iterdir()):
        descend = path.is_dir() and not path.is_symlink()
        names = ((path.relative_to(base).as_posix() + "/" * descend, spec) for base, spec in rules)
        if path == without or any(spec.match_file(name) for name, spec in names):
            continue
        if descend:
            yield from _travelling(path, rules, without)
        elif path.name not in _IGNORE_FILES:  # with these Ray would skip selected files
            yield path


def _below(data: Path) -> Iterator[Path]:
    if data.is_file():
        yield data
        return
    for place, folders, names in os.walk(data, onerror=_raise):
        links = [folder for folder in folders if os.path.islink(os.path.join(place, folder))]
        yield from (Path(place, name) for name in [*names, *links] if name not in _IGNORE_FILES)


def _ignore_files(directory: Path) -> Iterator[list[str]]:
    for name in _IGNORE_FILES:
        off = name == ".gitignore" and os.environ.get(_GITIGNORE_OFF) == "1"
        if not off and (directory / name).is_file():
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
            yield text.splitlines()


def _allowed(directory: Path) -> GitIgnoreSpec:
    """Return the likely secrets to upload: the ``!`` lines of the ``.rayignore``."""
    file = directory / ".rayignore"
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return GitIgnoreSpec.from_lines(line[1:] for line in lines if line.startswith("!"))


def _secret(path: Path, name: str, size: int, allowed: GitIgnoreSpec) -> str | None:
    """Return the file, or the directory above it, that looks like a secret; None if neither."""
    if allowed.match_file(name):
        return None
    for parent in reversed(PurePosixPath(name).parents[:-1]):
        if _SECRETS.match_file(f"{parent}/".lower()):
            return f"{parent}/"
    if _SECRETS.match_file(name.lower()):
        return name
    return name if size <= _LARGEST_KEY and _KEY.search(path.read_bytes()) else None


def _size(path: Path, directory: Path) -> int | None:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return None
    if not real.is_relative_to(directory.resolve()) or not real.is_file():
        return None
    return real.stat().st_size


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"it cannot be read: {error.strerror or error}"
        remedy = "make it readable for this user, or leave it out with a .rayignore"
        raise InputError(what, where=str(error.filename or path), remedy=remedy) from error


def _raise(error: OSError) -> None:
    raise error
