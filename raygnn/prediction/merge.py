"""One file of predictions from those of all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raygnn.config.places import unwritable
from raygnn.errors import InputError, TrainingError
from raygnn.runs.display import Display
from raygnn.util.files import replacing, storage_errors

_SUFFIX = ".parquet"
OTHER = "choose another --out"
_OF_ROWS = ("row", "node", "time", "split", "label")
_ROWS = 2**17  # in memory at once, of all files
_VALUES = 2**24  # likewise, for rows with many values, such as the scores of many classes
_FEWEST = 2**6  # rows of each file
_BUFFER = 2**20  # bytes per read of a column


def free_file(file: Path, overwrite: bool) -> Path:
    """Return the file of ``--out``; raises InputError if it cannot be written."""
    what, remedy = None, OTHER
    if file.suffix not in ("", _SUFFIX):
        what, remedy = f"a {_SUFFIX} file is written", f"name it {file.stem}{_SUFFIX}"
        raise InputError(what, where=str(file), remedy=remedy)
    with storage_errors(file, InputError, OTHER):  # such as a name that is too long
        if not file.parent.is_dir():
            what, remedy = f"there is no directory {file.parent}", f"make it, or {OTHER}"
        elif file.exists() and not file.is_file():
            what = "this is no file but a directory or a device"
        elif file.exists() and not overwrite:
            what, remedy = "this file is there already", f"{OTHER}, or pass --overwrite"
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
    with show.stage("merge"), storage_errors(file, InputError, OTHER):
        with replacing(merged) as out:
            rows = merge_files(files, out, key, names)
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


def rows_file(rows: str | PathLike[str] | None, given: str) -> Path | None:
    """Return the file of ``--rows``; raises InputError if there is none, or for an option that
    does not go with it."""
    from raygnn.graph.tables.reader import is_table  # which imports DuckDB

    if rows is None:
        return None
    file = Path(rows).expanduser().absolute()
    if given:
        what = "all rows of the file are used, and they are in no split"
        raise InputError(what, where=f"{given} with --rows", remedy="leave it out")
    if not file.is_file() or not is_table(file):
        what = "there is no such file, CSV or Parquet"
        raise InputError(what, where=f"--rows {file}", remedy="name one")
    return file


def check_names(file: Path) -> None:
    """Raise InputError unless predictions fit beside the columns of a table."""
    from raygnn.graph.tables.reader import TableReader

    names = TableReader([file], []).names(file)
    taken = [name for name in names if re.fullmatch(r"prediction|scores|probability(_\d+)?", name)]
    if taken:
        what, remedy = f"it has a column {taken[0]!r} already", "rename it, or leave it out"
        raise InputError(what, where=f"--rows {file}", remedy=remedy)


def merge_files(
    files: Sequence[Path], out: BinaryIO, key: str, names: Mapping[str, Any] | None = None
) -> int:
    """Merge Parquet files with one schema, each ascending by the column ``key``; return the number
    of rows.

    Args:
        out: takes the Parquet file.
        names: column of numbers → pyarrow array of their names; missing columns are ignored.

    Raises:
        OSError: a file cannot be read or written.
    """
    if not files:
        return 0
    rows = 0
    with ExitStack() as opened:
        sources = [opened.enter_context(pq.ParquetFile(f, buffer_size=_BUFFER)) for f in files]
        most = min(_ROWS, _VALUES // max(1, *map(_width, sources)))
        batches = [s.iter_batches(max(_FEWEST, most // len(files))) for s in sources]
        held = [source.schema_arrow.empty_table() for source in sources]
        schema = sources[0].schema_arrow
        named = {name: array for name, array in (names or {}).items() if name in schema.names}
        for name, array in named.items():
            schema = schema.set(schema.get_field_index(name), pa.field(name, array.type))
        writer = opened.enter_context(pq.ParquetWriter(out, schema))
        while True:
            for at, rest in enumerate(batches):
                while not held[at].num_rows and (batch := next(rest, None)) is not None:
                    held[at] = pa.Table.from_batches([batch])
            lasts = [table[key][-1].as_py() for table in held if table.num_rows]
            if not lasts:
                return rows
            # what is not in memory of a file is above its last row there
            counts = [pc.less_equal(table[key], min(lasts)).to_numpy().sum() for table in held]
            merged = pa.concat_tables(map(pa.Table.slice, held, repeat(0), counts)).sort_by(key)
            held = [*map(pa.Table.slice, held, counts)]
            for name, array in named.items():
                at = schema.get_field_index(name)
                merged = merged.set_column(at, schema.field(at), array.take(merged[name]))
            writer.write_table(merged)
            rows += merged.num_rows


def _width(source: pq.ParquetFile) -> int:
    """Return the number of values in a row of a file, including those of lists."""
    if not source.metadata.num_rows:
        return 0
    group = source.metadata.row_group(0)
    values = sum(group.column(i).num_values for i in range(group.num_columns))
    return int(values) // max(1, group.num_rows)
