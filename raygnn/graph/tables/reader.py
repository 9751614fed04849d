"""Read table files in chunks, with the file and row of every value.

CSV columns are text; Parquet columns keep their type, with integers as int64 and text as
large_string. Later modules interpret values, so that errors can name the wrong one.
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
from raygnn.config.problems import show
from raygnn.errors import DataError
from raygnn.graph.available_memory import memory
from raygnn.graph.sources.input_files import check_file, out_of_memory, unpacked_size
from raygnn.graph.tables.description import ROW
from raygnn.storage.remote import AnyPath, RemotePath

ROWS = 1 << 16  # rows of a chunk; fewer if rows are wide, or at the end of a file
_BYTES = 1 << 24  # bytes of a chunk, about
_CELL = 16  # estimated bytes of a value as text
_START = 1 << 20  # bytes at the start of a file that contain the header line
_END = 1 << 22  # bytes at the end that contain the last quote, if DuckDB accepts its line
_PATTERNS = "correct files: relative to the YAML; of a URI only the last part may be a pattern"
_VALUE = 8  # bytes of a value in an array, at most
_TEXT = (".csv", ".tsv", ".txt")
_PARQUET = (".parquet", ".pq")
_LINE = 2_000_000  # bytes of a CSV line, DuckDB's limit
_MEMORY = 256 << 20  # default memory limit of a connection, bytes
csv.field_size_limit(_LINE)

Connection: TypeAlias = Any  # DuckDB's


def resolve(base: Path, patterns: str | Sequence[str], remedy: str = _PATTERNS) -> list[AnyPath]:
    """Return the files of names and patterns, relative to ``base``; files of a pattern are sorted.
    The last part of a URI may be a pattern. Raises DataError if a pattern matches no file, or a
    file is no table."""
    files: list[AnyPath] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found: Sequence[AnyPath] = [base / pattern]
        if "://" in pattern:
            remote = RemotePath.of(Uri(pattern), "files")
            is_pattern = glob.has_magic(remote.name)
            found = remote.parent.glob(remote.name) if is_pattern else [remote]
        elif glob.has_magic(pattern) and "\0" not in pattern and not os.path.exists(base / pattern):
            found = sorted(base / match for match in glob.iglob(pattern, root_dir=base))
        if not found:
            where = None if base == Path() else str(base)
            raise DataError(f"no file matches {pattern!r}", where=where, remedy=remedy)
        files += found
    for path in files:
        if not is_table(path):
            message = f"tables end in {', '.join(_TEXT)} (or with .gz) or {', '.join(_PARQUET)}"
            remedy = "unpack it, rename it or convert it"
            raise DataError(message, where=str(path), remedy=remedy)
    return files


@contextmanager
def unchanged(find: Callable[[], Iterable[AnyPath]]) -> Iterator[None]:
    """Raise DataError if a local file changes within the context, in place of resulting errors."""

    def states() -> dict[Path, tuple[int, int]]:
        local = (file for file in find() if isinstance(file, Path))
        return {file: (check_file(file), file.stat().st_mtime_ns) for file in local}

    before = states()
    try:
        yield
    finally:
        changed = [file for file, state in states().items() if state != before.get(file)]
        if changed:
            message, remedy = "the file changed while it was read", "retry when it is complete"
            raise DataError(message, where=str(changed[0]), remedy=remedy)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a table. ``first``: number of the first row over all files, from 0;
    ``csv``: True if all values are text."""

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
    """Reader of all files of a table.

    Args:
        files: CSV and Parquet files.
        columns: names of the columns to read; `ROW` is the row's number.
        delimiter: separator of CSV columns; None = chosen by file name.
        header: column names of CSV files without a header line and without quotes.
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
        self.delimiter = delimiter
        self._header = header
        self.starts: list[int] = []  # number of the first row of each file that was opened
        self.num = 0

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows in the order of the files; none if there are no columns to read."""
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

    def error(self, row: int, column: str, message: str, remedy: str) -> DataError:
        """Build the error for a row, given its number over all files."""
        return DataError(message, where=f"{self.place(row)}, column {column!r}", remedy=remedy)

    def place(self, row: int) -> str:
        """Return a row's place, such as ``users.csv, row 3 (line 4)``; rows count from 1."""
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
        """Estimate the number of rows, and the bytes of the columns as arrays, from the start of
        each CSV file and the metadata of Parquet files."""
        rows = size = 0
        for file in self.files:
            if not is_text(file):
                check_file(file)
                with _parquet_file(file) as opened:
                    rows += opened.metadata.num_rows
                    size += self._parquet_bytes(opened.metadata)
                continue
            total = unpacked_size(file)
            try:
                lines, sample = self._start(file)
            except OSError:  # reported when all of it is read
                continue
            of_file = max(len(lines) - 1, 1) * total // max(sample, 1)
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
            f"delim={text(separator(file, self.delimiter))}, quote={quote}, escape={quote}, "
            f"compression={text('gzip' if file.suffix == '.gz' else 'none')}"
        )
        wanted = ", ".join(f"c{names.index(column)}" for column in self.columns)
        # an empty line is no row, also in a file with one column
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
        """True if the last quote may be open, or the last line is long and has no line end, since
        DuckDB 2.0 drops such rows. Raises OSError for a wrong checksum, which DuckDB ignores."""
        end, mark = b"", separator(file, self.delimiter).encode()
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
        """Return options of `csv.reader`; like DuckDB, it accepts spaces before a quote."""
        delimiter = separator(file, self.delimiter)
        return {"delimiter": delimiter, "skipinitialspace": delimiter != " "}

    def _start(self, file: AnyPath) -> tuple[list[str], int]:
        """Return the lines in the first megabyte of a file, and their size in bytes."""
        with unpacked(file) as stream:
            start = stream.read(_START)
        lines = io.StringIO(start.decode("utf-8-sig", "surrogateescape"), newline="")
        return lines.readlines(), len(start)

    def names(self, file: AnyPath) -> list[str]:
        """Return a file's column names, without surrounding spaces in CSV. Raises DataError if a
        CSV file has no header line."""
        check_file(file)
        if is_text(file):
            return self._head(file)[0]
        with _parquet_file(file) as opened:
            return list(opened.schema_arrow.names)

    def _head(self, file: AnyPath) -> tuple[list[str], int, str]:
        """Return the column names of a CSV file, the number of rows to skip, and the line end.
        DuckDB would detect the line end of a quoted value."""
        try:
            lines, size = self._start(file)
            rows: Any = csv.reader(lines, **self._dialect(file))
            skip, names = next(((n, row) for n, row in enumerate(rows, 1) if row), (0, []))
        except (csv.Error, OSError) as error:
            raise _wrong_text(str(file), f"the header line cannot be read: {error}") from None
        if not names:
            raise _wrong_text(str(file), "there is no header line with column names")
        if re.search("[\0\udc80-\udcff]", "".join(names)):
            message = "there are bytes that are not UTF-8: is it compressed, or UTF-16?"
            raise _wrong_text(f"{file}, line {rows.line_num}", message)
        if size == _START and rows.line_num == len(lines):
            raise _wrong_text(str(file), "the header line cannot be read: it exceeds 1 MiB")
        last = lines[0 if self._header else rows.line_num - 1]
        line_end = last[len(last.rstrip("\r\n")) :] or "\n"
        if self._header:
            return list(self._header), 0, line_end
        return [name.strip() for name in names], skip, line_end

    def _lines(self, file: AnyPath) -> Iterator[tuple[int, list[str], int]]:
        """Yield number, values and last line of each row that is not empty; row 0 is the header.
        Python's csv module is slow, and used only to locate errors. Bytes that are not UTF-8 are
        lone surrogates."""
        with unpacked(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            rows = csv.reader(
                iter(lambda: text.readline(_END), ""),  # a line may be gigabytes long
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
        """Raise the first error in a file that DuckDB could not read, if one is found."""
        line = 1
        try:
            for number, row, line in self._lines(file):
                place = f"{file}, row {number} (line {line})" if number else f"{file}, line 1"
                values = ",".join(row)
                try:
                    size = len(values.encode())
                except UnicodeEncodeError:
                    raise _wrong_text(place, "there are bytes that are not UTF-8") from None
                if len(row) != columns:
                    message = f"there are {len(row)} columns, expected {columns}: {show(values)}"
                    raise _wrong_text(place, message)
                if size >= _LINE:
                    message = f"the line has {size:,} bytes, at most {_LINE:,} are supported"
                    raise _wrong_text(place, f"{message}: an open quote?")
        except (csv.Error, OSError) as error:
            message = f"it cannot be read: {error}"
            if "unexpected end" in message:
                message = "a quote is not closed"
            elif "field limit" in message:
                message = f"a value has more than {_LINE:,} characters: an open quote?"
            raise _wrong_text(f"{file}, after line {line}", message) from None

    # --- Parquet

    def _parquet_bytes(self, facts: pq.FileMetaData) -> int:
        size = 0
        for group in map(facts.row_group, range(facts.num_row_groups)):
            for at, column in enumerate(map(group.column, range(group.num_columns))):
                if column.path_in_schema.split(".")[0] in self.columns:
                    is_half = facts.schema.column(at).logical_type.type == "FLOAT16"
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
                    array.validate(full=True)  # lengths and UTF-8
                yield pa.RecordBatch.from_pydict(columns)

    def _check_columns(self, file: AnyPath, names: list[str]) -> None:
        for column in self.columns:
            if column not in names:
                listed = ", ".join(map(repr, names[:20]))[:300] or "none"
                message = f"there is no column {column!r}; there are: {listed}"
                remedy = "correct the column's name, or the delimiter; a CSV begins with a header"
                raise DataError(message, where=str(file), remedy=remedy)
            if names.count(column) > 1:
                message = f"there are {names.count(column)} columns {column!r}"
                raise DataError(message, where=str(file), remedy="rename one of them")


def widened(array: pa.Array) -> pa.Array:
    """Convert integers to int64, text to large_string, and dictionaries to their values."""
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
    """Yield the path of a local file, or of a temporary copy of a remote one."""
    if isinstance(file, Path):
        yield file
        return
    with TemporaryDirectory(prefix="raygnn-") as place:
        copy = Path(place) / file.name
        file.download(copy)
        yield copy


def unpacked(file: AnyPath) -> Any:
    """Open a file, decompressed if it ends in ``.gz``."""
    stream: Any = file.open("rb")
    return pa.CompressedInputStream(stream, "gzip") if file.suffix == ".gz" else stream


def separator(file: AnyPath, delimiter: str | None) -> str:
    """Return the column separator of a text file."""
    return delimiter or ("," if file.name.removesuffix(".gz").endswith(".csv") else "\t")


def is_table(file: AnyPath) -> bool:
    """True if a file name ends in the suffix of a table."""
    return file.suffix in _PARQUET or is_text(file)


def is_text(file: AnyPath) -> bool:
    """True if a file name ends in a suffix of CSV, compressed or not."""
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
    remedy = "correct the file, or write it again as UTF-8 with one header line"
    return DataError(message, where=place, remedy=remedy)


def _damaged(file: AnyPath, error: Any) -> DataError:
    kind = "Parquet" if file.suffix in _PARQUET else "CSV"
    if "state machine" in str(error):
        remedy = "end all lines in \\n, or all in \\r\\n"
        return DataError("its line ends differ", where=str(file), remedy=remedy)
    message = f"not a complete {kind} file: {' '.join(str(error).split())[:200]}"
    remedy = "the file is damaged: copy or write it again"
    return DataError(message, where=str(file), remedy=remedy)


# --- DuckDB


def connect(spill: Path, need: int = 0) -> Connection:
    """Open an in-memory database that spills to a directory. ``need``: memory of its queries, in
    bytes, if known."""
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
    connection.execute("set enable_progress_bar = false")  # notebooks would show it
    return connection


@functools.cache
def scanner() -> Connection:
    """Return this process's database for scans of files, which never spill."""
    return connect(Path(os.devnull))


def text(value: Any) -> str:
    """Quote a value as a SQL literal."""
    return "'" + str(value).replace("'", "''") + "'"


def path_text(file: Path) -> str:
    """Quote a path as a SQL literal, with pattern characters escaped."""
    return text(glob.escape(str(file)))
