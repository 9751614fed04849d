"""Tables from a database: their queries run there, through ADBC, once per graph and process. The
results are Parquet files, which digest, size estimate and rows come from.
"""

from __future__ import annotations

import importlib
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raygnn.config.graph import GraphConfig, TablesGraph
from raygnn.config.places import HIDDEN
from raygnn.config.values import DATABASE, NO_DATABASE
from raygnn.errors import CapabilityError, ConfigError, DataError
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables.description import Description, read_description
from raygnn.graph.tables.queries import Queries, Query, named, quoted, scan
from raygnn.util.files import storage_errors

_URL = re.compile(r"sqlite:///.+|postgres(?:ql)?://(?:[^:/?#@]*(?::([^/?#@]*))?@)?[^#@]*")
_URLS = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE or sqlite:///FILE"
# Timeouts for a server that does not respond, in seconds and ms; the URL can set others. A running
# query has no timeout.
_LIMITS = {"connect_timeout": 10, "keepalives_idle": 30, "tcp_user_timeout": 60_000}
_READ_ONLY = "set transaction isolation level repeatable read, read only"
_BEGIN = {
    "postgresql": (_READ_ONLY, "set local lock_timeout = '60s'"),
    "sqlite": ("pragma busy_timeout = 60000",),
}
# Size of a batch, in bytes or rows; SQLite's driver infers types from the first one
_BATCH = {
    "postgresql": {"adbc.postgresql.batch_size_hint_bytes": str(1 << 24)},
    "sqlite": {"adbc.sqlite.query.batch_rows": str(1 << 14)},
}
_READ: dict[int, Description] = {}  # by id() of the graph, removed with it


def description_of(graph: TablesGraph) -> Description:
    """Return the description of a graph, in which tables of databases have files of their rows.
    Raises as `read_description`, `Database` and `Query.run` do."""
    if (found := _READ.get(id(graph))) is not None:
        return found
    found = read_description(Path(graph.path))
    if any(one.url for one in found.tables.values()):
        place = TemporaryDirectory(prefix="raygnn-")
        weakref.finalize(graph, place.cleanup)
        with storage_errors(Path(place.name), DataError, "set TMPDIR to a larger disk"):
            found = _READ[id(graph)] = _read(found, Path(graph.path), Path(place.name))
        weakref.finalize(graph, _READ.pop, id(graph))
    return found


def _read(described: Description, file: Path, place: Path) -> Description:
    """Return the description with the rows of databases in files below ``place``."""
    results, databases = dict[str, Path](), dict[str, Database]()
    with ExitStack() as stack:
        for key, table in described.tables.items():
            if (url := table.url) is None:
                continue
            if url not in databases:
                databases[url] = Database(url, file.parent, f"{file}: {key}.url")
                stack.callback(databases[url].connection.close)
            results[key] = place / f"{len(results)}.parquet"
            databases[url].write(str(table.sql), results[key], f"{file}: {key}.sql")
    return described.reading(results)


@contextmanager
def selected(graph: GraphConfig, sql: str, url: str | None, key: str) -> Iterator[Path]:
    """Yield a temporary Parquet file with the rows of a SELECT, ordered by all columns. The query
    can name tables of the graph, and files relative to its YAML. ``url``: database that runs it,
    None = DuckDB; ``key``: its section of the configuration."""
    assert isinstance(graph, TablesGraph)
    file, where = Path(graph.path), f"{key}.sql"
    with TemporaryDirectory(prefix="raygnn-") as place:
        result = Path(place) / "rows.parquet"
        if url is None:
            Queries(file, description_of(graph)).select(sql, where).run(result)
        else:
            database = Database(url, file.parent, f"{key}.url")
            with closing(database.connection):
                database.write(sql, result, where)
        with named({result: f"the query of {key}"}):
            yield result


def export(url: str, base: Path, place: Path) -> dict[Path, dict[str, str]]:
    """Write the tables of a database that have rows to a directory, without columns of unsupported
    types. Returns each file with its ``url`` and ``sql`` for a description at ``base``; raises as
    `Database` does."""
    if not DATABASE.fullmatch(url):
        raise ConfigError(NO_DATABASE[0], where="raygnn tables", remedy=NO_DATABASE[1])
    if path := url.partition("sqlite:///")[2]:
        url = f"sqlite:///{path if os.path.isabs(path) else os.path.relpath(path, base)}"
    files = dict[Path, dict[str, str]]()
    database = Database(url, base, url)
    with closing(database.connection) as connection:
        with database.errors(url, "grant the user the right to list tables"):
            listed = connection.adbc_get_objects(depth="tables", table_types_filter=["table"])
            catalogs = listed.read_all().to_pylist()
        for schema in (one for catalog in catalogs for one in catalog["catalog_db_schemas"] or ()):
            space = schema["db_schema_name"] or "public"
            prefix = "" if space == "public" else f"{quoted(space)}."
            names = sorted(table["table_name"] for table in schema["db_schema_tables"] or ())
            for name in (one for one in names if not one.startswith("sqlite_")):
                sql = f"select * from {prefix}{quoted(name)}"
                fields = next(database.batches(f"{sql} limit 0", url))
                kept = [quoted(one.name) for one in fields if _stored(one.type) is not None]
                sql = sql if len(kept) == len(fields) else sql.replace("*", ", ".join(kept), 1)
                file = place / str(len(files)) / f"{name.replace('/', '_')}.parquet"
                file.parent.mkdir(exist_ok=True)
                if database.read(sql, file, f"{url}: {name}"):
                    files[file] = {"url": url, "sql": sql}
    return files


