"""``logs/rank-<r>.log`` of a run, for reading while it trains, or later."""

from __future__ import annotations

import re
from pathlib import Path

from raygnn.errors import InputError
from raygnn.runs.store import LOGS
from raygnn.util.files import open_regular

_RANK = re.compile(r"rank-(\d{1,6})\.log")


class RankLogs:
    """What the ranks of a run log.

    Args:
        run: its directory.
        rank: the only one to be read.

    Raises:
        InputError: there is no log, or none of that rank.
    """

    def __init__(self, run: Path, rank: int | None = None):
        self._logs = run / LOGS
        self._rank = rank
        self._offsets: dict[int, int] = {}
        if not self._files():
            ranks = ", ".join(map(str, self._ranks())) or "none"
            raise InputError(
                "no rank has logged yet" if rank is None else f"rank {rank} has logged nothing",
                where=str(self._logs),
                remedy=f"ranks with a log: {ranks}",
            )

    def texts(self) -> dict[int, str]:
        """Rank → all that it has logged."""
        return {rank: self._read(path, 0).decode(errors="replace") for rank, path in self._files()}

    def news(self) -> list[str]:
        """Lines that were completed since the last call; of several ranks, each names its own."""
        lines = []
        for rank, path in self._files():
            content = self._read(path, self._offsets.get(rank, 0))
            content = content[: content.rfind(b"\n") + 1]
            self._offsets[rank] = self._offsets.get(rank, 0) + len(content)
            name = f"rank {rank}: " if self._rank is None else ""
            lines += [name + line for line in content.decode(errors="replace").splitlines()]
        return lines

    def _ranks(self) -> list[int]:
        matches = [_RANK.fullmatch(path.name) for path in self._logs.glob("rank-*.log")]
        return sorted(int(match[1]) for match in matches if match)

    def _files(self) -> list[tuple[int, Path]]:
        ranks = [rank for rank in self._ranks() if self._rank in (None, rank)]
        return [(rank, self._logs / f"rank-{rank}.log") for rank in ranks]

    def _read(self, path: Path, offset: int) -> bytes:
        try:
            with open_regular(path) as file:
                file.seek(offset)
                return bytes(file.read())
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
