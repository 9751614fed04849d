"""Tensors whose first rows are a file's pages and whose last rows are memory.

A gather or an ``embedding_bag`` takes its rows from one tensor by one index. With the owned rows
mapped and the rows of other workers right behind them, all are in reach of it, and what is owned
is in memory once, in the page cache, for all workers of a node.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError, TrainingError
from raygnn.graph.staging.node_cache import StoredArray

_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000  # as on all of Linux but alpha, mips, powerpc and sparc
_LARGE_PAGE = 2 << 20
_CHUNK = 16 << 20
_FAILED = ctypes.c_void_p(-1).value


def map_rows(
    file: Path,
    array: StoredArray,
    first: int,
    rows: int,
    spare: int,
    *,
    keep: object = None,
    resident: bool = False,
) -> Tensor:
    """One contiguous tensor ``[rows + spare, …]``: rows of a file, then zeros to be filled.

    The rows are the file's pages, shared with whoever maps it, until they are written to: that
    copies a page and leaves the file as it is. The spare rows take memory when they are touched,
    and the page that both share is a copy. All is unmapped when the tensor's storage is freed.

    Args:
        file: of an array of a node's cache, which was found whole.
        array: what is in it, of shape ``[N, …]``.
        first, rows: which of its rows; within ``0 … N``.
        spare: how many rows to append.
        keep: held until the memory is unmapped.
        resident: copy the rows into memory of this process, in large pages where the system has
            them. Reading rows at random from a file's small pages takes about half as long
            again, as nearly every row misses the processor's table of pages.

    Raises:
        DataError: the file is shorter than it was, or cannot be opened.
        TrainingError: the system grants no address space.
    """
    num, *tail = array.shape
    if min(first, rows, spare) < 0 or first + rows > num:
        raise ValueError(f"rows {first} … {first + rows} of {num}, and {spare} more")
    width, shape = math.prod(tail) * array.stored.itemsize, (rows + spare, *tail)
    dtype: torch.dtype = getattr(torch, array.dtype)
    if width * (rows + spare) == 0:
        return torch.empty(shape, dtype=dtype)
    begin, size = array.offset + first * width, rows * width
    total = size + spare * width
    try:
        if begin + size > file.stat().st_size:
            raise _not_whole(file, "is cut short")
        if resident:
            memory = _copy(file, begin, size, total)
        else:
            memory = _map(file, begin, size, total, keep)
    except OSError as error:
        raise _not_whole(file, f"cannot be read: {error.strerror or error}") from error
    return torch.from_numpy(np.frombuffer(memory, array.stored).reshape(shape)).view(dtype)


def _map(file: Path, begin: int, size: int, total: int, keep: object) -> Any:
    """``total`` bytes: ``size`` of the file from ``begin`` on, then zeros."""
    page = mmap.PAGESIZE
    lead = begin % page if size else 0  # a mapping begins with a page
    length = _whole_pages(lead + total)
    of_file = _whole_pages(lead + size) if size else 0
    private = mmap.MAP_PRIVATE | _MAP_NORESERVE
    base = _mmap(None, length, _PROT_NONE, private | mmap.MAP_ANONYMOUS, -1, 0, file)
    try:
        if of_file:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _mmap(base, of_file, _READ_WRITE, private | _MAP_FIXED, handle, begin - lead, file)
            finally:
                os.close(handle)
        if length > of_file:
            fixed = private | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _mmap(base + of_file, length - of_file, _READ_WRITE, fixed, -1, 0, file)
        if total > size and of_file > lead + size:
            # what follows in the file: not ours to show
            ctypes.memset(base + lead + size, 0, min(of_file, lead + total) - (lead + size))
    except BaseException:
        _libc.munmap(base, length)
        raise
    # a class of its own, as a plain array of ctypes takes no weak references
    memory = type("Mapped", (ctypes.c_char * total,), {}).from_address(base + lead)  # type: ignore[attr-defined]
    finalizer = weakref.finalize(memory, _unmap, base, length, keep)
    finalizer.atexit = False  # other threads may still read; the process's end unmaps it, too
    return memory


def _unmap(base: int, length: int, keep: object) -> None:
    _libc.munmap(base, length)


def _copy(file: Path, begin: int, size: int, total: int) -> Any:
    """As `_map`, with the file's bytes copied into large pages."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, _whole_pages(total) + _LARGE_PAGE, flags=flags)
    except OSError as error:
        raise _no_address_space(file, total, error.errno) from error
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % _LARGE_PAGE
    with contextlib.suppress(OSError):  # the system has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, _whole_pages(total))
    rows = everything[start : start + total]
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        at = 0
        while at < size:
            read = stream.readinto(rows[at : min(size, at + _CHUNK)].data)
            if not read:
                raise _not_whole(file, "is cut short")
            at += read
    return rows


def _not_whole(file: Path, what: str) -> DataError:
    return DataError(what, where=str(file), remedy="delete it: it is made again")


def large_pages() -> bool:
    """Whether the system gives memory in large pages to who asks for it."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(
    address: int | None,
    size: int,
    protection: int,
    flags: int,
    handle: int,
    offset: int,
    file: Path,
) -> int:
    place = _libc.mmap(address, size, protection, flags, handle, offset)
    if place == _FAILED:
        raise _no_address_space(file, size, ctypes.get_errno())
    return int(place)


def _no_address_space(file: Path, size: int, code: int | None) -> TrainingError:
    return TrainingError(
        f"{size:,} bytes of address space cannot be had: {os.strerror(code or 0)}",
        where=str(file),
        remedy="raise the limit on address space (ulimit -v), or set vm.overcommit_memory to 0",
    )
