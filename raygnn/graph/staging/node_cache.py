"""A node's cache of plain arrays, built once and mapped by every worker on the node.

An entry is a directory of arrays without headers, described by ``stage.json``. It is built in a
temporary directory and renamed when it is complete and on disk. One worker builds it, under a lock
that ends with its process, while others that need it wait. A process that maps an entry holds a
shared lock on it, which protects it from eviction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, dtype_name, stored_dtype
from raygnn.graph.outofcore.disk_graph import Appended, DiskArray
from raygnn.util.files import new_directory, publish, remove, storage_errors, sync, sync_file
from raygnn.util.locks import try_flock, try_lock

if TYPE_CHECKING:
    from torch import Tensor

    from raygnn.config.execution import StagingConfig

log = logging.getLogger("raygnn")

VERSION: Literal[2] = 2
FACTS = "stage.json"

_ENTRY = re.compile(r"[a-z]+-\d+-\d+-[0-9a-f]{32}")
_TEMPORARY = re.compile(rf"\.({_ENTRY.pattern})\.tmp-.*")
_POLL = 0.05  # seconds between checks whether another worker has finished
_GB = 10**9
# no symbolic links, which could lead anywhere, and no waiting for the writer of a FIFO
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# with MAP_NORESERVE, which the mmap module has from Python 3.13 on; the number is the same on all
# of Linux but alpha, mips, powerpc and sparc
PRIVATE = mmap.MAP_PRIVATE | 0x4000


class StoredArray(BaseModel):
    """One array of an entry: file, dtype (``"bfloat16"`` is stored as int16), shape, size of the
    file."""

    file: Annotated[str, Field(pattern=r"^[0-9]+\.bin$")]
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def stored(self) -> np.dtype[Any]:
        return stored_dtype(self.dtype)


class _Facts(BaseModel):
    version: Literal[2]
    made_from: dict[str, Any]
    arrays: dict[str, StoredArray]


class CacheEntry:
    """A complete entry, locked while this object or an array of it is alive."""

    def __init__(self, path: Path, arrays: dict[str, StoredArray], lock: int):
        self.path = path
        self.arrays = arrays
        weakref.finalize(self, os.close, lock)

    def file(self, name: str) -> Path:
        return self.path / self.arrays[name].file

    def array(self, name: str, *, at_random: bool = False) -> Array:
        """Map an array read-only; bfloat16 as int16. ``at_random`` disables read-ahead."""
        array = self._map(name, at_random)
        array.flags.writeable = False
        return array

    def tensor(self, name: str) -> Tensor:
        """Map an array as a tensor. Writing to it copies a page, and never changes the file."""
        import torch

        tensor = torch.from_numpy(self._map(name))
        return tensor.view(torch.bfloat16) if self.arrays[name].dtype == "bfloat16" else tensor

    def below(self, prefix: str) -> dict[str, str]:
        """Return rest of the name → name, of the arrays whose names begin with the prefix."""
        return {key.removeprefix(prefix): key for key in self.arrays if key.startswith(prefix)}

    def _map(self, name: str, at_random: bool = False) -> Array:
        facts = self.arrays[name]
        if not math.prod(facts.shape):
            return np.empty(facts.shape, facts.stored)
        both = mmap.PROT_READ | mmap.PROT_WRITE
        with self.file(name).open("rb") as file:
            memory = _Memory(file.fileno(), facts.bytes, flags=PRIVATE, prot=both)
        if at_random:
            memory.madvise(mmap.MADV_RANDOM)
        memory.entry = self
        return np.frombuffer(memory, facts.stored).reshape(facts.shape)


class _Memory(mmap.mmap):
    entry: CacheEntry


class Draft:
    """An entry that is being built in ``directory``."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._arrays: dict[str, Appended] = {}

    def append(self, name: str, rows: Array | Tensor) -> None:
        """Append rows to an array, whose first ones determine its dtype and shape. Raises
        ValueError if these differ."""
        if name not in self._arrays:
            self._arrays[name] = Appended(self._directory / f"{len(self._arrays)}.bin")
        array = self._arrays[name]
        known, kind = array.array, (dtype_name(rows), tuple(rows.shape[1:]))
        if not array.num:  # without rows, an array has any dtype
            array.array = DiskArray(known.path, "")
        elif len(rows) and kind != (known.dtype, known.row_shape):
            raise ValueError(f"{known.dtype} {known.row_shape}, {kind[0]} {kind[1]}")
        array.add(rows)

    def rows(self, name: str) -> int:
        """Return the number of rows of an array."""
        return self._arrays[name].num

    def finish(self, made_from: Mapping[str, Any]) -> None:
        """Write ``stage.json``, and flush all files to the disk."""
        arrays: dict[str, StoredArray] = {}
        for name, appended in self._arrays.items():
            array = appended.close()
            sync(array.path)
            shape, size = (appended.num, *array.row_shape), array.path.stat().st_size
            facts = {"file": array.path.name, "dtype": array.dtype, "shape": shape, "bytes": size}
            arrays[name] = StoredArray(**facts)
        about = _Facts(version=VERSION, made_from={**made_from}, arrays=arrays)
        with (self._directory / FACTS).open("w") as file:
            file.write(about.model_dump_json(indent=1))
            sync_file(file)

    def close(self) -> None:
        for array in self._arrays.values():
            with contextlib.suppress(OSError):  # was raised by the flush already
                array.close()


