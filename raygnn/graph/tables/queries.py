"""Tables defined by a query: one SELECT, which DuckDB runs over files and other tables.

A query can read the files that it names, and nothing else: it is parsed, its files are checked, and
its connection may open only these.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from raygnn.config.problems import one_of, show
from raygnn.errors import DataError
from raygnn.graph.data import etype_str
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.sources.input_files import check_file, out_of_memory, unpacked_size
from raygnn.graph.tables.description import Description
from raygnn.graph.tables.reader import (
    ROWS,
    connect,
    is_table,
    is_text,
    path_text,
    resolve,
    scanner,
    separator,
    text,
)
from raygnn.storage.remote import AnyPath, RemotePath

_ROW = 32  # estimated bytes of input for a row of the result
_RESULT = "the result of the query"
_READS = ("read_csv", "read_csv_auto", "read_parquet", "parquet_scan")
# Kinds of queries; COPY, INSERT, UPDATE or DELETE in a WITH are other kinds.
_SELECTS = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_STORED = {"DECIMAL": "double", "HUGEINT": "bigint", "UHUGEINT": "bigint", "UUID": "varchar"}


@dataclass(frozen=True)
class Query:
    """A parsed query.

    Attributes:
        where: its key in the description.
        select: the statement, with absolute paths.
        views: tables that it names → SELECT, each after those that it depends on.
        files: all files that it reads.
    """

    where: str
    select: str
    views: dict[str, str]
    files: list[Path]

    def extent(self) -> tuple[int, int]:
        """Estimate the number of rows and the bytes of the result, from the size of its files."""
        size = sum(map(unpacked_size, self.files))
        return size // _ROW, size

    def run(self, file: Path) -> dict[str, int]:
        """Write the result as Parquet, ordered by all columns. Returns the number of rows; raises
        DataError if the query fails or returns none."""
        rows = 0
        try:
            with connect(file.with_suffix(".spill")) as connection:
                connection.execute("set threads = 1")  # float sums depend on the order of rows
                # it may open only these files, with paths as opened and as written in the query
                allowed = [*map(text, self.files), *map(path_text, self.files)]
                connection.execute(f"set allowed_paths = [{', '.join(allowed)}]")
                connection.execute("set enable_external_access = false")
                connection.execute("set lock_configuration = true")
                for name, select in {**self.views, _RESULT: self.select}.items():
                    connection.execute(f"create view {quoted(name)} as {select}")
                kinds = connection.execute(f"describe {quoted(_RESULT)}").fetchall()
                columns = ", ".join(_stored(name, kind) for name, kind, *_ in kinds)
                query = f"select {columns} from {quoted(_RESULT)} order by all"
                reader = connection.sql(query).to_arrow_reader(ROWS)
                with pq.ParquetWriter(file, reader.schema) as writer:
                    for batch in reader:
                        writer.write_batch(batch)
                        rows += batch.num_rows
        except (MemoryError, duckdb.OutOfMemoryException) as error:
            raise out_of_memory(self.where, error) from None
        except (duckdb.Error, pa.ArrowException) as error:
            raise _wrong(self.where, str(error)) from None
        if not rows:
            remedy = "correct the query, or add rows to its tables"
            raise DataError("the query returns no rows", where=self.where, remedy=remedy)
        return {"rows": rows}


class Queries:
    """The queries of a description. ``file``: path of its YAML."""

    def __init__(self, file: Path, described: Description):
        self._file, self._base = file, file.parent.absolute()
        self._tables = described.tables
        self._order = list(self._tables)
        self._keys: dict[str, list[str]] = {}  # name in lower case → keys of tables with it
        for ntype in described.nodes:
            self._keys.setdefault(ntype.lower(), []).append(f"nodes.{ntype}")
        for key in described.edges:
            etype = described.edge_type(key)
            for name in (etype_str(etype), etype[1]):
                self._keys.setdefault(name.lower(), []).append(f"edges.{key}")
        local = [p for one in self._tables.values() for p in one.files if "://" not in p]
        self._directories = {self._base, *(Path(self._absolute(p)).parent for p in local)}

    def of(self, key: str) -> Query:
        """Return the query of a table such as ``nodes.user``."""
        where = f"{self._file}: {key}.sql"
        return self.select(str(self._tables[key].sql), where, self._order.index(key))

    def select(self, sql: str, where: str, above: float = math.inf) -> Query:
        """Parse a query. It can name tables with files, and queries among the first ``above``
        tables. Raises DataError if it is no SELECT or reads anything else."""
        views: dict[str, str] = {}
        files: dict[Path, None] = {}
        literals: list[tuple[int, int, str]] = []
        nodes = list(_walk(_parsed(sql, where)))
        within = {
            entry["key"].lower() for n in nodes for entry in n.get("cte_map", {}).get("map", ())
        }
        for node in nodes:
            if node.get("type") == "BASE_TABLE" and len(node["qualified_name"]["path"]) == 1:
                (name,) = node["qualified_name"]["path"]
                if keys := self._keys.get(name.lower()):
                    name = name.lower()
                    inner = self._table(name, keys, above, where)
                elif name.lower() in within:
                    continue
                else:
                    found = self._named(name, where)
                    inner = Query(where, scan(found), {}, found)
                views |= {**inner.views, name: inner.select}
                files |= dict.fromkeys(inner.files)
            elif node.get("type") == "TABLE_FUNCTION" and (given := _named_files(node["function"])):
                found = self._named(given["literal"]["text"], where)
                files |= dict.fromkeys(found)
                place, length = given["query_location"], given["query_location_length"]
                literals.append((place, length, f"[{', '.join(map(path_text, found))}]"))
        select = sql.encode()
        for place, length, paths in sorted(literals, reverse=True):
            select = select[:place] + paths.encode() + select[place + length :]
        return Query(where, select.decode(), views, list(files))

    def _table(self, name: str, keys: Sequence[str], above: float, where: str) -> Query:
        """Return the query of another table, or a query of its files."""
        if len(keys) > 1:
            message = f"{len(keys)} tables are called {show(name)}"
            remedy = f"write the full key in double quotes: {', '.join(keys)}"
            raise DataError(message, where=where, remedy=remedy)
        table = self._tables[keys[0]]
        if table.sql is None:
            files = self._local(resolve(self._base, table.files), keys[0], where)
            return Query(where, scan(files, table.delimiter), {}, files)
        if self._order.index(keys[0]) >= above:
            message = f"it names {keys[0]}, which is not an earlier query"
            remedy = "use tables with files, and queries that precede it in the YAML"
            raise DataError(message, where=where, remedy=remedy)
        return self.of(keys[0])

    def _named(self, pattern: str, where: str) -> list[Path]:
        """Return the files of a name or pattern in a query."""
        if not is_table(Path(pattern)):
            known = [name for name, keys in self._keys.items() if len(keys) == 1]
            message = f"{show(pattern)} is neither a table nor a CSV or Parquet file"
            raise DataError(message, where=where, remedy=one_of(pattern, known))
        absolute = self._absolute(pattern)
        if "://" in pattern or not any(Path(absolute).is_relative_to(d) for d in self._directories):
            message = f"{show(pattern)} is outside the directories that a query can read"
            remedy = f"move it to {self._base}, or to a directory of another table's files"
            raise DataError(message, where=where, remedy=remedy)
        relative = os.path.relpath(absolute, self._base)
        return self._local(resolve(self._base, relative), pattern, where)

    def _local(self, files: Sequence[AnyPath], name: str, where: str) -> list[Path]:
        for file in files:
            if isinstance(file, RemotePath):
                message = f"{name} is in an object store, which queries cannot read"
                raise DataError(message, where=where, remedy="copy its files to this machine")
            check_file(file)
        return [Path(self._absolute(str(file))) for file in files]

    def _absolute(self, pattern: str) -> str:
        return os.path.normpath(self._base / pattern)


def queries_of(file: Path, described: Description) -> dict[str, Query]:
    """Return the queries of a description by their tables' keys; raises as `Queries.select`."""
    queries = Queries(file, described)
    return {
        key: queries.of(key) for key, table in described.tables.items() if table.sql is not None
    }


