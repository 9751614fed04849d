"""The memory that this process may use."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from raygnn.config.places import size
from raygnn.errors import PreflightError

if TYPE_CHECKING:
    from raygnn.config.schema import Config

_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc")

# resource limit → what of psutil's memory_info counts against it
_LIMITS = {resource.RLIMIT_AS: "vms", resource.RLIMIT_DATA: "data"}


def memory() -> tuple[int, int]:
    """Bytes in all and available.

    Of the machine, or of the container or control group that this process is in if that has less;
    what is available is also bounded by the process's own limits (``ulimit -v``, ``ulimit -d``).
    """
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _groups():
        total = min(total, limit)
        available = max(0, min(available, limit - used))
    for kind, field in _LIMITS.items():
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            held = getattr(psutil.Process().memory_info(), field)
            available = max(0, min(available, soft - held))
    return total, available


def _groups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of the control groups that this process is in, of version 2 or 1:
    its own and those around it, as far as they are seen from here."""
    entries = (e for e in (s.split(":", 2) for s in lines(_PROC / "self/cgroup")) if len(e) == 3)
    paths = {name: path for _, names, path in entries for name in names.split(",")}
    for controller, place, limit_file, use_file, counted in (
        ("", _CGROUP, "memory.max", "memory.current", ""),
        ("memory", _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        own = place / paths.get(controller, "/").lstrip("/")
        for group in (own, *own.parents):
            files = (group / limit_file, group / use_file)
            limit, used = (next(map(number, words(file)), None) for file in files)
            if limit is not None and used is not None:
                # The page cache counts as used there, but is given back when memory is short.
                facts = dict(zip(stat := words(group / "memory.stat"), stat[1:], strict=False))
                cached = (facts.get(f"{counted}{kind}_file", "") for kind in ("inactive", "active"))
                yield limit, max(used - sum(number(count) or 0 for count in cached), 0)
            if group == place:
                break


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
