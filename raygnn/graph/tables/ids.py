"""Node ids in tables: integers or text, numbered in order of appearance.

Functions that read a chunk raise DataError with file, row and column for an id that is missing, of
another type, repeated, or unknown.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.arrays import Array, index_type
from raygnn.graph.tables.columns import INTEGER, cast, first, refuse_nulls, shown, to_numpy
from raygnn.graph.tables.description import ROW, NodeTable
from raygnn.graph.tables.reader import Chunk, Connection, TableReader, connect
from raygnn.storage.remote import AnyPath

_ALIKE = "use the same ids for nodes and for edges"
_REMEDY = "ids are integers or text, one for each node"
_ROWS = 1 << 17  # rows of a query's result in memory at once
_HASHED = 64  # estimated bytes of an id in a hash table of DuckDB
_REPEATED = """with twice as (select id, min(rowid) as before from ids group by id
    having count(*) > 1) select ids.rowid, before, id from ids join twice using (id)
    where ids.rowid > before order by ids.rowid limit 1"""


class Ids:
    """Ids of one node type.

    Args:
        values: Arrow array of int64 or large_string. Ids of CSV files are integers if all are
            written as such.
        remedy: for unknown ids.
        count: without values, number of nodes whose ids are their numbers, from 0.
    """

    def __init__(self, ntype: str, values: Any = None, remedy: str = "", count: int | None = None):
        self.ntype, self._remedy = ntype, remedy
        self.values = pa.chunked_array([], pa.int64()) if values is None else values
        self._count = count if values is None else None

    def __len__(self) -> int:
        return self._count or len(self.values)

    def lookup(self, among: Chunk | TableReader, column: str, ends: Any) -> Array:
        """Return the node numbers of the ids ``ends``, int64 ``[n]``. ``among``: the rows that have
        them, for errors."""
        if self._count is None:
            numbers = pc.index_in(ends, value_set=self.values)
        else:
            known = pc.and_(pc.greater_equal(ends, 0), pc.less(ends, self._count))
            numbers = pc.if_else(known, ends, pa.scalar(None, pa.int64()))
        if numbers.null_count:
            row = first(pc.is_null(numbers))
            raise among.error(row, column, *self.unknown(ends[row]))
        return to_numpy(numbers).astype(np.int64)

    def unknown(self, value: object) -> tuple[str, str]:
        """Return message and remedy for an unknown id."""
        remedy = f"add it to the nodes of {self.ntype}, or set missing to drop or add"
        return f"there is no {self.ntype} {shown(value)}", self._remedy or remedy

    def ends(
        self, chunk: Chunk, column: str, missing: str = "refuse", *, nulls: bool = False
    ) -> pa.Array:
        """Return ends of edges, cast to the type of the ids. If ids are integers, other text is
        refused, or null with ``missing: drop``. ``nulls``: True if ends may be null."""
        ends = chunk.columns[column]
        if not nulls:
            refuse_nulls(chunk, column, "fill it in, or drop the row")
        if self._count is None and not len(self.values):
            whole = not chunk.text(column)
            self.values = pa.chunked_array([], pa.int64() if whole else pa.large_string())
        numeric = pa.types.is_int64(self.values.type)
        if not chunk.text(column):
            ends = _integers(chunk, column, ends)
            if numeric:
                return ends
            message = f"{shown(ends[0])} is a number, and the ids of {self.ntype} are text"
            raise chunk.error(0, column, message, _ALIKE)
        if not numeric:
            return ends
        good = pc.match_substring_regex(ends, INTEGER)
        if chunk.csv and missing == "drop":
            ends = pc.if_else(good, ends, pa.scalar(None, ends.type))
        elif not chunk.csv or not pc.all(good, min_count=0).as_py():
            row = first(pc.invert(good)) if chunk.csv else 0
            message = f"{shown(ends[row])} is text, and the ids of {self.ntype} are whole numbers"
            raise chunk.error(row, column, message, _ALIKE)
        return pc.cast(ends, pa.int64())


class StoredIds:
    """Ids of a node type in an Arrow file."""

    def __init__(self, ntype: str, file: Path):
        self.ntype, self.file = ntype, file

    def __len__(self) -> int:
        return len(self.values())

    def values(self) -> pa.ChunkedArray:
        """Return int64 or large_string ``[num]``, mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self.file))).read_all()["id"]

    def ids(self) -> Ids:
        return Ids(self.ntype, self.values())

    def write(self, kind: pa.DataType, arrays: Iterable[pa.Array]) -> None:
        """Store arrays of one type, replacing the file."""
        schema = pa.schema({"id": kind})
        with pa.ipc.new_file(self.file, schema) as writer:
            for array in arrays:
                writer.write_batch(pa.record_batch([array], schema))

    def read(self, table: NodeTable, files: Sequence[AnyPath]) -> list[int]:
        """Read and store the ids of a node table. Returns the number of each file's first row."""
        column = table.id or ROW
        reader = TableReader(files, [column], table.delimiter)
        spill = self.file.with_suffix(".spill")
        with connect(spill, _HASHED * reader.extent()[0]) as database:
            database.execute("create table ids (id bigint)")
            numeric = True
            for chunk in reader.chunks():
                array = _of_nodes(chunk, column)
                if numeric and not pa.types.is_int64(array.type):
                    database.execute("alter table ids alter id type varchar")
                    numeric = False
                database.from_arrow(pa.table({"id": array})).insert_into("ids")
            if again := database.execute(_REPEATED).fetchone():
                row, before, value = again
                message = f"the id {shown(value)} is repeated; it is in {reader.place(before)}, too"
                raise reader.error(row, column, message, "keep one row for each node")
            kind = pa.int64() if numeric else pa.large_string()
            read = database.sql("select id from ids").to_arrow_reader(_ROWS)
            self.write(kind, (batch[0] for batch in read))
        shutil.rmtree(spill, ignore_errors=True)
        return reader.starts


