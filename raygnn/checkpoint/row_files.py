"""Files of learned rows: plain arrays, one after the other, of some nodes of one type.

First the ids of the nodes in the user's graph, int64 ``[n]``, then each array, float32 ``[n,
dim]``, all little-endian. What is in a file, its size and its SHA-256 is said by whatever it
belongs to: the manifest of a checkpoint, or ``selected.json``. Read and written in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.checkpoint.writing import Hashed, nothing
from raygnn.util.files import open_regular, sync

_NAME = re.compile(r"rows-\d{1,9}-\d{1,9}\.bin")
_PIECE = 1 << 26  # bytes that are read or written at once
_LARGEST = 1 << 62


@dataclass(frozen=True)
class RowFile:
    """One file.

    Attributes:
        name: within its directory.
        ntype: of the nodes.
        rows: how many there are.
        arrays: names of the arrays, in order: ``row``, and what belongs to it.
        bytes, sha256: of the file.
    """

    name: str
    ntype: str
    rows: int
    arrays: tuple[str, ...]
    bytes: int
    sha256: str


@dataclass(frozen=True)
class RowFiles:
    """All files of one state of the rows, of all ranks.

    Attributes:
        dim: width of a row.
        steps: that the optimizer has made.
    """

    dim: int
    steps: int
    files: tuple[RowFile, ...]

    @classmethod
    def parse(cls, value: Any) -> RowFiles:
        """From what `to_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that.
        """
        files = tuple(
            RowFile(
                name=str(each["name"]),
                ntype=str(each["ntype"]),
                rows=_count(each["rows"]),
                arrays=tuple(map(str, each["arrays"])),
                bytes=_count(each["bytes"]),
                sha256=str(each["sha256"]),
            )
            for each in value["files"]
        )
        found = cls(_count(value["dim"]), _count(value["steps"]), files)
        for file in files:
            whole = file.rows * (8 + 4 * found.dim * len(file.arrays))
            if not _NAME.fullmatch(file.name) or file.bytes != whole:
                raise ValueError(f"no file of rows: {file.name}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        files = [{**asdict(file), "arrays": list(file.arrays)} for file in self.files]
        return {"dim": self.dim, "steps": self.steps, "files": files}


def name_of(rank: int, number: int) -> str:
    """Of the file that a rank writes of its ``number``-th node type."""
    return f"rows-{rank}-{number}.bin"


def write_rows(
    path: Path,
    ntype: str,
    ids: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    moved: Callable[[], None] = nothing,
) -> RowFile:
    """Write a file, durably.

    Args:
        ids: ``[n]``.
        arrays: float32 ``[n, dim]`` each.
        moved: called whenever the storage has taken something.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        hashed = Hashed(file, moved)
        for each, dtype in ((ids, "<i8"), *((array, "<f4") for array in arrays.values())):
            for start, stop in _pieces(len(each), np.dtype(dtype).itemsize * each[:1].size):
                hashed.write(np.ascontiguousarray(each[start:stop], dtype).data)
                if hashed.error is not None:
                    raise hashed.error
    sync(path)
    sha = hashed.sha.hexdigest()
    return RowFile(path.name, ntype, len(ids), tuple(arrays), hashed.bytes, sha)


def read_rows(
    path: Path, file: RowFile, dim: int, wanted: Sequence[str] = ()
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The ids and the arrays of a file, in pieces.

    Args:
        wanted: names of arrays; empty = all.

    Yields:
        ids int64 ``[n]``, and name → float32 ``[n, dim]``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is shorter than it was.
    """
    with open_regular(path) as content:
        for start, stop in _pieces(file.rows, 4 * dim):
            ids = _read(content, start * 8, stop - start, "<i8")
            arrays = {}
            for number, name in enumerate(file.arrays):
                if not wanted or name in wanted:
                    at = file.rows * (8 + 4 * dim * number) + 4 * dim * start
                    arrays[name] = _read(content, at, (stop - start) * dim, "<f4").reshape(-1, dim)
            yield ids, arrays


def _read(content: Any, at: int, count: int, dtype: str) -> np.ndarray:
    content.seek(at)
    data = content.read(count * np.dtype(dtype).itemsize)
    return np.frombuffer(data, dtype, count)


def _pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    size = max(1, _PIECE // max(1, row_bytes))
    for start in range(0, rows, size):
        yield start, min(rows, start + size)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError(f"no count: {value!r}")
    return value