class Database:
    """A ``connection`` to a database, in a read-only transaction. ``url``: ``env:NAME``, or
    ``sqlite:///FILE`` relative to ``base``. Raises DataError or CapabilityError if it fails."""

    def __init__(self, url: str, base: Path, where: str):
        name = url.removeprefix("env:")
        if url != name and not (url := os.environ.get(name, "")):
            message = f"the environment variable {name} is not set"
            raise DataError(message, where=where, remedy=f"set it to the URL: {_URLS}")
        if not (match := _URL.fullmatch(url)) or re.search("%(?![0-9a-fA-F]{2})", url):
            remedy = f"expected {_URLS}; write @ / # % in a password as %40 %2F %23 %25"
            raise DataError(f"{name} is not a database URL", where=where, remedy=remedy)
        kind = url.partition(":")[0]
        if kind == "sqlite":
            check_file(file := base.absolute() / url.removeprefix("sqlite:///"))
            uri = f"{file.as_uri()}?mode=ro"
        else:
            kind, given = "postgresql", dict(parse_qsl(url.partition("?")[2]))
            limits = urlencode({key: value for key, value in _LIMITS.items() if key not in given})
            uri = f"{url}{'&' if '?' in url else '?'}{limits}"
        secrets = [uri, url, match[1] or "", *re.findall("password=([^&]+)", url)]
        self._secrets = {text for one in secrets for text in (one, unquote(one)) if text}
        try:
            self._dbapi = importlib.import_module(f"adbc_driver_{kind}.dbapi")
        except ImportError:
            message, remedy = f"adbc-driver-{kind} is missing", 'pip install "raygnn[databases]"'
            raise CapabilityError(message, where=where, remedy=remedy) from None
        self._options = {"adbc_stmt_kwargs": _BATCH[kind]}
        with self.errors(where, "check the URL, user and password, and that the server runs"):
            self.connection = self._dbapi.connect(uri)
            try:
                with self.connection.cursor() as cursor:
                    for statement in _BEGIN[kind]:
                        cursor.execute(statement)
            except BaseException:
                self.connection.close()
                raise

    def write(self, sql: str, result: Path, where: str) -> None:
        """Write the rows of a query as Parquet, ordered by all columns; raises as `read` does, and
        DataError if there are none."""
        raw = result.with_suffix(".raw.parquet")
        self.read(sql, raw, where)
        Query(where, scan([raw]), {}, [raw]).run(result)
        raw.unlink()

    def read(self, sql: str, file: Path, where: str) -> int:
        """Write the rows of a query as Parquet, batch by batch. Returns their number; raises
        DataError if the query fails or writes, or a column's type is unsupported."""
        batches, rows, fields = self.batches(sql, where), 0, list[tuple[str, pa.DataType]]()
        for name, kind in ((field.name, field.type) for field in next(batches)):
            fields.append((name, _stored(kind)))
            if fields[-1][1] is None:
                kind = getattr(kind, "type_name", kind)
                message = f"column {name!r} has the unsupported type {kind}"
                remedy = f"cast it in the query, such as cast({name} as text), or omit it"
                raise DataError(message, where=where, remedy=remedy)
        schema = pa.schema(fields)
        with pq.ParquetWriter(file, schema) as writer:
            for batch in batches:
                columns = [
                    array if array.type == to else pc.cast(getattr(array, "storage", array), to)
                    for array, to in zip(batch.columns, schema.types, strict=True)
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
                rows += batch.num_rows
        return rows

    def batches(self, sql: str, where: str) -> Iterator[Any]:
        """Yield the schema of a query, then its rows."""
        remedy = "correct the query: one SELECT that does not write; cast columns of mixed types"
        with self.errors(where, remedy), self.connection.cursor(**self._options) as cursor:
            # within brackets only a SELECT is valid; the line break ends a comment
            cursor.execute(f"select * from (\n{sql.strip().rstrip(';')}\n) as q")
            reader = cursor.fetch_record_batch()
            yield reader.schema
            yield from reader

    @contextmanager
    def errors(self, where: str, remedy: str) -> Iterator[None]:
        """Raise DataError with the database's message, without the password."""
        try:
            yield
        except (self._dbapi.Error, pa.ArrowException, OSError) as error:
            line = str(error)
            for secret in sorted(self._secrets, key=len, reverse=True):
                line = line.replace(secret, HIDDEN)
            line = re.split(r"\n(?:LINE |\s*[Qq]uery)", line)[0]
            line = re.sub(r"(?s)^.*(ERROR|FATAL|to \w+ query): |^\w+: (\[\w+\] )?", "", line)
            raise DataError(" ".join(line.split())[:300], where=where, remedy=remedy) from None


def _stored(kind: pa.DataType) -> pa.DataType | None:
    """Return the type to store a column as: decimals as floats, timestamps in UTC without a time
    zone; None for unsupported types."""
    if getattr(kind, "type_name", None) == "numeric":  # arrives as text, of any precision
        return pa.float64()
    if isinstance(kind, pa.BaseExtensionType):
        is_text, is_uuid = pa.types.is_string(kind.storage_type), kind == pa.uuid()
        return kind.storage_type if is_text else kind if is_uuid else None
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit)
    if pa.types.is_list(kind) and _stored(kind.value_type) != kind.value_type:
        return None
    return None if pa.types.is_interval(kind) or pa.types.is_duration(kind) else kind
