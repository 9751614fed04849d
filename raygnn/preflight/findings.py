"""What a check says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warn", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing that stops the job (``error``), may hurt it (``warn``) or is good to know.

    Attributes:
        check: the name of the check.
        what: one sentence, with the values in it.
        remedy: one sentence, what to do.
        nodes: the nodes concerned; empty when it is about the job as a whole.
        values: the values that were compared, for programs.
    """

    check: str
    severity: Severity
    what: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = (rf"(\b(on|from|to)|,) {re.escape(node)}(?![\w.-])" for node in self.nodes)
        if all(re.search(pattern, self.what) for pattern in named):
            return self.what  # which names them already, if there are any
        return f"{self.what} (on {', '.join(self.nodes)})"


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; else as they are."""
    order = {"error": 0, "warn": 1, "info": 2}
    return tuple(sorted(findings, key=lambda finding: order[finding.severity]))


def some(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def counted(findings: Sequence[Finding]) -> str:
    """How many there are of each kind, errors first: ``1 error, 2 warnings``; empty for none."""
    counts = Counter[str](finding.severity for finding in findings)
    nouns = {"error": "error", "warn": "warning", "info": "note"}
    return ", ".join(some(counts[s], noun) for s, noun in nouns.items() if counts[s])
