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
import math
import mmap
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, element_bytes
from raygnn.util.files import new_directory, publish, remove, sync_file
from raygnn.util.locks import try_flock, try_lock

if TYPE_CHECKING:
    from torch import Tensor

    from raygnn.config.execution import StagingConfig

log = logging.getLogger("raygnn")

VERSION: Literal[1] = 1
FACTS = "stage.json"

_ENTRY = re.compile(r"[a-z]+-\d+-\d+-[0-9a-f]{32}")
_TEMPORARY = re.compile(rf"\.({_ENTRY.pattern})\.tmp-.*")
_POLL = 0.05  # seconds between looks whether another worker has finished
_GB = 10**9
_LARGEST = 64 * 2**20  # bytes of what is said about arrays
# nothing but a file of the entry's own: a link could lead anywhere, a FIFO is waited for
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NORESERVE = 0x4000  # MAP_NORESERVE; the mmap module names it in new Pythons only


class StoredArray(BaseModel):
    """One array of an entry: its file, dtype (also ``"bfloat16"``, stored as int16), shape, and
    where in the file its elements begin."""

    file: Annotated[str, Field(pattern=r"^[0-9]+\.npy$")]
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype("int16" if self.dtype == "bfloat16" else self.dtype)


class _Facts(BaseModel):
    """The contents of ``stage.json``."""

    version: Literal[1]
    made_from: dict[str, Any]
    arrays: dict[str, StoredArray]


