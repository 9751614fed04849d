"""Tables whose rows are pages of files, shared memory and private memory.

A gather or an ``embedding_bag`` reads rows of one tensor by one index. A table maps the rows of a
host's workers, followed by cached and fetched rows, so that one index reaches all of them and the
workers of a host share their rows in memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raygnn.errors import DataError, TrainingError
from raygnn.graph import available_memory
from raygnn.graph.staging.node_cache import PRIVATE

PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_LARGE_PAGE = 2 << 20
_ROWS = 0.6  # share of the available memory up to which rows of files are read ahead
_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25  # since Linux 6.1; works even if shared memory gets no large pages otherwise


@dataclass(frozen=True)
class FileRows:
    """Rows of a file that a table maps.

    Attributes:
        at: position of the first row in the table.
        file: file with the elements of an array.
        first, rows: first row and number of rows, within the array.
        keep: object to keep alive until the memory is unmapped.
    """

    at: int
    file: Path
    first: int
    rows: int
    keep: object = None


def map_table(
    dtype: torch.dtype,
    tail: Sequence[int],
    total: int,
    files: Sequence[FileRows] = (),
    *,
    shared: int = 0,
    handle: int | None = None,
    large: bool = False,
) -> Tensor:
    """Map one contiguous tensor ``[total, *tail]``, whose rows take memory when they are touched.

    Rows of files are the files' pages, shared between processes; writing copies a page and leaves
    the file unchanged. Other rows below ``shared`` are memory of ``handle``, the same in all
    processes that map it in such a table. The remaining rows are private zeros. The memory is
    unmapped when the tensor's storage is freed.

    Args:
        files: one, or several at least `PAGE` rows apart, so that no page belongs to two, and with
            ``at`` equal to ``first`` modulo `PAGE`. Rows in between are undefined.
        shared: a multiple of `PAGE` beyond the last shared row.
        handle: descriptor of an anonymous file of ``shared`` rows; None = the rows are private.
        large: put private memory on large pages if the system has them. Random reads from small
            pages take up to 50 % longer, as nearly every row misses the TLB.

    Raises:
        DataError: a file has become shorter, or cannot be opened.
        TrainingError: the system grants no address space.
    """
    width = math.prod(tail) * dtype.itemsize
    if width * total == 0:
        return torch.empty((total, *tail), dtype=dtype)
    files = [one for one in files if one.rows]
    # bytes before the table, so that its only file begins within a page as it does on disk
    lead = (files[0].first - files[0].at) * width % PAGE if files else 0
    size = lead + total * width
    base, memory = _reserve(size, [one.keep for one in files])
    common = shared * width if handle is not None else 0
    if handle is not None and common:
        _mmap(base, common, mmap.MAP_SHARED | _MAP_FIXED, handle)
    if (rest := _whole_pages(size) - common) > 0:
        _mmap(base + common, rest, PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED)
        if large:
            _libc.madvise(base + common, rest, mmap.MADV_HUGEPAGE)  # may fail: there are none
    scarce = bool(files) and outgrows(sum(one.rows for one in files) * width, _ROWS)
    for one in files:
        begin, start = one.first * width, lead + one.at * width
        skip = start % PAGE  # a mapping begins at a page
        with _opened(one, begin + one.rows * width) as opened:
            length = _whole_pages(skip + one.rows * width)
            _mmap(base + start - skip, length, PRIVATE | _MAP_FIXED, opened, begin - skip)
            if scarce:
                _libc.madvise(base + start - skip, length, mmap.MADV_RANDOM)
    return torch.frombuffer(memory, dtype=dtype, offset=lead).view(total, *tail)


def outgrows(size: int, share: float) -> bool:
    """Return True if ``size`` bytes of a file exceed a share of the available memory. Pages that
    the system reads ahead around random reads would then evict needed ones."""
    return size > share * available_memory.memory()[1]


def use_large_pages(rows: Tensor) -> bool:
    """Move written rows of shared memory to large pages, as far as they fill them. Return True if
    the system does so (since Linux 6.1)."""
    start = _whole_pages(rows.data_ptr())
    length = (rows.data_ptr() + rows.nbytes) // PAGE * PAGE - start
    return length <= 0 or _libc.madvise(start, length, _MADV_COLLAPSE) == 0


@cache
def large_pages(shared: bool) -> bool:
    """Return True if the system provides large pages, for private or ``shared`` memory."""
    try:
        if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            return False
    except OSError:
        return False
    if not shared:
        return True
    handle = os.memfd_create("raygnn")
    try:
        os.ftruncate(handle, _LARGE_PAGE)
        page = map_table(torch.uint8, (), _LARGE_PAGE, shared=_LARGE_PAGE, handle=handle)
    finally:
        os.close(handle)
    return use_large_pages(page.fill_(1))


@contextmanager
def _opened(rows: FileRows, size: int) -> Iterator[int]:
    try:
        file = rows.file.open("rb")
    except OSError as error:
        raise _damaged_file(rows, f"cannot be read: {error.strerror or error}") from error
    with file:
        if os.fstat(file.fileno()).st_size < size:
            raise _damaged_file(rows, "is cut short")
        yield file.fileno()


def _damaged_file(rows: FileRows, what: str) -> DataError:
    return DataError(what, where=str(rows.file), remedy="delete it: it is built again")


def _reserve(size: int, keep: object) -> tuple[int, Any]:
    """Reserve addresses from a large page on: the first, and an object that holds them."""
    length = _whole_pages(size) + _LARGE_PAGE
    start = _mmap(None, length, PRIVATE | mmap.MAP_ANONYMOUS, protection=_PROT_NONE)
    base = -(-start // _LARGE_PAGE) * _LARGE_PAGE
    # a new class, because plain arrays of ctypes do not support weak references
    memory = type("Mapped", (ctypes.c_char * size,), {}).from_address(base)  # type: ignore[attr-defined]
    memory.keep = keep
    finalizer = weakref.finalize(memory, _libc.munmap, start, length)
    finalizer.atexit = False  # other threads may still read; the end of the process unmaps it, too
    return base, memory


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mmap(
    address: int | None,
    size: int,
    flags: int,
    handle: int = -1,
    offset: int = 0,
    protection: int = _READ_WRITE,
) -> int:
    place = _libc.mmap(address, size, protection, flags, handle, offset)
    if place == _FAILED:
        why = os.strerror(ctypes.get_errno())
        remedy = "raise the limit on address space (ulimit -v), or set vm.overcommit_memory to 0"
        raise TrainingError(
            f"{size:,} bytes of address space are not available: {why}", remedy=remedy
        )
    return int(place)
