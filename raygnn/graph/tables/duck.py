"""DuckDB: connections with a memory limit, literals of SQL, and Arrow in and out."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from raygnn.graph.available_memory import memory

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
def scanner() -> Connection:
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


def path_text(file: Path) -> str:
    """Quote a path as a literal of SQL, which is no pattern."""
    return text(glob.escape(str(file)))
