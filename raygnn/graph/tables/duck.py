"""DuckDB: connections with a memory limit, Arrow in and out, and CSV."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from raygnn.graph.available_memory import memory
from raygnn.storage.remote import AnyPath, RemotePath

_MEMORY = 256 << 20  # bytes, unless queries are known to need more, or fewer are available

Connection: TypeAlias = Any  # DuckDB's


def connect(spill: Path, need: int = 0) -> Connection:
    """Open a database in memory that spills to a directory.

    Args:
        need: bytes that its queries are known to need; with fewer they spill.
    """
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
def _scanner() -> Connection:
    """Return the database of this process for queries that pass over files, which never spill."""
    return connect(Path(os.devnull))


def put(connection: Connection, table: str, columns: Mapping[str, Any]) -> None:
    """Append columns, Arrow's or NumPy's, to a table."""
    connection.register("given", pa.table(dict(columns)))
    connection.execute(f"insert into {table} select * from given")
    connection.unregister("given")


def batches(connection: Connection, query: str, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the result of a query in order, so many rows at a time."""
    yield from connection.sql(query).to_arrow_reader(rows)


def text(value: Any) -> str:
    """Quote a value as a literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def read_csv(
    file: AnyPath,
    width: int,
    columns: Sequence[int],
    rows: int,
    delimiter: str,
    quote: str,
    line_end: str,
    skip: int,
) -> Iterator[pa.RecordBatch]:
    """Yield columns of a CSV as text, by their numbers, in the order of its rows.

    Args:
        width: number of columns of the file.
        rows: of a batch.
        skip: rows that are none, before the first one.

    Raises:
        duckdb.Error: the file is damaged, or not strictly CSV.
    """
    if isinstance(file, RemotePath):
        with TemporaryDirectory(prefix="raygnn-") as place:
            copy = Path(place) / file.name
            file.download(copy)
            yield from read_csv(copy, width, columns, rows, delimiter, quote, line_end, skip)
        return
    types = ", ".join(f"'c{at}': 'VARCHAR'" for at in range(width))
    options = (
        f"columns={{{types}}}, auto_detect=false, parallel=false, header=false, skip={skip}, "
        f"nullstr='', new_line={text(line_end.encode('unicode_escape').decode())}, "
        f"allow_quoted_nulls=false, delim={text(delimiter)}, quote={text(quote)}, "
        f"escape={text(quote)}, compression={text('gzip' if file.suffix == '.gz' else 'none')}"
    )
    wanted = ", ".join(f"c{at}" for at in columns)
    # a line of one column that is empty is no row, as it is none of more columns
    only = " where c0 is not null" if width == 1 else ""
    query = f"select {wanted} from read_csv({text(glob.escape(str(file)))}, {options}){only}"
    yield from batches(_scanner().cursor(), query, rows)
