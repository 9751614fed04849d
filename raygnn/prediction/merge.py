"""Files that are sorted by an id, merged into one that is, with little of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_ROWS = 2**17  # in memory, of all files together
_VALUES = 2**24  # likewise: fewer rows where each has many, as of the scores of many classes
_FEWEST = 2**6  # rows of each
_BUFFER = 2**20  # bytes that a column of a file is read in


def merge(
    files: Sequence[Path], out: BinaryIO, key: str, names: Mapping[str, Any] | None = None
) -> int:
    """Merge Parquet files with one schema, each ascending by the column ``key``.

    Args:
        out: takes the Parquet file.
        names: column of numbers → pyarrow array, what to write in place of each; columns that the
            files do not have are passed over.

    Returns:
        The number of rows. Of no files there are none, and nothing is written.

    Raises:
        OSError: a file cannot be read or written.
    """
    with ExitStack() as opened:
        sources = [
            opened.enter_context(pq.ParquetFile(file, buffer_size=_BUFFER)) for file in files
        ]
        most = min(_ROWS, _VALUES // max(1, max(map(_width, sources), default=1)))
        batch = max(_FEWEST, most // max(1, len(files)))
        inputs = [_Input(source.iter_batches(batch_size=batch), key) for source in sources]
        if not sources:
            return 0
        schema = sources[0].schema_arrow
        named = {
            schema.get_field_index(column): values
            for column, values in (names or {}).items()
            if column in schema.names
        }
        for place, values in named.items():
            schema = schema.set(place, pa.field(schema.field(place).name, values.type))
        writer = opened.enter_context(pq.ParquetWriter(out, schema))
        rows = 0
        while pending := [source for source in inputs if source.fill()]:
            # whatever a file still has is above the last id that it has in memory
            bound = min(source.last for source in pending)
            table = pa.concat_tables(source.up_to(bound) for source in pending)
            table = table.take(pc.sort_indices(table[key]))
            for place, values in named.items():
                called = values.take(table.column(place))
                table = table.set_column(place, schema.field(place), called)
            writer.write_table(table)
            rows += table.num_rows
        return rows


def _width(source: pq.ParquetFile) -> int:
    """Numbers and texts in a row of a file, those of its lists included."""
    if not source.metadata.num_row_groups:
        return 0
    group = source.metadata.row_group(0)
    values = sum(group.column(i).num_values for i in range(group.num_columns))
    return int(values) // max(1, group.num_rows)


class _Input:
    """One file, of which a batch is in memory."""

    def __init__(self, batches: Iterator[pa.RecordBatch], key: str):
        self._batches = batches
        self._key = key
        self._held: pa.Table | None = None

    def fill(self) -> bool:
        """See that there are rows in memory; False at the end of the file."""
        while self._held is None or not self._held.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self._held = pa.Table.from_batches([batch])
        return True

    @property
    def last(self) -> int:
        """The highest id in memory."""
        assert self._held is not None
        return int(self._held[self._key][-1].as_py())

    def up_to(self, bound: int) -> pa.Table:
        """Take the rows with ids up to this one out of memory."""
        assert self._held is not None
        count = int(pc.sum(pc.less_equal(self._held[self._key], bound)).as_py())
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken
