"""What is to be predicted of the rows of a table, and which rows are for training: of nodes and
of edges alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.graph.data import MASKS, SPLITS
from raygnn.graph.tables import codes, shares
from raygnn.graph.tables.codes import Classes
from raygnn.graph.tables.columns import Array, numbers
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.reader import Chunk, Reader
from raygnn.graph.tables.spec import Target

_CODES = {split: code for code, split in enumerate(SPLITS)}


class Targets:
    """Labels and splits of the rows of one table.

    Args:
        of: what a row is, for errors: ``node`` or ``edge``.
        vocabulary: the classes that 0, 1, … are to stand for; None = those of the table, sorted.

    Attributes:
        columns: those that it reads.
        names: array → what its codes stand for; filled by `take`.
    """

    def __init__(self, table: Target, of: str, vocabulary: Sequence[Any] | None = None):
        self.table, self.of = table, of
        self.names: dict[str, list[Any]] = {}
        masks = table.masks
        columns = [table.label, table.split]
        columns += [masks.train, masks.val, masks.test] if masks else []
        self.columns = [column for column in columns if column is not None]
        self._label: Classes | _Numbers | None = None
        if table.label is not None:
            self._label = (
                _Numbers(table.label)
                if table.label_kind == "number"
                else Classes(table.label, vocabulary)
            )
        self._splits = Growing(np.int8)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows.

        Raises:
            DataError: naming file, row and column.
        """
        if self._label is not None:
            self._label.add(chunk)
        if self.table.split is not None:
            words = self.table.split_words
            self._splits.append(codes.splits(chunk, self.table.split, words, _CODES))
        elif self.table.masks is not None:
            self._splits.append(self._masked(chunk))

    def take(self, num: int, reader: Reader) -> dict[str, Array]:
        """``label``, and the masks bool ``[N]``, as far as the table gives them.

        Classes are int64 ``[N]``, -1 = unknown; numbers float32 ``[N]``, NaN = unknown. Rows that
        were never added, up to ``num``, have no label and are in no split.

        Raises:
            DataError: a row is in a split and has no label, or a class is not in the vocabulary.
        """
        data: dict[str, Array] = {}
        unknown = None
        if isinstance(self._label, _Numbers):
            data["label"] = self._label.take(num)
            unknown = np.isnan(data["label"])
        elif self._label is not None:
            data["label"], self.names["label"] = self._label.take(reader, num)
            unknown = data["label"] < 0
        split = self._drawn(num, unknown, reader)
        if split is not None:
            data |= {mask: split == code for code, mask in enumerate(MASKS)}
        return data

    def _masked(self, chunk: Chunk) -> Array:
        """Which split each row is in: int8 ``[n]``, -1 = none."""
        masks = self.table.masks
        assert masks is not None
        found = np.full(chunk.num, -1, np.int8)
        for code, column in enumerate((masks.train, masks.val, masks.test)):
            if column is None:
                continue
            mask = codes.truths(chunk, column)
            both = mask & (found >= 0)
            if both.any():
                row = int(np.argmax(both))
                what = f"the {self.of} is in {SPLITS[code]} and in {SPLITS[found[row]]}"
                raise chunk.error(row, column, what, "put it in one split at most")
            found[mask] = code
        return found

    def _drawn(self, num: int, unknown: Array | None, reader: Reader) -> Array | None:
        """Which split each row is in."""
        if self.table.splits is not None:
            found = shares.draw(self.table.splits, num)
            if unknown is not None:
                found[unknown] = -1
            return found
        if self.table.split is None and self.table.masks is None:
            return None
        self._splits.pad(num, -1)
        found = self._splits.take()
        if unknown is not None and (bad := (found >= 0) & unknown).any():
            assert self.table.label is not None
            row = int(np.argmax(bad))
            split = SPLITS[found[row]]
            what = f"the {self.of} is in {split} and has no label"
            raise reader.error(row, self.table.label, what, f"give one, or take it out of {split}")
        return found


class _Numbers:
    """A column of numbers to be predicted, of which some may be missing."""

    def __init__(self, column: str):
        self._column = column
        self._rows = Growing(np.float32)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows; raises DataError for what is no finite number."""
        array = chunk.columns[self._column]
        if pa.types.is_floating(array.type):  # as classes do: NaN is none
            array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
        known = Chunk(chunk.reader, {self._column: array}, chunk.first, chunk.csv)
        found = numbers(known, self._column, 0.0)
        if array.null_count:
            missing = pc.is_null(array).to_numpy(zero_copy_only=False)
            found = np.where(missing, np.float32(np.nan), found)
        self._rows.append(found)

    def take(self, num: int) -> Array:
        """float32 ``[N]``, NaN where there is none."""
        self._rows.pad(num, np.nan)
        taken: Array = self._rows.take()
        return taken
