"""Entries of a node's cache: arrays in files, and what is said about them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import re
import stat
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from raygnn.graph.arrays import Array, element_bytes
from raygnn.util.files import sync_file
from raygnn.util.locks import try_flock

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
FACTS = "stage.json"

_FILE = re.compile(r"\d+\.npy")
_LARGEST = 64 * 2**20  # bytes of what is said about arrays
# nothing but a file of the entry's own: a link could lead anywhere, a FIFO is waited for
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NORESERVE = 0x4000  # MAP_NORESERVE; the mmap module names it in new Pythons only


@dataclass(frozen=True)
class StoredArray:
    """One array of an entry: its file, dtype (also ``"bfloat16"``, stored as int16), shape, and
    where in the file its elements begin."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype("int16" if self.dtype == "bfloat16" else self.dtype)


class Entry:
    """A whole entry, kept while this object or an array of it is alive."""

    def __init__(self, path: Path, arrays: dict[str, StoredArray], lock: int):
        self.path = path
        self.arrays = arrays
        weakref.finalize(self, os.close, lock)

    def file(self, name: str) -> Path:
        return self.path / self.arrays[name].file

    def array(self, name: str) -> Array:
        """The elements, mapped; read-only. bfloat16 comes as int16."""
        array = self._map(name)
        array.flags.writeable = False
        return array

    def tensor(self, name: str) -> Tensor:
        """The same as a tensor. What is written to it copies a page, and never reaches the file."""
        import torch

        tensor = torch.from_numpy(self._map(name))
        return tensor.view(torch.bfloat16) if self.arrays[name].dtype == "bfloat16" else tensor

    def _map(self, name: str) -> Array:
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
        memory.entry = self
        return np.frombuffer(memory, facts.stored, offset=facts.offset).reshape(facts.shape)


class _Memory(mmap.mmap):
    entry: Entry


class Draft:
    """An entry that is being made in ``directory``."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._arrays: dict[str, StoredArray] = {}
        self._writers: list[ArrayWriter] = []

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *exc: object) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # said when it was flushed
                writer.stream.close()

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> ArrayWriter:
        """A file to which exactly the elements of ``shape`` are to be appended, row after row."""
        file = f"{len(self._arrays)}.npy"
        stored = StoredArray(file, dtype, shape, 0, 0).stored
        stream = (self._directory / file).open("wb")
        writer = ArrayWriter(stream, stored)
        self._writers.append(writer)
        header = {"descr": stored.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        offset = stream.tell()
        size = offset + math.prod(shape) * stored.itemsize
        self._arrays[name] = StoredArray(file, dtype, shape, offset, size)
        return writer

    def finish(self, made_from: Mapping[str, Any]) -> None:
        """Write what there is to say about the arrays, and put all of it on the disk."""
        for writer, (name, facts) in zip(self._writers, self._arrays.items()):
            sync_file(writer.stream)
            size = writer.stream.tell()
            assert size == facts.bytes, f"{name} got {size} of {facts.bytes} bytes"
        arrays = {name: asdict(facts) for name, facts in self._arrays.items()}
        text = json.dumps({"version": VERSION, "made_from": made_from, "arrays": arrays}, indent=1)
        with (self._directory / FACTS).open("wb") as file:
            file.write(text.encode())
            sync_file(file)


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


def open_entry(path: Path) -> Entry | str | None:
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
        for facts in arrays.values():
            if not _FILE.fullmatch(facts.file):
                raise ValueError(f"{facts.file!r} is no file of ours")
            found = (path / facts.file).lstat()
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{facts.file} is no file")
            size = found.st_size
            if size != facts.bytes:
                raise ValueError(f"{facts.file} has {size} bytes, expected {facts.bytes}")
        with contextlib.suppress(OSError):  # a cache that is read only
            os.utime(path / FACTS)
        return Entry(path, arrays, handle)
    except BlockingIOError:  # it is being removed
        os.close(handle)
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        os.close(handle)
        return str(error) or f"{FACTS} is garbled"


def _read_facts(handle: int) -> dict[str, StoredArray]:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        raise ValueError(f"{FACTS} is none of ours")
    with open(handle, encoding="utf-8", closefd=False) as file:
        values = json.load(file)
    if values["version"] != VERSION:
        raise ValueError(f"{FACTS} is of version {values['version']}")
    return {
        name: StoredArray(**{**facts, "shape": tuple(facts["shape"])})
        for name, facts in values["arrays"].items()
    }
