"""One table of nodes: ids, features, classes, splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raygnn.graph.data import NodeFrame
from raygnn.graph.tables.codes import Categories
from raygnn.graph.tables.columns import Features
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.reader import Reader
from raygnn.graph.tables.spec import NodeTable
from raygnn.graph.tables.targets import Targets


class Nodes:
    """The nodes of one type, read in one pass; edges may add some before `frame` is called.

    Attributes:
        ids: their ids.
        reader: of its files.
        names: array → what its codes stand for; filled by `frame`.

    Args:
        vocabulary: array → what its codes are to stand for; arrays without an entry are numbered
            by their words.
    """

    def __init__(
        self,
        ntype: str,
        table: NodeTable,
        files: Sequence[Path],
        vocabulary: Mapping[str, Sequence[Any]],
    ):
        self.ntype, self.table = ntype, table
        self.ids = Ids(ntype)
        self.names: dict[str, list[Any]] = {}
        self._features = {n: Features(c, table.fill) for n, c in table.features.items()}
        self._categories = {
            name: Categories(category, vocabulary.get(name))
            for name, category in table.categories.items()
        }
        self._targets = Targets(table, "node", vocabulary.get("label"))
        self.reader = Reader(files, self._columns(), table.delimiter)

    def read(self) -> None:
        """Read the table.

        Raises:
            DataError: naming file, row and column.
        """
        for chunk in self.reader.chunks():
            self.ids.add(chunk, self.table.id)
            for features in self._features.values():
                features.add(chunk)
            for coded in self._categories.values():
                coded.add(chunk)
            self._targets.add(chunk)
        self.ids.close(self.reader, self.table.id)

    def frame(self) -> NodeFrame:
        """The arrays: those of features float32 ``[N, F]``, categories int64 ``[N]``, and what
        :meth:`Targets.take` gives; of nodes that edges added: ``fill``, no label, no split.

        Raises:
            DataError: a node is in a split and has no label, or a word is not in the vocabulary.
        """
        num, data = len(self.ids), {}
        for name, features in self._features.items():
            data[name] = features.take(num)
        for name, coded in self._categories.items():
            data[name], self.names[name] = coded.take(self.reader, num)
        data |= self._targets.take(num, self.reader)
        self.names |= self._targets.names
        return NodeFrame(num, data)

    def _columns(self) -> list[str]:
        columns = [self.table.id, *(category.column for category in self.table.categories.values())]
        columns += self._targets.columns
        return columns + [column for each in self._features.values() for column in each.columns]
