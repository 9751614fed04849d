"""Memory that this process may use."""

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

# resource limit → field of psutil's memory_info that counts against it
_LIMITS = {resource.RLIMIT_AS: "vms", resource.RLIMIT_DATA: "data"}


def memory() -> tuple[int, int]:
    """Return total and available bytes of the machine, or of this process's container or control
    group if that has less. The available bytes respect ``ulimit -v`` and ``ulimit -d``, too."""
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
    """Yield limit and use, in bytes, of this process's control group (version 2 or 1) and of its
    visible ancestors."""
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
                # The kernel counts the page cache as used, but frees it when memory is short.
                facts = dict(zip(stat := words(group / "memory.stat"), stat[1:], strict=False))
                cached = (facts.get(f"{counted}{kind}_file", "") for kind in ("inactive", "active"))
                yield limit, max(used - sum(number(count) or 0 for count in cached), 0)
            if group == place:
                break


def check_available(config: Config, work: str, need: int) -> None:
    """Raise PreflightError if ``work`` needs more memory than is available to this process: the
    kernel would kill it, and perhaps other programs."""
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
    """Return the lines of a file of the kernel; none if it does not exist."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def words(file: Path) -> list[str]:
    return " ".join(lines(file)).split()


def number(word: str) -> int | None:
    """Parse a count; None for other words, and for -1, which means "unknown"."""
    try:
        count = int(word)
    except ValueError:
        return None
    return count if count >= 0 else None
