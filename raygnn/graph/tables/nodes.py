"""One table of nodes: ids, features, classes, splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import MASKS, SPLITS, NodeFrame
from raygnn.graph.tables import codes, shares
from raygnn.graph.tables.codes import MAX_CATEGORIES, MAX_CLASSES, Codes
from raygnn.graph.tables.columns import Array, Features
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.reader import Chunk, Reader
from raygnn.graph.tables.spec import NodeTable

_CODES = {split: code for code, split in enumerate(SPLITS)}


class Nodes:
    """The nodes of one type, read in one pass; edges may add some before `frame` is called.

    Attributes:
        ids: their ids.
        names: array → what its codes stand for; filled by `frame`.
    """

    def __init__(self, ntype: str, table: NodeTable, files: Sequence[Path]):
        self.ntype, self.table = ntype, table
        self.ids = Ids(ntype)
        self.names: dict[str, list[Any]] = {}
        self._features = {n: Features(c, table.fill) for n, c in table.features.items()}
        self._categories = {
            name: Codes(column, MAX_CATEGORIES, "categories", nulls=False)
            for name, column in table.categories.items()
        }
        self._label = None
        if table.label is not None:
            self._label = Codes(table.label, MAX_CLASSES, "classes", nulls=True)
        self._splits = Growing(np.int8)
        self._reader = Reader(files, self._columns(), table.delimiter)

    def read(self) -> None:
        """Read the table.

        Raises:
            DataError: naming file, row and column.
        """
        for chunk in self._reader.chunks():
            self.ids.add(chunk, self.table.id)
            for features in self._features.values():
                features.add(chunk)
            for coded in (*self._categories.values(), *filter(None, [self._label])):
                coded.add(chunk)
            if (split := self._split(chunk)) is not None:
                self._splits.append(split)
        self.ids.close(self._reader, self.table.id)

    def frame(self) -> NodeFrame:
        """The arrays: those of features float32 ``[N, F]``, categories and ``label`` int64
        ``[N]``, masks bool ``[N]``; of nodes that edges added: ``fill``, no label, no split.

        Raises:
            DataError: a node is in a split and has no label.
        """
        num, data = len(self.ids), {}
        for name, features in self._features.items():
            data[name] = features.take(num)
        for name, coded in self._categories.items():
            data[name], self.names[name] = coded.take(num)
        if self._label is not None:
            data["label"], self.names["label"] = self._label.take(num)
        split = self._drawn(num, data.get("label"))
        if split is not None:
            data |= {mask: split == code for code, mask in enumerate(MASKS)}
        return NodeFrame(num, data)

    def _columns(self) -> list[str]:
        table, masks = self.table, self.table.masks
        columns = [table.id, *table.categories.values(), table.label, table.split]
        columns += [column for each in self._features.values() for column in each.columns]
        columns += [masks.train, masks.val, masks.test] if masks else []
        return [column for column in columns if column is not None]

    def _split(self, chunk: Chunk) -> Array | None:
        """Which split each row is in: int8, -1 = none; None where the table does not say."""
        table = self.table
        if table.split is not None:
            return codes.splits(chunk, table.split, dict(table.split_words), _CODES)
        if table.masks is None:
            return None
        found = np.full(chunk.num, -1, np.int8)
        for code, column in enumerate((table.masks.train, table.masks.val, table.masks.test)):
            if column is None:
                continue
            mask = codes.truths(chunk, column)
            both = mask & (found >= 0)
            if both.any():
                row = int(np.argmax(both))
                what = f"the node is in {SPLITS[code]} and in {SPLITS[found[row]]}"
                raise chunk.error(row, column, what, "put it in one split at most")
            found[mask] = code
        return found

    def _drawn(self, num: int, label: Array | None) -> Array | None:
        """Which split each node is in."""
        if self.table.splits is not None:
            found = shares.draw(self.table.splits, num)
            if label is not None:
                found[label < 0] = -1
            return found
        if self.table.split is None and self.table.masks is None:
            return None
        self._splits.pad(num, -1)
        found = self._splits.take()
        bad = (found >= 0) & (label < 0) if label is not None else np.zeros(0, bool)
        if bad.any():
            raise self._unlabelled(int(np.argmax(bad)), SPLITS[found[np.argmax(bad)]])
        return found

    def _unlabelled(self, row: int, split: str) -> DataError:
        assert self.table.label is not None
        what = f"the node is in {split} and has no label"
        return self._reader.error(
            row, self.table.label, what, f"give one, or take it out of {split}"
        )