def _of_nodes(chunk: Chunk, column: str) -> pa.Array:
    """Return the ids in a chunk of a node table: int64 or large_string."""
    array = refuse_nulls(chunk, column, "give each node an id")
    if not chunk.text(column):
        array = _integers(chunk, column, array)
    elif pc.any(empty := pc.equal(array, "")).as_py():
        raise chunk.error(first(empty), column, "the id is empty text", "give each node an id")
    elif chunk.csv and pc.all(pc.match_substring_regex(array, INTEGER)).as_py():
        array = pc.cast(array, pa.int64())
    return array


class Ends:
    """Ends of edges, in two ``columns``, looked up together in the ``ids`` of their nodes. Must be
    closed. ``nulls``: True if the last column may have nulls, in rows that are no edges."""

    def __init__(
        self,
        columns: Sequence[str],
        ids: Sequence[Ids],
        missing: str,
        spill: Path,
        *,
        nulls: bool = False,
    ):
        self.columns, self.ids, self._missing = columns, ids, missing
        self._nulls = [*[False] * (len(columns) - 1), nulls]
        self._database: Connection = connect(spill, _HASHED * max(map(len, ids)))

    def close(self) -> None:
        self._database.close()

    def add(self, chunk: Chunk) -> None:
        """Append the ends of a chunk; raises DataError as `Ids.ends` does."""
        both = zip(self.columns, self.ids, self._nulls, strict=True)
        ends = [one.ends(chunk, column, self._missing, nulls=may) for column, one, may in both]
        self._create_table()
        columns = {f"end{at}": array for at, array in enumerate(ends)}
        self._database.from_arrow(pa.table(columns)).insert_into("ends")

    def numbers(self, reader: TableReader) -> Iterator[list[Array]]:
        """Yield the node numbers of each end for some rows at a time, in row order. Numbers below 0
        mark rows to drop. Raises DataError for unknown ids, unless they are to be dropped."""
        self._register()
        found, row = [f"found{at}" for at in range(len(self.ids))], 0
        for at, table in enumerate(found):  # in turn: only one hash table at a time
            number = f"coalesce(number, if(end{at} is null, -2, -1)) as {table}"
            join = f"ends left join ids{at} on end{at} = ids{at}.id order by ends.rowid"
            self._database.execute(f"create table {table} as select {number} from {join}")
        query = f"select * from {' positional join '.join(found)}"
        for batch in self._database.sql(query).to_arrow_reader(_ROWS):
            numbers = [to_numpy(array) for array in batch.columns]
            for at, one in enumerate(self.ids):
                if self._missing != "drop" and (bad := numbers[at] == -1).any():
                    row += first(bad)
                    value = f"select end{at} from ends where rowid = {row}"
                    (unknown,) = self._database.cursor().execute(value).fetchone()
                    raise reader.error(row, self.columns[at], *one.unknown(unknown))
            row += len(batch)
            yield numbers

    def learn(self, ntype: str) -> pa.ChunkedArray:
        """Add the unknown ids of a type, in order of rows and columns. Return all its ids."""
        self._register()
        every = [at for at, one in enumerate(self.ids) if one.ntype == ntype]
        place = f"{len(self.ids)} * rowid"
        ends = " union all ".join(
            f"select end{at} as id, {place} + {at} as place from ends where end{at} is not null"
            for at in every
        )
        query = f"""select id from ({ends}) anti join ids{every[0]} using (id)
            group by id order by min(place)"""
        read, one = self._database.sql(query).to_arrow_reader(_ROWS), self.ids[every[0]]
        new = [batch[0] for batch in read]
        one.values = pa.chunked_array([*one.values.chunks, *new])
        return one.values

    def _create_table(self) -> None:
        whole = (pa.types.is_int64(one.values.type) for one in self.ids)
        kinds = (f"end{at} {'bigint' if one else 'varchar'}" for at, one in enumerate(whole))
        self._database.execute(f"create table if not exists ends ({', '.join(kinds)})")

    def _register(self) -> None:
        self._create_table()
        for at, one in enumerate(self.ids):
            numbers = np.arange(len(one), dtype=index_type(len(one)))
            self._database.register(f"ids{at}", pa.table({"id": one.values, "number": numbers}))


def _integers(chunk: Chunk, column: str, array: pa.Array) -> pa.Array:
    if not pa.types.is_integer(array.type):
        raise chunk.error(0, column, f"the column is {array.type}", _REMEDY)
    return cast(chunk, column, array, pa.int64(), _REMEDY)
