"""Table files, read a chunk at a time, with a place in a file for every row.

Columns of CSV arrive as text, those of Parquet as they are stored, integers as int64 and text as
large_string. What a value means is decided later, where a wrong one can be named.
"""

from __future__ import annotations

import bisect
import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from raygnn.errors import DataError
from raygnn.graph.sources.files import check_file, out_of_memory, unpacked_size
from raygnn.graph.tables import csv_text

ROWS = 1 << 16  # of a chunk, at least; fewer where rows are wide or the table ends
_BYTES = 1 << 24  # of a batch of Parquet, about
_BLOCK = 1 << 22  # bytes of a block of CSV
_FILES = 100_000
_VALUE = 8  # bytes of a value as an array, at most, unless its text is longer
_TEXT = (".csv", ".tsv", ".txt")
_PARQUET = (".parquet", ".pq")


def resolve(base: Path, patterns: str | Sequence[str]) -> list[Path]:
    """The files that names and patterns mean, relative to ``base``; those of a pattern sorted.

    Raises:
        DataError: a pattern that matches nothing, or a file of no known kind.
    """
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        file = base / pattern
        if file.exists() or not glob.has_magic(pattern):
            found.append(file)
            continue
        matches = sorted(base / match for match in glob.iglob(pattern, root_dir=base))
        if not matches:
            raise DataError(
                f"no file matches {pattern!r}",
                where=str(base),
                remedy="correct files: patterns are relative to the file that describes the tables",
            )
        found += matches
    if len(found) > _FILES:
        raise DataError(
            f"{len(found)} files are more than {_FILES}", where=str(base), remedy="join some"
        )
    for file in found:
        if file.suffix not in _PARQUET and not _is_text(file):
            raise DataError(
                f"tables end in {', '.join(_TEXT)} (or with .gz) or {', '.join(_PARQUET)}",
                where=str(file),
                remedy="rename the file, or convert it",
            )
    return found


@dataclass(frozen=True)
class Chunk:
    """Some rows of a table.

    Attributes:
        columns: name → array.
        first: number of the first row, over all files, from 0.
        csv: whether the rows are of CSV, whose values are all text.
    """

    reader: Reader
    columns: dict[str, pa.Array]
    first: int
    csv: bool

    @property
    def num(self) -> int:
        return len(next(iter(self.columns.values())))

    def error(self, row: int, column: str, what: str, remedy: str) -> DataError:
        """What is wrong with a row of the chunk."""
        return self.reader.error(self.first + row, column, what, remedy)

    def text(self, column: str) -> bool:
        """Whether the column is text."""
        return bool(pa.types.is_large_string(self.columns[column].type))


