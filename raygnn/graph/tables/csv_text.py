"""CSV read by Python's own reader: the line of names, and what is wrong where pyarrow gave up.

pyarrow is fast and says little of where it failed; this is slow, and only used then.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from raygnn.errors import DataError

FAILURES = (OSError, EOFError, zlib.error)  # of a file that is not what it says
_LONGEST = 1 << 20  # bytes of the line of names


class Counting(io.RawIOBase):
    """A stream whose quotes are counted as they pass: an odd number is one that nobody closed."""

    def __init__(self, stream: BinaryIO, quotes: list[int]):
        self._stream, self._quotes = stream, quotes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        found = self._stream.read(size)
        self._quotes[0] += found.count(b'"')
        return found


def unpacked(file: Path) -> BinaryIO:
    """The text of a file, which may be compressed."""
    return cast(BinaryIO, gzip.open(file) if file.suffix == ".gz" else file.open("rb"))


def header(file: Path, separator: str) -> list[str]:
    """The names of the columns.

    Raises:
        DataError: there is no line with them.
    """
    try:
        with unpacked(file) as stream:
            start = stream.read(_LONGEST)
        lines = csv.reader(io.StringIO(start.decode("utf-8-sig", "replace")), delimiter=separator)
        names = next((row for row in lines if row), [])
    except (csv.Error, *FAILURES) as error:
        raise _wrong(file, None, f"the line of names cannot be read: {error}") from None
    if not names:
        raise _wrong(file, None, "there is no line with the names of the columns")
    return names


def first_rows(file: Path, separator: str) -> tuple[list[list[str]], int]:
    """The rows in the first megabyte of a file, as text, and of how many bytes they are; none
    where they cannot be read, which is told when all are."""
    try:
        with unpacked(file) as stream:
            start = stream.read(_LONGEST)
        text = io.StringIO(start.decode("utf-8-sig", "replace"), newline="")
        return list(csv.reader(text, delimiter=separator)), len(start)
    except (csv.Error, *FAILURES):
        return [], 0


def line_of(file: Path, separator: str, number: int, *, named: bool) -> int | None:
    """The line, from 1, on which a row ends, from 1; None where it cannot be found.

    Args:
        named: whether the first line holds the names of the columns.
    """
    try:
        with unpacked(file) as stream:
            rows = _rows(stream, separator, quoted=named)
            for at, (_, line) in enumerate(rows, start=0 if named else 1):
                if at == number:
                    return line
    except (csv.Error, *FAILURES):
        pass
    return None


def explain(file: Path, separator: str, quote: str | bool, columns: int) -> None:
    """Find the first thing that is wrong with a file; returns if there is none.

    Raises:
        DataError: it is truncated, not UTF-8, has a quote that is not closed, or a row of another
            number of columns.
    """
    line = 1
    try:
        with unpacked(file) as stream:
            named = bool(quote)
            rows = _rows(stream, separator, quoted=named)
            for at, (row, line) in enumerate(rows, start=0 if named else 1):
                place = f"row {at} (line {line})" if at else "line 1"
                if not _is_utf8(row):
                    raise _wrong(file, place, "there are bytes that are not UTF-8")
                if len(row) != columns:
                    what = f"there are {len(row)} columns, expected {columns}: {_cut(row)}"
                    raise _wrong(file, place, what)
    except csv.Error as error:
        text = str(error)
        if "unexpected end" in text:
            text = "a quote is not closed"
        elif "field limit" in text:
            text = f"a value has more than {csv.field_size_limit():,} characters: an open quote?"
        raise _wrong(file, f"after line {line}", text) from None
    except FAILURES as error:
        raise _wrong(file, f"after line {line}", f"it cannot be unpacked: {error}") from None


def _rows(stream: BinaryIO, separator: str, *, quoted: bool) -> Iterator[tuple[list[str], int]]:
    """Rows that are not empty, and the line on which each ends. Bytes that are not UTF-8 are lone
    surrogates."""
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    rows = csv.reader(
        iter(lambda: text.readline(_LONGEST), ""),  # a file may have but one line, of gigabytes
        delimiter=separator,
        strict=True,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
    )
    for row in rows:
        if row:
            yield row, rows.line_num


def _is_utf8(row: list[str]) -> bool:
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return False
    return True


def _cut(row: list[str]) -> str:
    text = repr(",".join(row))
    return text if len(text) <= 60 else text[:60] + "…"


def _wrong(file: Path, place: str | None, what: str) -> DataError:
    return DataError(
        what,
        where=f"{file}, {place}" if place else str(file),
        remedy="correct the file, or write it again as UTF-8 with one line of names",
    )
