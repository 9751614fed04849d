"""Merges the ranks' predictions into one file, and checks its path."""

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
from raygnn.util.files import is_vacant, replacing, storage_errors

_SUFFIX = ".parquet"
OTHER = "choose another --out"
_OF_ROWS = ("row", "node", "time", "split", "label")
_ROWS = 2**17  # rows of all files in memory at once
_VALUES = 2**24  # values of all files in memory at once, such as scores of many classes
_FEWEST = 2**6  # rows of each file in memory
_BUFFER = 2**20  # bytes per read of a column


def free_file(out: str | PathLike[str], overwrite: bool) -> Path:
    """Return the absolute path of ``--out``; raises InputError if it cannot be written."""
    file = Path(out).expanduser().absolute()
    if file.suffix not in ("", _SUFFIX):
        what, remedy = f"rows are written as {_SUFFIX}", f"name it {file.stem}{_SUFFIX}"
        raise InputError(what, where=str(file), remedy=remedy)
    with storage_errors(file, InputError, OTHER):  # such as a name that is too long
        foreign = file.exists() and not file.is_file()
        check_free(file, overwrite, "this is a directory or a device" if foreign else None)
    return file


def check_free(path: Path, overwrite: bool, foreign: str | None) -> None:
    """Raise InputError unless a path can be written. ``foreign``: why the existing path must not be
    replaced; None = with ``overwrite`` it may be."""
    what, remedy = foreign, OTHER
    with storage_errors(path, InputError, OTHER):
        if not path.parent.is_dir():
            what, remedy = f"there is no directory {path.parent}", f"create it, or {OTHER}"
        elif foreign is None and not overwrite and not is_vacant(path):
            what, remedy = "this exists already", f"{OTHER}, or pass --overwrite"
        elif foreign is None and (why := unwritable(path.parent)) is not None:
            what = f"it cannot be written: {why}"
    if what is not None:
        raise InputError(what, where=str(path), remedy=remedy)


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
        place: directory of the ranks' files.
        found: rank 0's result.
        beside: CSV or Parquet with as many rows, whose columns replace those of ids, times, splits
            and labels.
    """
    files = [place / f"rank-{rank}.parquet" for rank in range(found["workers"])]
    files = [each for each in files if each.exists()]
    merged = file if beside is None else place / "merged.parquet"
    with show.stage("merge"), storage_errors(file, InputError, OTHER):
        with replacing(merged) as out:
            rows = merge_files(files, out, key, names)
            if rows != found["rows"]:
                what = f"the workers wrote {found['rows']:,} rows, but {rows:,} were found"
                remedy = "check that all nodes mount the same storage"
                raise TrainingError(what, where=str(place), remedy=remedy)
            free_file(file, overwrite)  # another process may have created it
        if beside is not None:
            with replacing(file) as out:
                _put_beside(beside, merged, out)


def _put_beside(given: Path, merged: Path, out: BinaryIO) -> None:
    """Write the columns of the given rows, and beside them the columns of the predictions."""
    from raygnn.graph.tables.reader import TableReader  # which imports DuckDB

    reader = TableReader([given], [])
    reader.columns = reader.names(given)
    with pq.ParquetFile(merged) as source, ExitStack() as opened:
        kept = [name for name in source.schema_arrow.names if not name.startswith(_OF_ROWS)]
        batches, writer, held = source.iter_batches(_ROWS, columns=kept), None, None
        for chunk in reader.chunks():
            while held is None or held.num_rows < chunk.num:
                if (batch := next(batches, None)) is None:
                    raise _changed(given)
                more = [pa.Table.from_batches([batch])]
                held = pa.concat_tables(more if held is None else [held, *more])
            table = pa.table(chunk.columns)
            for name in kept:
                table = table.append_column(name, held.column(name).slice(0, chunk.num))
            held = held.slice(chunk.num)
            writer = writer or opened.enter_context(pq.ParquetWriter(out, table.schema))
            writer.write_table(table)
        if reader.num != source.metadata.num_rows:
            raise _changed(given)


def _changed(given: Path) -> InputError:
    what, remedy = "the file changed while its rows were predicted", "start again"
    return InputError(what, where=str(given), remedy=remedy)


def rows_file(rows: str | PathLike[str] | None, given: str) -> Path | None:
    """Return the file of ``--rows``; raises InputError if it does not exist, or with an option
    ``given`` that it excludes."""
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
    """Raise InputError if a table has a column with a name of the predictions."""
    from raygnn.graph.tables.reader import TableReader

    names = TableReader([file], []).names(file)
    taken = [name for name in names if re.fullmatch(r"prediction|scores|probability(_\d+)?", name)]
    if taken:
        what, remedy = f"it has a column {taken[0]!r} already", "rename it, or leave it out"
        raise InputError(what, where=f"--rows {file}", remedy=remedy)


def merge_files(
    files: Sequence[Path], out: BinaryIO, key: str, names: Mapping[str, Any] | None = None
) -> int:
    """Merge Parquet files with one schema, each ascending by the column ``key``, into ``out``, and
    return the number of rows.

    Args:
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
            # rows of a file that are not in memory are above its last one that is
            counts = [pc.less_equal(table[key], min(lasts)).to_numpy().sum() for table in held]
            merged = pa.concat_tables(map(pa.Table.slice, held, repeat(0), counts)).sort_by(key)
            held = [*map(pa.Table.slice, held, counts)]
            for name, array in named.items():
                at = schema.get_field_index(name)
                merged = merged.set_column(at, schema.field(at), array.take(merged[name]))
            writer.write_table(merged)
            rows += merged.num_rows


def _width(source: pq.ParquetFile) -> int:
    """Return the number of values in a row of a file, including values in lists."""
    if not source.metadata.num_rows:
        return 0
    group = source.metadata.row_group(0)
    values = sum(group.column(i).num_values for i in range(group.num_columns))
    return int(values) // max(1, group.num_rows)
