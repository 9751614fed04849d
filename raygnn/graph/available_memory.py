"""The memory that this process may use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_PROC, _SYS = Path("/proc"), Path("/sys")

# resource limit → the word of /proc/self/statm that counts against it, in pages
_LIMITS = {resource.RLIMIT_AS: 0, resource.RLIMIT_DATA: 5}


def memory() -> tuple[int | None, int | None]:
    """Bytes in all and available; None where the kernel does not say.

    Of the machine, or of the container if that has less; what is available is also bounded by
    the process's own limits (``ulimit -v``, ``ulimit -d``).
    """
    fields = numbers(_PROC / "meminfo")
    total, available = (
        None if size is None else size * 1024
        for size in (fields.get("MemTotal"), fields.get("MemAvailable"))
    )
    cgroup = _SYS / "fs/cgroup"
    limit, used = (first_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if total and available and limit is not None and used is not None:
        # The page cache counts as used there, but is given back when memory is short.
        taken = used - numbers(cgroup / "memory.stat").get("inactive_file", 0)
        total = min(total, limit)
        available = max(0, min(available, limit - taken))
    for kind, word in _LIMITS.items():
        soft = resource.getrlimit(kind)[0]
        if available is not None and soft != resource.RLIM_INFINITY:
            pages = number((words(_PROC / "self/statm") + ["0"] * 6)[word]) or 0
            available = max(0, min(available, soft - pages * os.sysconf("SC_PAGE_SIZE")))
    return total, available


def lines(file: Path) -> list[str]:
    """The lines of one of the kernel's files; none if it is not there."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def words(file: Path) -> list[str]:
    """The words of one of the kernel's files."""
    return " ".join(lines(file)).split()


def number(word: str) -> int | None:
    """The count that a word is; None for other words and where -1 stands for "unknown"."""
    try:
        count = int(word)
    except ValueError:
        return None
    return count if count >= 0 else None


def first_number(file: Path) -> int | None:
    """The count that a file begins with, if it does."""
    return next(map(number, words(file)), None)


def numbers(file: Path) -> dict[str, int]:
    """Name → number, of lines such as ``MemFree: 12 kB`` or ``inactive_file 12``."""
    counts = {}
    for line in lines(file):
        fields = line.replace(":", " ").split()
        count = number(fields[1]) if len(fields) > 1 else None
        if count is not None:
            counts[fields[0]] = count
    return counts