def run_queries(
    file: Path, described: Description, work: Workspace
) -> tuple[Description, dict[Path, str]]:
    """Run the queries of a description. Returns the description with files of their results, and
    the names of these files in errors."""
    directory, results = work.directory("queries"), dict[str, Path]()
    for key, table in described.tables.items():
        if table.url is not None:  # other nodes do not see its temporary file
            results[key] = directory / f"from-database-{Path(table.files[0]).name}"
            shutil.copy(table.files[0], results[key])
    described = described.reading(results)
    queries = queries_of(file, described)
    results |= {key: directory / f"{at}.parquet" for at, key in enumerate(queries)}
    tasks = [(query, results[key]) for key, query in queries.items()]
    if tasks:
        work.run("queries", Query.run, tasks, [query.extent()[1] for query in queries.values()])
    names = {path: f"the query of {key} in {file}" for key, path in results.items()}
    return described.reading(results), names


@contextmanager
def named(results: Mapping[Path, str]) -> Iterator[None]:
    """Replace the file names of query results in errors by the names of the queries."""
    try:
        yield
    except DataError as error:
        for path, name in results.items():
            error.what = error.what.replace(str(path), name)
            error.where = error.where and error.where.replace(str(path), name)
        raise


def _parsed(sql: str, where: str) -> Any:
    """Return the syntax tree of a SELECT; raises DataError for anything else."""
    (tree,) = scanner().cursor().execute("select json_serialize_sql(?)", [sql]).fetchone()
    tree = json.loads(tree)
    if tree["error"] and tree["error_type"] == "parser":
        before = sql.encode()[: int(tree.get("position", 0))].decode(errors="replace")
        raise _wrong(where, f"{tree['error_message']}, after {show(before[-40:])}")
    kinds = {str(n["type"]) for n in _walk(tree) if str(n.get("type")).endswith("_NODE")}
    if tree["error"] or len(tree["statements"]) != 1 or kinds - _SELECTS:
        remedy = "write one SELECT, optionally with WITH before it; a query cannot write"
        raise DataError("this is not a single SELECT", where=where, remedy=remedy)
    return tree


