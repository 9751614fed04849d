"""Table files, read a chunk at a time, with a place in a file for every row.

Columns of CSV arrive as text, those of Parquet as they are stored, integers as int64 and text as
large_string. What a value means is decided later, where a wrong one can be named.
"""

from __future__ import annotations

import bisect
import csv
import functools
import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raygnn.config.places import Uri
from raygnn.errors import DataError
from raygnn.graph.available_memory import memory
from raygnn.graph.sources.input_files import check_file, out_of_memory, unpacked_size
from raygnn.graph.tables.description import ROW
from raygnn.storage.remote import AnyPath, RemotePath

ROWS = 1 << 16  # of a chunk, fewer where rows are wide or a file ends
_BYTES = 1 << 24  # of a chunk, about
_CELL = 16  # bytes of a value as text, about
_START = 1 << 20  # bytes in which the line of names is
_END = 1 << 22  # bytes in which the last quote is, if DuckDB accepts its line
_PATTERNS = "correct files: patterns are relative to the file that describes the tables"
_VALUE = 8  # bytes of a value as an array, at most
_TEXT = (".csv", ".tsv", ".txt")
_PARQUET = (".parquet", ".pq")
_VALUE_TEXT = 1 << 21  # characters of a value, as many as of a line in DuckDB
_MEMORY = 256 << 20  # bytes, unless queries are known to need more, or fewer are available
csv.field_size_limit(_VALUE_TEXT)

Connection: TypeAlias = Any  # DuckDB's


def resolve(base: Path, patterns: str | Sequence[str], remedy: str = _PATTERNS) -> list[AnyPath]:
    """The files that names and patterns mean, relative to ``base``; those of a pattern sorted. A
    URI of a place that pyarrow.fs opens may have a pattern in its last part."""
    files: list[AnyPath] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if "://" in pattern:
            files += _elsewhere(pattern)
            continue
        file = base / pattern
        if os.path.exists(file) or not glob.has_magic(pattern) or "\0" in pattern:
            files.append(file)
            continue
        matches = sorted(base / match for match in glob.iglob(pattern, root_dir=base))
        if not matches:
            where = None if base == Path() else str(base)
            raise DataError(f"no file matches {pattern!r}", where=where, remedy=remedy)
        files += matches
    for path in files:
        if not is_table(path):
            message = f"tables end in {', '.join(_TEXT)} (or with .gz) or {', '.join(_PARQUET)}"
            remedy = "unpack it, rename it or convert it"
            raise DataError(message, where=str(path), remedy=remedy)
    return files


def _elsewhere(pattern: str) -> list[AnyPath]:
    """The files that a URI means, whose last part may be a pattern."""
    place = RemotePath.of(Uri(pattern), "files")
    if not glob.has_magic(place.name):
        return [place]
    matches = place.parent.glob(place.name)
    if not matches:
        remedy = "correct files: only the last part of a URI may be a pattern"
        raise DataError("no file matches this", where=str(place), remedy=remedy)
    return [*matches]


@contextmanager
def unchanged(find: Callable[[], Iterable[AnyPath]]) -> Iterator[None]:
    """Raise DataError if a local file changes in the meantime, whatever error that causes."""

    def states() -> dict[Path, tuple[int, int]]:
        local = (file for file in find() if isinstance(file, Path))
        return {file: (check_file(file), file.stat().st_mtime_ns) for file in local}

    before = states()
    try:
        yield
    finally:
        changed = [file for file, state in states().items() if state != before.get(file)]
        if changed:
            message, remedy = "the file changed while it was read", "start again once it is whole"
            raise DataError(message, where=str(changed[0]), remedy=remedy)