class CacheEntry:
    """A whole entry, kept while this object or an array of it is alive."""

    def __init__(self, path: Path, arrays: dict[str, StoredArray], lock: int):
        self.path = path
        self.arrays = arrays
        weakref.finalize(self, os.close, lock)

    def file(self, name: str) -> Path:
        return self.path / self.arrays[name].file

    def array(self, name: str, *, at_random: bool = False) -> Array:
        """The elements, mapped; read-only. bfloat16 comes as int16. ``at_random``: nothing is read
        ahead of what is asked for."""
        array = self._map(name, at_random)
        array.flags.writeable = False
        return array

    def tensor(self, name: str) -> Tensor:
        """The same as a tensor. What is written to it copies a page, and never reaches the file."""
        import torch

        tensor = torch.from_numpy(self._map(name))
        return tensor.view(torch.bfloat16) if self.arrays[name].dtype == "bfloat16" else tensor

    def below(self, prefix: str) -> dict[str, str]:
        """What follows the prefix → the array's name, of the arrays whose names begin with it."""
        return {key.removeprefix(prefix): key for key in self.arrays if key.startswith(prefix)}

    def _map(self, name: str, at_random: bool = False) -> Array:
        facts = self.arrays[name]
        if not math.prod(facts.shape):
            return np.empty(facts.shape, facts.stored)
        with self.file(name).open("rb") as file:
            memory = _Memory(
                file.fileno(),
                facts.bytes,
                flags=mmap.MAP_PRIVATE | _NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        if at_random:
            memory.madvise(mmap.MADV_RANDOM)
        memory.entry = self
        return np.frombuffer(memory, facts.stored, offset=facts.offset).reshape(facts.shape)


class _Memory(mmap.mmap):
    entry: CacheEntry


class Draft:
    """An entry that is being made in ``directory``."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._arrays: dict[str, StoredArray] = {}
        self._writers: list[ArrayWriter] = []

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> ArrayWriter:
        """A file to which exactly the elements of ``shape`` are to be appended, row after row."""
        file = f"{len(self._arrays)}.npy"
        facts = StoredArray(file=file, dtype=dtype, shape=shape, offset=0, bytes=0)
        stream = (self._directory / file).open("wb")
        self._writers.append(ArrayWriter(stream, facts.stored))
        header = {"descr": facts.stored.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        offset = stream.tell()
        size = offset + math.prod(shape) * facts.stored.itemsize
        self._arrays[name] = facts.model_copy(update={"offset": offset, "bytes": size})
        return self._writers[-1]

    def finish(self, made_from: Mapping[str, Any]) -> None:
        """Write what there is to say about the arrays, and put all of it on the disk."""
        for writer, (name, array) in zip(self._writers, self._arrays.items()):
            sync_file(writer.stream)
            size = writer.stream.tell()
            assert size == array.bytes, f"{name} got {size} of {array.bytes} bytes"
        facts = _Facts(version=VERSION, made_from={**made_from}, arrays=self._arrays)
        with (self._directory / FACTS).open("w") as file:
            file.write(facts.model_dump_json(indent=1))
            sync_file(file)

    def close(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # said when it was flushed
                writer.stream.close()


class ArrayWriter:
    """Appends rows to an array's file, in the array's dtype."""

    def __init__(self, stream: BinaryIO, dtype: np.dtype[Any]):
        self.stream = stream
        self._dtype = dtype

    def append(self, rows: Array | Tensor) -> None:
        if isinstance(rows, np.ndarray):
            rows = rows.astype(self._dtype, copy=False)
        if rows.nbytes:
            self.stream.write(element_bytes(rows))


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
    def from_config(cls, config: StagingConfig) -> Stage:
        """The cache that a configuration names; by default in the temporary directory."""
        return cls(config.root, None if config.max_gb is None else int(config.max_gb * _GB))

    def entry(
        self,
        kind: str,
        span: tuple[int, int],
        made_from: Mapping[str, Any],
        build: Callable[[Draft], None],
    ) -> CacheEntry:
        """An entry; made now, by ``build``, if it is not there or not as it was made.

        Args:
            kind: in small letters; span: the parts in it, first and one past the last.
            made_from: JSON values; all that decides the content.

        Raises:
            DataError: the directory cannot be used or is full, or another worker took too long.
                What ``build`` raises passes through. Nothing unfinished is left behind.
        """
        facts = {"version": VERSION, "what": kind, "span": list(span), **made_from}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        path = self.root / f"{kind}-{span[0]}-{span[1]}-{digest[:32]}"
        with self._storage_errors():
            self._prepare()
            entry = _open_entry(path)
            if isinstance(entry, CacheEntry):
                return entry
            with self._lock(path.name, self.wait):
                entry = _open_entry(path)  # another was first
                if isinstance(entry, CacheEntry):
                    return entry
                if entry is not None:
                    log.warning("%s: %s; it is made again", path, entry)
                    self._remove(path)
                self._sweep(path.name)
                with new_directory(path) as directory:
                    with contextlib.closing(Draft(directory)) as draft:
                        build(draft)
                        draft.finish(facts)
                    publish(directory, path)
                entry = _open_entry(path)
                if not isinstance(entry, CacheEntry):
                    raise DataError(
                        f"was damaged at once: {entry}",
                        where=str(path),
                        remedy="set staging.path to another disk",
                    )
            self._trim()
        return entry

    def _prepare(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for status in (self.root.lstat(), self.root.stat()):
            if status.st_uid != os.getuid():
                raise DataError(
                    f"staging.path belongs to another user (id {status.st_uid})",
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
            limit = disk_usage(self.root).total // 2
        sizes = {path: _size(path) for path in self.root.iterdir() if _ENTRY.fullmatch(path.name)}
        total = sum(sizes.values())
        for path in sorted(sizes, key=_last_use):
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
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                handle = os.open(path / FACTS, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                if not try_flock(handle):
                    return False
            self._remove(path)
        return True

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
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


def _open_entry(path: Path) -> CacheEntry | str | None:
    """The entry, or what is wrong with it, or None if it is not there."""
    if path.is_symlink():
        return "it is a symbolic link"
    if not path.is_dir():
        return None
    try:
        handle = os.open(path / FACTS, _OPEN)
    except FileNotFoundError:
        return f"{FACTS} is missing"
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return f"{FACTS} is a symbolic link"
    try:
        if not try_flock(handle, shared=True) or not os.fstat(handle).st_nlink:
            raise BlockingIOError
        arrays = _read_facts(handle)
        for array in arrays.values():
            status = (path / array.file).lstat()
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{array.file} is no file")
            if status.st_size != array.bytes:
                raise ValueError(f"{array.file} has {status.st_size} bytes, expected {array.bytes}")
        with contextlib.suppress(OSError):  # a cache that is read only
            os.utime(path / FACTS)
        return CacheEntry(path, arrays, handle)
    except BlockingIOError:  # it is being removed
        os.close(handle)
        return None
    except (OSError, ValueError) as error:
        os.close(handle)
        return str(error)


def _read_facts(handle: int) -> dict[str, StoredArray]:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
        raise ValueError(f"{FACTS} is none of ours")
    try:
        with open(handle, "rb", closefd=False) as file:
            return _Facts.model_validate_json(file.read()).arrays
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{FACTS} is garbled: {key}: {first['msg']}") from None


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is tried again with the next entry
        remove(path)


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