class Stage:
    """The cache of one node, in a directory for this user only. From ``max_bytes`` on (None = half
    of the disk) unused entries are evicted, least recently used first; ``wait``: seconds to wait
    for another worker to build an entry."""

    def __init__(self, root: Path, max_bytes: int | None = None, *, wait: float = 1800.0):
        self.root = root.absolute()
        self.max_bytes = max_bytes
        self.wait = wait

    @classmethod
    def from_config(cls, config: StagingConfig) -> Stage:
        return cls(config.root, None if config.max_gb is None else int(config.max_gb * _GB))

    def entry(
        self,
        kind: str,
        span: tuple[int, int],
        made_from: Mapping[str, Any],
        build: Callable[[Draft], None],
    ) -> CacheEntry:
        """Return an entry, built now by ``build`` if it does not exist or is damaged. ``span``: its
        parts, first and one past the last; ``made_from``: JSON values that determine the content.
        """
        facts = {"version": VERSION, "what": kind, "span": list(span), **made_from}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        path = self.root / f"{kind}-{span[0]}-{span[1]}-{digest[:32]}"
        larger = "set staging.path to a larger disk of this node"
        with storage_errors(self.root, DataError, larger):
            self._prepare()
            entry = _open_entry(path)
            if isinstance(entry, CacheEntry):
                return entry
            with self._lock(path.name, self.wait):
                entry = _open_entry(path)  # another was first
                if isinstance(entry, CacheEntry):
                    return entry
                if entry is not None:
                    log.warning("%s: %s; it is built again", path, entry)
                    _delete(path)
                self._sweep(path.name)
                with new_directory(path) as directory:
                    with contextlib.closing(Draft(directory)) as draft:
                        build(draft)
                        draft.finish(facts)
                    publish(directory, path)
                entry = _open_entry(path)
                if not isinstance(entry, CacheEntry):
                    message = f"was damaged right after it was written: {entry}"
                    remedy = "set staging.path to another disk"
                    raise DataError(message, where=str(path), remedy=remedy)
            self._trim()
        return entry

    def _prepare(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for status in (self.root.lstat(), self.root.stat()):
            if status.st_uid != os.getuid():
                message = f"staging.path belongs to another user (id {status.st_uid})"
                remedy = "set staging.path to a directory that is yours, or does not exist yet"
                raise DataError(message, where=str(self.root), remedy=remedy)

    @contextlib.contextmanager
    def _lock(self, name: str, wait: float) -> Iterator[None]:
        """Lock an entry, to build or remove it. Raises _Busy after ``wait`` seconds."""
        path = self.root / f".{name}.lock"
        deadline = time.monotonic() + wait
        while (handle := try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise _Busy(path, wait)
            time.sleep(_POLL)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # waiting processes create a new one
            os.close(handle)

    def _sweep(self, name: str) -> None:
        """Remove temporary directories of processes that died: of this entry, which is locked, and
        of entries that no process works on."""
        for path in self.root.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and match[1] == name:
                _delete(path)
            elif match:
                with contextlib.suppress(_Busy), self._lock(match[1], 0):
                    _delete(path)

    def _trim(self) -> None:
        """Evict unused entries, least recently used first, until the rest fits."""
        limit = disk_usage(self.root).total // 2 if self.max_bytes is None else self.max_bytes
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

    def _remove_unused(self, path: Path) -> bool:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                handle = os.open(path / FACTS, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                if not try_flock(handle):
                    return False
            _delete(path)
        return True


class _Busy(DataError):
    def __init__(self, lock: Path, wait: float):
        pid = ""
        with contextlib.suppress(OSError):
            pid = lock.read_text()
        super().__init__(
            f"process {pid or '(unknown)'} has been building this for more than {wait:g} s",
            where=str(lock.with_name(lock.name[1:].removesuffix(".lock"))),
            remedy="check that process, and terminate it if it hangs: another one then takes over",
        )


def _open_entry(path: Path) -> CacheEntry | str | None:
    if path.is_symlink():
        return "it is a symbolic link"
    if not path.is_dir():
        return None
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(path / FACTS, _OPEN)
            stack.callback(os.close, handle)
            if not try_flock(handle, shared=True) or not os.fstat(handle).st_nlink:
                return None  # it is being removed
            with open(handle, "rb", closefd=False) as file:
                arrays = _Facts.model_validate_json(file.read()).arrays
            for array in arrays.values():
                if (size := (path / array.file).lstat().st_size) != array.bytes:
                    return f"{array.file} has {size} bytes, expected {array.bytes}"
        except ValidationError:
            return f"{FACTS} is damaged"
        except OSError as error:
            return str(error)
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(path / FACTS)
        stack.pop_all()
        return CacheEntry(path, arrays, handle)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # the next entry tries again
        remove(path)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):  # another process removes it, or it is no directory
        return sum(file.lstat().st_size for file in path.iterdir() if not path.is_symlink())
    return 0


def _last_use(path: Path) -> float:
    try:
        return (path / FACTS).stat().st_mtime
    except FileNotFoundError:
        return 0.0