@dataclass(frozen=True)
class Chunk:
    """Some rows of a table; ``first``: number of the first one, over all files, from 0. Values of
    CSV are all text."""

    reader: TableReader
    columns: dict[str, pa.Array]
    first: int
    csv: bool

    @property
    def num(self) -> int:
        return len(next(iter(self.columns.values())))

    def error(self, row: int, column: str, message: str, remedy: str) -> DataError:
        return self.reader.error(self.first + row, column, message, remedy)

    def text(self, column: str) -> bool:
        return bool(pa.types.is_large_string(self.columns[column].type))


class TableReader:
    """The files of one table, as one.

    Args:
        files: CSV and Parquet.
        columns: those to read; `ROW` is the number of the row.
        delimiter: of CSV; None = by the name of the file.
        header: names of all columns of CSV files that have no line with them, nor quotes.
    """

    def __init__(
        self,
        files: Sequence[AnyPath],
        columns: Sequence[str],
        delimiter: str | None = None,
        header: Sequence[str] | None = None,
    ):
        self.files = files
        self.columns = [column for column in dict.fromkeys(columns) if column != ROW]
        self._numbered = ROW in columns
        self._delimiter = delimiter
        self._header = header
        self.starts: list[int] = []  # number of the first row of each file that was opened
        self.num = 0

    def chunks(self) -> Iterator[Chunk]:
        """All rows, in the order of the files; none if no columns are read."""
        for file in self.files if self.columns or self._numbered else ():
            check_file(file)
            self.starts.append(self.num)
            is_csv = is_text(file)
            if self._numbered and not self.columns:
                self.columns = self.names(file)[:1]
            for batch in self._text(file) if is_csv else self._parquet(file):
                if batch.num_rows:
                    columns = dict(zip(self.columns, batch.columns, strict=True))
                    if self._numbered:
                        columns[ROW] = pa.array(np.arange(self.num, self.num + batch.num_rows))
                    chunk = Chunk(self, columns, self.num, is_csv)
                    self.num += chunk.num
                    yield chunk

    def again(self, column: str) -> TableReader:
        """A reader of one column of the same files, from their beginning."""
        return TableReader(self.files, [column], self._delimiter, self._header)

    def error(self, row: int, column: str, message: str, remedy: str) -> DataError:
        """Build the error of a row, by its number over all files."""
        return DataError(message, where=f"{self.place(row)}, column {column!r}", remedy=remedy)

    def place(self, row: int) -> str:
        """``users.csv, row 3 (line 4)``; rows of a file count from 1."""
        at = bisect.bisect_right(self.starts, row) - 1
        file, number = self.files[at], row - self.starts[at] + 1
        if not is_text(file):
            return f"{file}, row {number}"
        try:
            lines = (line for at_row, _, line in self._lines(file) if at_row == number)
            return f"{file}, row {number} (line {next(lines)})"
        except (csv.Error, StopIteration, OSError):
            return f"{file}, row {number}"

    def extent(self) -> tuple[int, int]:
        """Estimate the number of rows, and the bytes of the columns as arrays: of CSV by the
        beginning of each file, of Parquet by its metadata."""
        rows = size = 0
        for file in self.files:
            if not is_text(file):
                check_file(file)
                with _parquet_file(file) as opened:
                    rows += opened.metadata.num_rows
                    size += self._parquet_bytes(opened)
                continue
            total = unpacked_size(file)
            try:
                lines, sample = self._start(file)
            except OSError:  # reported when all of it is read
                continue
            of_file = max(len(lines) - (self._header is None), 0) * total // max(sample, 1)
            rows, size = rows + of_file, size + of_file * len(self.columns) * _VALUE
        return rows, size

    # --- CSV

    def _text(self, file: AnyPath) -> Iterator[pa.RecordBatch]:
        names, skip, line_end = self._head(file)
        self._check_columns(file, names)
        types = ", ".join(f"'c{at}': 'VARCHAR'" for at in range(len(names)))
        quote = text("" if self._header else '"')
        options = (
            f"columns={{{types}}}, auto_detect=false, parallel=false, header=false, "
            f"hive_partitioning=false, skip={skip}, nullstr='', allow_quoted_nulls=false, "
            f"new_line={text(line_end.encode('unicode_escape').decode())}, "
            f"delim={text(separator(file, self._delimiter))}, quote={quote}, escape={quote}, "
            f"compression={text('gzip' if file.suffix == '.gz' else 'none')}"
        )
        wanted = ", ".join(f"c{names.index(column)}" for column in self.columns)
        # a line of one column that is empty is no row, as it is none of more columns
        only = " where c0 is not null" if len(names) == 1 else ""
        rows = max(min(ROWS, _BYTES // (_CELL * len(self.columns))), 1)
        try:
            with _downloaded(file) as local:
                query = f"select {wanted} from read_csv({path_text(local)}, {options}){only}"
                cursor = scanner().cursor()
                for batch in cursor.sql(query).to_arrow_reader(rows):
                    yield pa.RecordBatch.from_arrays(batch.columns, self.columns)
                if self._may_be_cut(local):
                    self._explain(file, len(names))
        except (duckdb.Error, MemoryError, OSError) as error:
            self._explain(file, len(names))
            if isinstance(error, (MemoryError, duckdb.OutOfMemoryException)):
                raise out_of_memory(str(file), error) from None
            raise _damaged(file, error) from None

    def _may_be_cut(self, file: Path) -> bool:
        """Return True if the last quote may be open, or the last line is long and has no end: rows
        that DuckDB 2.0 drops. Raises OSError if a checksum is wrong, which it ignores."""
        end, mark = b"", separator(file, self._delimiter).encode()
        with unpacked(file) as stream:
            if file.suffix != ".gz":
                stream.seek(max(file.stat().st_size - _END, 0))
            while block := stream.read(_START):
                end = end[-_END:] + block
        if len(end) > _START and not re.search(rb"[\r\n]", end[-_START:]):
            return True
        at = end.rfind(b'"')
        before, after = end[:at][-2:], end[at + 1 : at + 2]
        is_empty = before == mark + b'"' and after in (mark, b"\r", b"\n", b"")
        return at >= 0 and not is_empty and before[-1:] in (mark, b"\r", b"\n", b"", b" ", b'"')

    def _dialect(self, file: AnyPath) -> dict[str, Any]:
        """Return options of `csv.reader`; as for DuckDB, blanks may be before a quote."""
        delimiter = separator(file, self._delimiter)
        return {"delimiter": delimiter, "skipinitialspace": delimiter != " "}

    def _start(self, file: AnyPath) -> tuple[list[str], int]:
        """Return the lines in the first megabyte of a file, and of how many bytes they are."""
        with unpacked(file) as stream:
            start = stream.read(_START)
        lines = io.StringIO(start.decode("utf-8-sig", "surrogateescape"), newline="")
        return lines.readlines(), len(start)

    def names(self, file: AnyPath) -> list[str]:
        """Return the names of the columns, of a CSV without spaces around them. Raises DataError if
        there is no line with them."""
        check_file(file)
        if not is_text(file):
            with _parquet_file(file) as opened:
                return list(opened.schema_arrow.names)
        return self._head(file)[0]

    def _head(self, file: AnyPath) -> tuple[list[str], int, str]:
        """Return the names of the columns of a CSV without spaces around them, how many rows to
        skip, and what ends its lines. DuckDB would take the end of a line within quotes for it."""
        try:
            lines, size = self._start(file)
            rows: Any = csv.reader(lines, **self._dialect(file))
            skip, names = next(((n, row) for n, row in enumerate(rows, 1) if row), (0, []))
        except (csv.Error, OSError) as error:
            raise _wrong_text(str(file), f"the line of names cannot be read: {error}") from None
        if not names:
            raise _wrong_text(str(file), "there is no line with the names of the columns")
        if re.search("[\0\udc80-\udcff]", "".join(names)):
            message = "there are bytes that are not UTF-8: is it compressed, or UTF-16?"
            raise _wrong_text(f"{file}, line {rows.line_num}", message)
        if size == _START and rows.line_num == len(lines):
            raise _wrong_text(str(file), "the line of names cannot be read: it exceeds 1 MiB")
        last = lines[0 if self._header else rows.line_num - 1]
        line_end = last[len(last.rstrip("\r\n")) :] or "\n"
        if self._header:
            return list(self._header), 0, line_end
        return [name.strip() for name in names], skip, line_end

    def _lines(self, file: AnyPath) -> Iterator[tuple[int, list[str], int]]:
        """Number, values and last line of each row that is not empty, read by Python's own
        reader: slow, and only used to say where something is wrong. Row 0 has the names. Bytes
        that are not UTF-8 are lone surrogates."""
        with unpacked(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            rows = csv.reader(
                iter(lambda: text.readline(_END), ""),  # one line may have gigabytes
                strict=True,
                quoting=csv.QUOTE_NONE if self._header else csv.QUOTE_MINIMAL,
                **self._dialect(file),
            )
            number = 1 if self._header else 0
            for row in rows:
                if row:
                    yield number, row, rows.line_num
                    number += 1

    def _explain(self, file: AnyPath, columns: int) -> None:
        """Raise the first thing that is wrong with a file on which DuckDB gave up, if any is."""
        line = 1
        try:
            for number, row, line in self._lines(file):
                place = f"{file}, row {number} (line {line})" if number else f"{file}, line 1"
                try:
                    "".join(row).encode()
                except UnicodeEncodeError:
                    raise _wrong_text(place, "there are bytes that are not UTF-8") from None
                if len(row) != columns:
                    text = repr(",".join(row))
                    text = text if len(text) <= 60 else text[:60] + "…"
                    message = f"there are {len(row)} columns, expected {columns}: {text}"
                    raise _wrong_text(place, message)
        except (csv.Error, OSError) as error:
            message = f"it cannot be read: {error}"
            if "unexpected end" in message:
                message = "a quote is not closed"
            elif "field limit" in message:
                message = f"a value has more than {_VALUE_TEXT:,} characters: an open quote?"
            raise _wrong_text(f"{file}, after line {line}", message) from None

    # --- Parquet

    def _parquet_bytes(self, opened: pq.ParquetFile) -> int:
        facts, size = opened.metadata, 0
        kinds = {f.name: getattr(f.type, "value_type", f.type) for f in opened.schema_arrow}
        for group in map(facts.row_group, range(facts.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema.split(".")[0]
                if name in self.columns and name in kinds:  # else damaged, which reading reports
                    is_half = pa.types.is_float16(kinds[name])
                    size += column.num_values * (_VALUE // 2 if is_half else _VALUE)
        return size

    def _parquet(self, file: AnyPath) -> Iterator[pa.RecordBatch]:
        with _parquet_file(file) as opened:
            self._check_columns(file, opened.schema_arrow.names)
            facts = opened.metadata
            groups = (facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
            row_bytes = sum(groups) // max(facts.num_rows, 1) + 1
            rows = min(ROWS, max(_BYTES // row_bytes, 1 << 10))
            for batch in opened.iter_batches(batch_size=rows, columns=self.columns):
                columns = {name: widened(batch[name]) for name in self.columns}
                for name, array in columns.items():
                    if len(array) != batch.num_rows:
                        raise DataError(f"column {name!r} is cut short", where=str(file))
                    array.validate(full=True)  # lengths, and that text is UTF-8
                yield pa.RecordBatch.from_pydict(columns)

    def _check_columns(self, file: AnyPath, names: list[str]) -> None:
        for column in self.columns:
            if column not in names:
                listed = ", ".join(map(repr, names[:20]))[:300] or "none"
                message = f"there is no column {column!r}; there are: {listed}"
                remedy = "correct the name of the column, or the delimiter: a CSV begins with names"
                raise DataError(message, where=str(file), remedy=remedy)
            if names.count(column) > 1:
                message = f"there are {names.count(column)} columns {column!r}"
                raise DataError(message, where=str(file), remedy="rename one of them")


def widened(array: pa.Array) -> pa.Array:
    """Integers as int64, text as large_string, dictionaries as what they stand for."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return widened(pc.cast(array, kind.value_type))
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return pc.cast(array, pa.int64())
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pc.cast(array, pa.large_string())
    return array


@contextmanager
def _downloaded(file: AnyPath) -> Iterator[Path]:
    """Yield a file on this machine with the content of a file."""
    if isinstance(file, Path):
        yield file
        return
    with TemporaryDirectory(prefix="raygnn-") as place:
        copy = Path(place) / file.name
        file.download(copy)
        yield copy


def unpacked(file: AnyPath) -> Any:
    """Open the text of a file, which may be compressed."""
    stream: Any = file.open("rb")
    return pa.CompressedInputStream(stream, "gzip") if file.suffix == ".gz" else stream


def separator(file: AnyPath, delimiter: str | None) -> str:
    """Return what separates the columns of a text file."""
    return delimiter or ("," if file.name.removesuffix(".gz").endswith(".csv") else "\t")


def is_table(file: AnyPath) -> bool:
    """Return True for a name that a table may have."""
    return file.suffix in _PARQUET or is_text(file)


def is_text(file: AnyPath) -> bool:
    """Return True for the name of a CSV, which may be compressed."""
    return file.name.removesuffix(".gz").endswith(_TEXT)


@contextmanager
def _parquet_file(file: AnyPath) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, and turn pyarrow's errors into `DataError`."""
    source: Any = file.open_anywhere() if isinstance(file, RemotePath) else file
    try:  # in nanoseconds, int96 would overflow after the year 2262
        with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as opened:
            yield opened
    except MemoryError as error:
        raise out_of_memory(str(file), error) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(file, error) from None


def _wrong_text(place: str, message: str) -> DataError:
    remedy = "correct the file, or write it again as UTF-8 with one line of names"
    return DataError(message, where=place, remedy=remedy)


def _damaged(file: AnyPath, error: Any) -> DataError:
    kind = "Parquet" if file.suffix in _PARQUET else "CSV"
    if found := re.search(r"on Line: (\d+)\n.*\n(.+)\n\nPossible fixes", str(error), re.DOTALL):
        return _wrong_text(f"{file}, line {found[1]}", found[2])
    if "state machine" in str(error):
        remedy = "end all lines alike: in \\n, or all in \\r\\n"
        return DataError("its lines end in different ways", where=str(file), remedy=remedy)
    message = f"not a whole {kind} file: {' '.join(str(error).split())[:200]}"
    remedy = "the file is damaged: get it or write it again"
    return DataError(message, where=str(file), remedy=remedy)


# --- DuckDB


def connect(spill: Path, need: int = 0) -> Connection:
    """Open a database in memory that spills to a directory; ``need``: bytes of its queries."""
    limit = max(min(max(_MEMORY, need), memory()[1] // 2), _MEMORY // 4)
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    connection = duckdb.connect(
        config={
            "memory_limit": f"{limit}B",
            "temp_directory": str(spill),
            "threads": int(threads or len(os.sched_getaffinity(0))),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
            "arrow_large_buffer_size": True,
        }
    )
    connection.execute("set enable_progress_bar = false")  # which a notebook would show
    return connection


@functools.cache
def scanner() -> Connection:
    """Return the database of this process for queries that pass over files, which never spill."""
    return connect(Path(os.devnull))


def text(value: Any) -> str:
    """Quote a value as a literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def path_text(file: Path) -> str:
    """Quote a path as a literal of SQL, which is no pattern."""
    return text(glob.escape(str(file)))