def _walk(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON tree."""
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    for inner in tree if isinstance(tree, list) else ():
        yield from _walk(inner)


def _named_files(function: Any) -> Any:
    """Return the file argument of a function that reads files, if it is text."""
    first = function["arguments"][0]["expression"] if function["arguments"] else {}
    is_name = first.get("literal", {}).get("kind") == "STRING"
    return first if is_name and function["function_name"] in _READS else None


def scan(files: Sequence[Path], delimiter: str | None = None) -> str:
    """Return a SELECT of all rows of files; DuckDB infers the types of CSV columns."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        options = ""
        if is_text(file):
            options = f", header=true, sample_size=-1, delim={text(separator(file, delimiter))}"
        groups.setdefault(options, []).append(file)
    return " union all by name ".join(
        f"select * from {'read_csv' if options else 'read_parquet'}"
        f"([{', '.join(map(path_text, group))}], union_by_name=true, "
        f"hive_partitioning=false{options})"
        for options, group in groups.items()
    )


def _stored(name: str, kind: str) -> str:
    """Return the expression of a column, cast to a type that tables support."""
    stored = _STORED.get(kind.partition("(")[0])
    column = quoted(name)
    return f"cast({column} as {stored}) as {column}" if stored and "[" not in kind else column


def quoted(name: str) -> str:
    """Quote a SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _wrong(where: str, message: str) -> DataError:
    line = " ".join(message.partition("\n\nLINE ")[0].split())[:300]
    remedy = "correct the query; it names files as text, relative to the YAML"
    return DataError(line, where=where, remedy=remedy)
