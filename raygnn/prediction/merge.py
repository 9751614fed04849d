"""One file of predictions from those of all ranks."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raygnn.config.places import unwritable
from raygnn.errors import InputError, TrainingError
from raygnn.runs.display import Display
from raygnn.util.files import replacing, storage_errors

_SUFFIX = ".parquet"
_OTHER = "choose another --out"
_OF_ROWS = ("row", "node", "time", "split", "label")
_ROWS = 2**17  # in memory at once
_VALUES = 2**24  # likewise, for rows with many values, such as the scores of many classes


def free_file(file: Path, overwrite: bool) -> Path:
    """Return the file of ``--out``; raises InputError if it cannot be written."""
    what, remedy = None, _OTHER
    if file.suffix not in ("", _SUFFIX):
        what, remedy = f"a {_SUFFIX} file is written", f"name it {file.stem}{_SUFFIX}"
        raise InputError(what, where=str(file), remedy=remedy)
    with storage_errors(file, InputError, _OTHER):  # such as a name that is too long
        if not file.parent.is_dir():
            what, remedy = f"there is no directory {file.parent}", f"make it, or {_OTHER}"
        elif file.exists() and not file.is_file():
            what = "this is no file but a directory or a device"
        elif file.exists() and not overwrite:
            what, remedy = "this file is there already", f"{_OTHER}, or pass --overwrite"
        elif (why := unwritable(file.parent)) is not None:
            what = f"it cannot be written: {why}"
    if what is not None:
        raise InputError(what, where=str(file), remedy=remedy)
    return file


def merge_rows(
    place: Path,
    found: dict[str, Any],
    key: str,
    file: Path,
    overwrite: bool,
    show: Display,
    names: Mapping[str, Any] | None = None,
    beside: Path | None = None,
) -> None:
    """Merge the ranks' rows into one sorted file, with names in place of numbers.

    Args:
        place: of the ranks' files.
        found: rank 0's result.
        beside: CSV or Parquet of as many rows, whose columns the file has in place of what tells
            rows apart.
    """
    files = [place / f"rank-{rank}.parquet" for rank in range(found["workers"])]
    files = [each for each in files if each.exists()]
    merged = file if beside is None else place / "merged.parquet"
    with show.stage("merge"), storage_errors(file, InputError, _OTHER):
        with replacing(merged) as out:
            rows = merge_files(files, out, key, place / "spill", names)
            if rows != found["rows"]:
                raise TrainingError(
                    f"the workers wrote {found['rows']:,} rows, and {rows:,} are there",
                    where=str(place),
                    remedy="see that all nodes mount the same storage",
                )
            free_file(file, overwrite)  # again, since it may have been created meanwhile
        if beside is not None:
            with replacing(file) as out:
                _put_beside(beside, merged, out)


def _put_beside(given: Path, merged: Path, out: BinaryIO) -> None:
    """Write the columns of the rows that were given, and beside them those of the predictions."""
    from raygnn.graph.tables.reader import TableReader  # which imports DuckDB

    reader = TableReader([given], [])
    reader.columns = reader.names(given)
    with pq.ParquetFile(merged) as source, ExitStack() as opened:
        kept = [name for name in source.schema_arrow.names if not name.startswith(_OF_ROWS)]
        batches, writer, held = source.iter_batches(_ROWS, columns=kept), None, None
        for chunk in reader.chunks():
            while held is None or held.num_rows < chunk.num:
                batch = next(batches, None)
                if batch is None:
                    raise _changed(given)
                more = pa.Table.from_batches([batch])
                held = more if held is None else pa.concat_tables([held, more])
            table = pa.table(chunk.columns)
            for name in kept:
                table = table.append_column(name, held.column(name).slice(0, chunk.num))
            held = held.slice(chunk.num)
            writer = writer or opened.enter_context(pq.ParquetWriter(out, table.schema))
            writer.write_table(table)
        if reader.num != source.metadata.num_rows:
            raise _changed(given)


def _changed(given: Path) -> InputError:
    what, remedy = "the file changed while its rows were predicted", "start again once it is whole"
    return InputError(what, where=str(given), remedy=remedy)


def check_rows(file: Path) -> None:
    """Raise InputError unless this is a table beside whose columns predictions fit."""
    from raygnn.graph.tables.reader import TableReader, is_table  # which imports DuckDB

    if not file.is_file() or not is_table(file):
        what = "there is no such file, CSV or Parquet"
        raise InputError(what, where=f"--rows {file}", remedy="name one")
    names = TableReader([file], []).names(file)
    taken = [name for name in names if re.fullmatch(r"prediction|scores|probability(_\d+)?", name)]
    if taken:
        what, remedy = f"it has a column {taken[0]!r} already", "rename it, or leave it out"
        raise InputError(what, where=f"--rows {file}", remedy=remedy)


def merge_files(
    files: Sequence[Path],
    out: BinaryIO,
    key: str,
    spill: Path,
    names: Mapping[str, Any] | None = None,
) -> int:
    """Merge Parquet files with one schema into one, ascending by the column ``key``.

    Args:
        out: takes the Parquet file.
        spill: directory for rows that do not fit into memory.
        names: column of numbers → pyarrow array of their names; missing columns are ignored.

    Returns:
        The number of rows; without files 0, and nothing is written.

    Raises:
        OSError: a file cannot be read or written.
    """
    import duckdb

    from raygnn.graph.tables.duck import connect, path_text

    if not files:
        return 0
    query = f'select * from read_parquet([{", ".join(map(path_text, files))}]) order by "{key}"'
    rows = 0
    try:
        with connect(spill) as connection:
            most = min(_ROWS, _VALUES // max(1, *map(_width, files)))
            reader = connection.sql(query).to_arrow_reader(most)
            schema, named = reader.schema, {**(names or {})}
            for name in named.keys() & {*schema.names}:
                place = schema.get_field_index(name)
                schema = schema.set(place, pa.field(name, named[name].type))
            with pq.ParquetWriter(out, schema) as writer:
                for batch in reader:
                    columns = zip(schema.names, batch.columns, strict=True)
                    arrays = [named[n].take(array) if n in named else array for n, array in columns]
                    writer.write_table(pa.table(arrays, schema=schema))
                    rows += batch.num_rows
    except duckdb.Error as error:
        raise OSError(errno.EIO, " ".join(str(error).split())[:300]) from error
    return rows


def _width(file: Path) -> int:
    """Return the number of values in a row of a Parquet file, including those of lists."""
    facts = pq.read_metadata(file)
    if not facts.num_rows:
        return 0
    group = facts.row_group(0)
    values = sum(group.column(i).num_values for i in range(group.num_columns))
    return int(values) // max(1, group.num_rows)
