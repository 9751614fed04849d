"""What Ray says when its memory monitor kills a process."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NODE = re.compile(
    r"Memory on the node \(IP: ([^,()]+).{0,200}? was ([\d.]+ ?\w+) used / ([\d.]+ ?\w+)"
)
_LIMIT = re.compile(r"exceeded (?:the )?threshold of \d+B \(([\d.]+%)")
_KILLED = re.compile(
    r"Selected to kill: \(.{0,2000}?task name=([^,\s]+),.{0,2000}?pid=(\d{1,9}), "
    r"actual memory used=([\d.]+GB)",
    re.S,
)
_USERS = re.compile(r"^(\d{1,9})\t([\d.]+)\t(.{0,60})", re.M)
_MOST = 3  # of the processes that use most memory


@dataclass(frozen=True)
class MemoryKill:
    """A process that Ray killed because its node was short of memory.

    Attributes:
        host: the node's address.
        used, total: of the node's memory, as Ray words it: ``"2.71GB"``.
        limit: share of it from which on Ray kills.
        process: the task's or actor's name; ``pid`` and ``taken`` are of the same.
        users: the processes that used most, as Ray lists them.
    """

    host: str
    used: str
    total: str
    limit: str = ""
    process: str = ""
    pid: int = 0
    taken: str = ""
    users: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> MemoryKill | None:
        """From the text of Ray's OutOfMemoryError; None if it is another error's."""
        node = _NODE.search(text)
        if node is None:
            return None
        limit, killed = _LIMIT.search(text), _KILLED.search(text)
        users = tuple(f"{m[2]} GB by {m[3]} (pid {m[1]})" for m in _USERS.finditer(text))
        return cls(
            node[1],
            node[2],
            node[3],
            limit[1] if limit else "",
            killed[1].partition(".")[0] if killed else "",
            int(killed[2]) if killed else 0,
            killed[3] if killed else "",
            users[:_MOST],
        )

    @property
    def why(self) -> str:
        """``its node 10.0.0.7 had 22.9GB of 23.5GB of memory in use, more than …``"""
        said = f"its node {self.host} had {self.used} of {self.total} of memory in use"
        said += f", more than the {self.limit} that Ray allows" if self.limit else ""
        return said + (f"; it held {self.taken} itself" if self.taken else "")
