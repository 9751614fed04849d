"""The memory that this process may use."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from raygnn.config.places import size
from raygnn.errors import PreflightError

if TYPE_CHECKING:
    from raygnn.config.schema import Config

_CGROUP = Path("/sys/fs/cgroup")

# resource limit → what of psutil's memory_info counts against it
_LIMITS = {resource.RLIMIT_AS: "vms", resource.RLIMIT_DATA: "data"}


def memory() -> tuple[int, int]:
    """Bytes in all and available.

    Of the machine, or of the container if that has less; what is available is also bounded by
    the process's own limits (``ulimit -v``, ``ulimit -d``).
    """
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    files = (_CGROUP / "memory.max", _CGROUP / "memory.current")
    limit, used = (next(map(number, words(file)), None) for file in files)
    if limit is not None and used is not None:
        # The page cache counts as used there, but is given back when memory is short.
        stat = words(_CGROUP / "memory.stat")
        cached = stat[stat.index("inactive_file") + 1 :] if "inactive_file" in stat else []
        used -= (number(cached[0]) if cached else 0) or 0
        total = min(total, limit)
        available = max(0, min(available, limit - used))
    for kind, field in _LIMITS.items():
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            held = getattr(psutil.Process().memory_info(), field)
            available = max(0, min(available, soft - held))
    return total, available


def check_available(config: Config, work: str, need: int) -> None:
    """Refuse to begin what the kernel would end, and other programs of this machine with it.

    Raises:
        PreflightError: more memory is needed than is available to this process.
    """
    _, available = memory()
    if need <= available or "memory_fits" in config.cluster.allow:
        return
    smaller = ""
    if config.graph is not None and config.graph.format == "planted":
        smaller = "lower graph.nodes, graph.degree or graph.features, or "
    raise PreflightError(
        f"{work} takes about {size(need)} of memory, and {size(available)} are available here "
        "[memory_fits]",
        where=str(config.file) if config.file else None,
        remedy=f"{smaller}run raygnn partition on a machine with more memory, with partition.path "
        "on a file system that both see; cluster.allow: [memory_fits] tries it all the same",
    )


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