class Reader:
    """The files of one table, as one.

    Args:
        files: CSV and Parquet.
        columns: those to read.
        delimiter: of CSV; None = by the name of the file.
        header: names of all columns of CSV files that have no line with them.
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str],
        delimiter: str | None = None,
        header: Sequence[str] | None = None,
    ):
        self.files = files
        self.columns = list(dict.fromkeys(columns))
        self._delimiter = delimiter
        self._header = header
        self._starts: list[int] = []  # number of the first row of each file that was opened
        self.num = 0

    def chunks(self, rows: Callable[[], int] = lambda: ROWS) -> Iterator[Chunk]:
        """All rows, in the order of the files.

        Args:
            rows: says how many a chunk should have at least.

        Raises:
            DataError: a file is missing, damaged, of another kind, or lacks a column.
        """
        held: list[pa.RecordBatch] = []
        csv = False
        for file in self.files:
            check_file(file)
            self._starts.append(self.num + sum(each.num_rows for each in held))
            for batch in self._text(file) if _is_text(file) else self._parquet(file):
                if not batch.num_rows:
                    continue
                if held and (csv != _is_text(file) or held[0].schema != batch.schema):
                    yield self._chunk(held, csv)
                    held = []
                csv = _is_text(file)
                held.append(batch)
                if sum(each.num_rows for each in held) >= rows():
                    yield self._chunk(held, csv)
                    held = []
        if held:
            yield self._chunk(held, csv)

    def reading_bytes(self) -> int:
        """Bytes of the arrays that the columns become, about: of CSV by the beginning of each
        file, of Parquet by its metadata.

        Raises:
            DataError: a file is missing, or has no metadata.
        """
        return sum(
            self._text_bytes(file) if _is_text(file) else self._parquet_bytes(file)
            for file in self.files
        )

    def _text_bytes(self, file: Path) -> int:
        whole, separator = unpacked_size(file), self._separator(file)
        rows, sample = csv_text.first_rows(file, separator)
        names = list(self._header or (rows[0] if rows else []))
        read = [at for at, name in enumerate(names) if name in self.columns]
        held = sum(max(len(row[at]), _VALUE) for row in rows for at in read if at < len(row))
        return whole * held // sample if sample else whole

    def _parquet_bytes(self, file: Path) -> int:
        check_file(file)
        values = 0
        with _saying(file), pq.ParquetFile(file) as opened:
            facts = opened.metadata
            for group in map(facts.row_group, range(facts.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    if column.path_in_schema.split(".")[0] in self.columns:
                        values += column.num_values
        return values * _VALUE

    def error(self, row: int, column: str, what: str, remedy: str) -> DataError:
        """What is wrong with a row, by its number over all files."""
        return DataError(what, where=f"{self.place(row)}, column {column!r}", remedy=remedy)

    def place(self, row: int) -> str:
        """``users.csv, row 3 (line 4)``; rows of a file count from 1."""
        at = bisect.bisect_right(self._starts, row) - 1
        file, number = self.files[at], row - self._starts[at] + 1
        if not _is_text(file):
            return f"{file}, row {number}"
        line = csv_text.line_of(file, self._separator(file), number, named=self._header is None)
        return f"{file}, row {number}" + (f" (line {line})" if line else "")

    def _chunk(self, batches: list[pa.RecordBatch], csv: bool) -> Chunk:
        table = pa.Table.from_batches(batches)
        columns = {name: _joined(table[name]) for name in self.columns}
        chunk = Chunk(self, columns, self.num, csv)
        self.num += table.num_rows
        return chunk

    def _text(self, file: Path) -> Iterator[pa.RecordBatch]:
        separator = self._separator(file)
        names = self._header or csv_text.header(file, separator)
        self._check_columns(file, list(names))
        read = pa.csv.ReadOptions(block_size=_BLOCK, column_names=self._header)
        parse = pa.csv.ParseOptions(
            delimiter=separator, newlines_in_values=self._header is None, quote_char=self._quote
        )
        convert = pa.csv.ConvertOptions(
            include_columns=self.columns,
            column_types=dict.fromkeys(self.columns, pa.large_string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        quotes = [0]
        try:
            with csv_text.unpacked(file) as stream:
                counted = csv_text.Counting(stream, quotes)
                source = pa.PythonFile(counted, mode="r")
                with closing(pa.csv.open_csv(source, read, parse, convert)) as batches:
                    yield from batches
        except MemoryError as error:
            raise out_of_memory(str(file), error) from None
        except (pa.ArrowException, *csv_text.FAILURES) as error:
            csv_text.explain(file, separator, self._quote, len(names))
            raise _damaged(file, error) from None
        if quotes[0] % 2 and self._quote:
            csv_text.explain(file, separator, self._quote, len(names))

    @property
    def _quote(self) -> str | bool:
        return False if self._header else '"'  # without a header: plain lines, as of triples

    def _separator(self, file: Path) -> str:
        if self._delimiter is not None:
            return self._delimiter
        name = file.name.removesuffix(".gz")
        return "," if name.endswith(".csv") else "\t"

    def _parquet(self, file: Path) -> Iterator[pa.RecordBatch]:
        with _saying(file), pq.ParquetFile(file) as opened:
            self._check_columns(file, opened.schema_arrow.names)
            facts = opened.metadata
            groups = (facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
            wide = sum(groups) // max(facts.num_rows, 1) + 1
            rows = min(ROWS, max(_BYTES // wide, 1 << 10))
            for batch in opened.iter_batches(batch_size=rows, columns=self.columns):
                columns = {name: _plain(batch[name]) for name in self.columns}
                for name, array in columns.items():
                    if len(array) != batch.num_rows:
                        raise DataError(f"column {name!r} is cut short", where=str(file))
                    array.validate(full=True)  # lengths, and that text is UTF-8
                yield pa.RecordBatch.from_pydict(columns)

    def _check_columns(self, file: Path, names: list[str]) -> None:
        listed = ", ".join(map(repr, names[:20]))[:300] or "none"
        for column in self.columns:
            if column not in names:
                raise DataError(
                    f"there is no column {column!r}; there are: {listed}",
                    where=str(file),
                    remedy="correct the name of the column; the first line of a CSV holds them",
                )
            if names.count(column) > 1:
                raise DataError(
                    f"there are {names.count(column)} columns {column!r}",
                    where=str(file),
                    remedy="rename one of them",
                )


def _joined(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _plain(array: pa.Array) -> pa.Array:
    """Integers as int64, text as large_string, dictionaries as what they stand for."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _plain(pc.cast(array, kind.value_type))
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return pc.cast(array, pa.int64())
    if pa.types.is_string(kind):
        return pc.cast(array, pa.large_string())
    return array


def _is_text(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(_TEXT)


@contextmanager
def _saying(file: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise out_of_memory(str(file), error) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Any) -> DataError:
    text = " ".join(str(error).split())
    kind = "Parquet" if file.suffix in _PARQUET else "CSV"
    return DataError(
        f"not a whole {kind} file: {text[:200]}",
        where=str(file),
        remedy="the file is damaged: get it or write it again",
    )
