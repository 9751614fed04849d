"""A node's cache of plain arrays, made once and mapped by every worker on the node.

An entry is a directory of ``.npy`` files and ``stage.json``, which says what they are. It is made
in a temporary directory and renamed when it is whole and on disk. Of several workers that want
the same entry one makes it, under a lock that ends with its process, and the others wait. Who has
an entry mapped holds a shared lock on it, and so it is not removed when room is made.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.errors import DataError
from raygnn.graph.staging.entries import FACTS, VERSION, Draft, Entry, open_entry
from raygnn.util.files import new_directory, publish
from raygnn.util.locks import try_flock, try_lock

if TYPE_CHECKING:
    from raygnn.config.execution import StagingConfig

log = logging.getLogger("raygnn")

_ENTRY = re.compile(r"[a-z]+-\d+-\d+-[0-9a-f]{32}")
_TEMPORARY = re.compile(rf"\.({_ENTRY.pattern})\.tmp-.*")
_POLL = 0.05  # seconds between looks whether another worker has finished
_GB = 10**9


class Stage:
    """The cache of one node.

    Args:
        root: its directory; made, for this user only, if it is not there.
        max_bytes: beyond this, entries go that nobody uses, those first that were not used for
            longest; None = half of the disk.
        wait: seconds for which another worker may take to make an entry.
    """

    def __init__(self, root: Path, max_bytes: int | None = None, *, wait: float = 1800.0):
        self.root = root.absolute()
        self.max_bytes = max_bytes
        self.wait = wait

    @classmethod
    def of(cls, config: StagingConfig) -> Stage:
        """The cache that a configuration names; by default in the temporary directory."""
        root = config.path or Path(tempfile.gettempdir()) / f"raygnn-{os.getuid()}"
        return cls(root, None if config.max_gb is None else int(config.max_gb * _GB))

    def entry(
        self,
        what: str,
        span: tuple[int, int],
        made_from: Mapping[str, Any],
        build: Callable[[Draft], None],
    ) -> Entry:
        """An entry; made now, by ``build``, if it is not there or not as it was made.

        Args:
            what: its kind, in small letters; span: the parts in it, first and one past the last.
            made_from: JSON values; all that decides the content.

        Raises:
            DataError: the directory cannot be used or is full, or another worker took too long.
                What ``build`` raises passes through. Nothing unfinished is left behind.
        """
        facts = {"version": VERSION, "what": what, "span": list(span), **made_from}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        name = f"{what}-{span[0]}-{span[1]}-{digest[:32]}"
        path = self.root / name
        with self._saying_where():
            self._prepare()
            found = open_entry(path)
            if isinstance(found, Entry):
                return found
            with self._lock(name, self.wait):
                found = open_entry(path)  # another was first
                if isinstance(found, Entry):
                    return found
                if found is not None:
                    log.warning("%s: %s; it is made again", path, found)
                    self._remove(path)
                self._sweep(name)
                with new_directory(path) as directory:
                    with Draft(directory) as draft:
                        build(draft)
                        draft.finish(facts)
                    publish(directory, path)
                found = open_entry(path)
                if not isinstance(found, Entry):
                    raise DataError(
                        f"was damaged at once: {found}",
                        where=str(path),
                        remedy="set staging.path to another disk",
                    )
            self._trim()
        return found

    def _prepare(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stat in (self.root.lstat(), self.root.stat()):
            if stat.st_uid != os.getuid():
                raise DataError(
                    f"staging.path belongs to another user (id {stat.st_uid})",
                    where=str(self.root),
                    remedy="set staging.path to a directory of your own, which need not exist",
                )

    @contextlib.contextmanager
    def _lock(self, name: str, wait: float) -> Iterator[None]:
        """Be the only one to make or remove an entry. Raises _Busy when others take too long."""
        path = self.root / f".{name}.lock"
        deadline = time.monotonic() + wait
        while (handle := try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise _Busy(path, wait)
            time.sleep(_POLL)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # those who wait make it anew
            os.close(handle)

    def _sweep(self, name: str) -> None:
        """Remove what processes left that died at work: on this entry, whose lock we have, and
        on others that nobody works on."""
        for path in self.root.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and match[1] == name:
                _delete(path)
            elif match:
                with contextlib.suppress(_Busy), self._lock(match[1], 0):
                    _delete(path)

    def _trim(self) -> None:
        """Make room: remove entries that nobody uses, those first that were not for longest."""
        limit = self.max_bytes
        if limit is None:
            limit = shutil.disk_usage(self.root).total // 2
        found = [path for path in self.root.iterdir() if _ENTRY.fullmatch(path.name)]
        sizes = {path: _size(path) for path in found}
        total = sum(sizes.values())
        for path in sorted(found, key=_last_use):
            if total <= limit:
                return
            with contextlib.suppress(_Busy), self._lock(path.name, 0):
                if self._remove_unused(path):
                    total -= sizes[path]
        if total > limit:
            which = "staging.max_gb" if self.max_bytes is not None else "half of the disk"
            log.warning("%s: %.3g GB are in use, more than %s", self.root, total / _GB, which)

    def _remove(self, path: Path) -> None:
        away = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(away)
        _delete(away)

    def _remove_unused(self, path: Path) -> bool:
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                handle = os.open(path / FACTS, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                held.callback(os.close, handle)
                if not try_flock(handle):
                    return False
            self._remove(path)
        return True

    @contextlib.contextmanager
    def _saying_where(self) -> Iterator[None]:
        """Turn errors of the file system into ours."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise DataError(
                f"staging.path cannot be written: {error.strerror or error}",
                where=str(self.root),
                remedy="free some space there, or set staging.path to a larger disk of this node"
                if full
                else "make it writable, or set staging.path to a directory on a disk of this node",
            ) from error


class _Busy(DataError):
    def __init__(self, lock: Path, wait: float):
        pid = ""
        with contextlib.suppress(OSError):
            pid = lock.read_text()
        super().__init__(
            f"process {pid or '(unknown)'} has been making this for more than {wait:g} s",
            where=str(lock.with_name(lock.name[1:].removesuffix(".lock"))),
            remedy="look what that process does, and end it if it hangs: another then takes over",
        )


def _delete(path: Path) -> None:
    """Remove a directory, or what lies in its place; what a link leads to stays."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for file in () if path.is_symlink() else path.iterdir():
            total += file.lstat().st_size
    return total


def _last_use(path: Path) -> float:
    try:
        return (path / FACTS).stat().st_mtime
    except FileNotFoundError:
        return 0.0
