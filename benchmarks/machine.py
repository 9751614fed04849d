"""Where and when a benchmark ran: what every benchmark prints beside its figures."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks use helpers of tests

PACKAGES = ("torch", "dgl", "ray", "lightning")


def setting() -> str:
    """Processor, cores, load, versions and date as markdown lines."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return "\n".join(
        (
            f"- machine: {_processor()}, {len(os.sched_getaffinity(0))} cores; {load()}",
            f"- versions: Python {platform.python_version()}, {versions}",
            f"- date: {date.today().isoformat()}",
        )
    )


def load() -> str:
    """What else kept the machine busy: processes that wanted to run, over the last minute."""
    return f"load {os.getloadavg()[0]:.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table; the first column is text, the others are set right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
