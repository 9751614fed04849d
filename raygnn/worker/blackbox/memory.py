"""What a rank knows of memory: its own, its node's, and whether the kernel killed for it."""

from __future__ import annotations

import os
from pathlib import Path

from raygnn.graph.available_memory import memory


def usage() -> tuple[int, int, int]:
    """Bytes resident of this process, used of the machine or container, in all; 0 = unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    total, available = memory()
    used = 0 if total is None or available is None else total - available
    return pages * os.sysconf("SC_PAGE_SIZE"), used, total or 0


def oom_kills() -> int:
    """Processes that this machine's kernel has killed for want of memory; 0 where it hides it."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
