"""One table of nodes or of edges: ids or ends, features, categories, labels, splits.

What reads a chunk raises DataError, naming file, row and column; what takes the arrays does for a
row that is in a split and has no label, and for a word that the vocabulary does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import MASKS, SPLITS
from raygnn.graph.partition.manifest import read_json
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables import codes
from raygnn.graph.tables.columns import (
    Growing,
    Times,
    nan_to_null,
    numbers,
    numbers_or_nan,
    rows_or_nan,
    to_numpy,
)
from raygnn.graph.tables.description import (
    ROW,
    Description,
    EdgeTable,
    Label,
    NodeTable,
    RandomSplit,
    Table,
)
from raygnn.graph.tables.feature_columns import Features, Keep
from raygnn.graph.tables.reader import Chunk, TableReader, resolve
from raygnn.graph.times import TimeRange, check_units, sample
from raygnn.storage.remote import AnyPath
from raygnn.util.hashing import mix, uniform

_PIECE = 1 << 20  # rows of which splits are drawn at once

Vocabulary = Mapping[str, Sequence[Any]]


class _Target:
    """One label of each row of a table.

    Args:
        vocabulary: the classes that 0, 1, … are to stand for; None = those of the table, sorted.

    Attributes:
        names: what the codes stand for, of classes; filled by `take`.
    """

    def __init__(self, label: Label, vocabulary: Sequence[Any] | None):
        self.label = label
        self.names: list[Any] | None = None
        self._classes: codes.Codes | None = None
        if label.kind == "class":
            self._classes = codes.classes(label.columns[0], vocabulary)
        self._numbers: Growing | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows; raises DataError naming file, row and column."""
        if self._classes is not None:
            self._classes.add(chunk)
        else:
            self._add_numbers(chunk)

    def take(self, num: int, reader: TableReader) -> tuple[Array, Array]:
        """The labels, see `Targets.take`, and which are not known, bool ``[N]``."""
        if self._classes is not None:
            found, self.names = self._classes.take(reader, num)
            return found, found < 0
        numbers = self._rows(num, len(self.label.columns)).take()
        if self.label.kind == "multi":
            return numbers, (numbers < 0).all(1)
        unknown = np.isnan(numbers).any(1)
        return numbers[:, 0] if numbers.shape[1] == 1 else numbers, unknown

    def _rows(self, num: int, width: int) -> Growing:
        """The labels of at least ``num`` rows, so wide if there are none yet: those before the
        first list are not known."""
        several = self.label.kind == "multi"
        if self._numbers is None:
            self._numbers = Growing(np.int8 if several else np.float32, width)
        self._numbers.pad(num, -1 if several else np.nan)
        return self._numbers

    def _add_numbers(self, chunk: Chunk) -> None:
        width = None if self._numbers is None else self._numbers.width
        rows = label_rows(self.label, chunk, width)
        if not rows.shape[1]:
            return
        if self.label.kind == "multi":
            bad = ~np.isin(rows, (-1, 0, 1)) & ~np.isnan(rows)
            if bad.any():
                row, place = np.argwhere(bad)[0]
                columns = self.label.columns
                remedy = "give 0 or 1, and where it is not known -1 or nothing"
                message = f"the label is {rows[row, place]:g}"
                column = columns[place if len(columns) > 1 else 0]
                raise chunk.error(int(row), column, message, remedy)
            rows = np.nan_to_num(rows, nan=-1)
        self._rows(chunk.first, rows.shape[1]).append(rows)


class Targets:
    """Labels and splits of the rows of one table.

    Args:
        of: what a row is, for errors: ``node`` or ``edge``.
        vocabulary: array → what its codes are to stand for.

    Attributes:
        columns: those that it reads.
        names: array → what its codes stand for; filled by `take`.
    """

    def __init__(self, table: Table, of: str, vocabulary: Vocabulary | None = None):
        self.table, self.of = table, of
        self.names: dict[str, list[Any]] = {}
        masks = table.masks
        self._mask_columns = [masks.train, masks.val, masks.test] if masks else []
        self._labels = {
            name: _Target(label, (vocabulary or {}).get(name))
            for name, label in table.targets.items()
        }
        columns = [*label_columns(table), table.split, *self._mask_columns]
        self.columns = [column for column in columns if column is not None]
        self._splits = Growing(np.int8)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows; raises DataError naming file, row and column."""
        for target in self._labels.values():
            target.add(chunk)
        if self.table.split is not None:
            words = self.table.split_words
            self._splits.append(codes.splits(chunk, self.table.split, words))
        elif self.table.masks is not None:
            self._splits.append(self._masked(chunk))

    def take(self, num: int, reader: TableReader) -> dict[str, Array]:
        """The labels, and the masks bool ``[N]``, as far as the table gives them.

        Classes are int64 ``[N]``, -1 = unknown; numbers float32 ``[N]`` or ``[N, K]``, NaN =
        unknown; several labels int8 ``[N, K]``, -1 = unknown. Rows that were never added, up to
        ``num``, have no label and are in no split.
        """
        data: dict[str, Array] = {}
        unknown: Array | None = None
        for name, target in self._labels.items():
            data[name], missing = target.take(num, reader)
            unknown = missing if unknown is None else unknown & missing
            if target.names is not None:
                self.names[name] = target.names
        if self.table.splits is not None:
            split = draw(self.table.splits, num)
            if unknown is not None:
                split[unknown] = -1
        elif self.table.split is not None or self.table.masks is not None:
            self._splits.pad(num, -1)
            split = self._splits.take()
            if unknown is not None:
                self._require_labels(split, unknown, reader)
        else:
            return data
        return data | {mask: split == code for code, mask in enumerate(MASKS)}

    def _masked(self, chunk: Chunk) -> Array:
        """Return the split of each row, int8 ``[n]``; -1 = none."""
        split = np.full(chunk.num, -1, np.int8)
        for code, column in enumerate(self._mask_columns):
            if column is None:
                continue
            mask = codes.truths(chunk, column)
            both = mask & (split >= 0)
            if both.any():
                row = int(np.argmax(both))
                message = f"the {self.of} is in {SPLITS[code]} and in {SPLITS[split[row]]}"
                raise chunk.error(row, column, message, "put it in one split at most")
            split[mask] = code
        return split

    def _require_labels(self, split: Array, unknown: Array, reader: TableReader) -> None:
        bad = (split >= 0) & unknown
        if bad.any():
            row = int(np.argmax(bad))
            name = SPLITS[split[row]]
            message = f"the {self.of} is in {name} and has no label"
            remedy = f"give one, or take it out of {name}"
            raise reader.error(row, self.columns[0], message, remedy)


def draw(shares: RandomSplit, num: int, first: int = 0) -> Array:
    """Assign rows from ``first`` on to random splits: int8 ``[num]``, 0 train, 1 val, 2 test, -1
    none. The split depends only on the seed and the row's number, not on later rows."""
    split = np.full(num, -1, np.int8)
    bounds = [shares.train, shares.train + shares.val]
    bounds.append(1.0 if shares.test is None else min(bounds[1] + shares.test, 1.0))
    key = mix(np.array([shares.seed], np.uint64))
    for start in range(0, num, _PIECE):
        rows = np.arange(first + start, first + min(start + _PIECE, num), dtype=np.uint64)
        piece = np.searchsorted(bounds, uniform(mix(rows + key)), side="right").astype(np.int8)
        split[start : start + len(piece)] = np.where(piece < 3, piece, -1)
    return split


def label_columns(table: Table) -> list[str]:
    """The columns that hold labels, if there are any."""
    return [column for label in table.targets.values() for column in label.columns]


def label_rows(label: Label, chunk: Chunk, width: int | None = None) -> Array:
    """Labels that are numbers, float32 ``[n, L]``, NaN where there is none; as `rows_or_nan`."""
    first, *more = label.columns
    if not more:
        return rows_or_nan(chunk, first, width)
    return np.stack([numbers_or_nan(chunk, column) for column in (first, *more)], 1)


def _known(label: Label, chunk: Chunk) -> Array:
    """Return which rows have the label, bool ``[n]``."""
    if label.kind == "class":
        return to_numpy(pc.is_valid(nan_to_null(chunk.columns[label.columns[0]])))
    rows = label_rows(label, chunk)
    if label.kind == "multi":
        return np.asarray((rows >= 0).any(1))
    return np.asarray(~np.isnan(rows).any(1) & (rows.shape[1] > 0))


@dataclass(frozen=True)
class FitTo:
    """Source of the state of transforms.

    Attributes:
        trained: what `settle` returned for the training's tables; None = these are they.
        before: of a table with times and no split, only rows before this one are fitted to. None =
            all rows are.
    """

    trained: Mapping[str, Any] | None = None
    before: int | None = None

    def bound(self, table: Table) -> int | None:
        """The time before which the table's rows are fitted to, if there is one."""
        return self.before if _has_times_alone(table) else None

    @classmethod
    def from_tables(
        cls, tables: Sequence[tuple[Table, Sequence[AnyPath]]], trained: Mapping[str, Any] | None
    ) -> FitTo:
        """Find the first time of a row for validation or test, in tables whose columns say which
        those are; they are read only where that decides. Raises DataError if units differ."""
        if trained is not None or not any(_has_times_alone(table) for table, _ in tables):
            return cls(trained)
        compared = ((t, f) for t, f in tables if t.time and (_held(t) or _has_times_alone(t)))
        found = [_first_held_out(*one) for one in compared]
        before = min((first for first, _ in found if first is not None), default=None)
        if before is not None:
            effect = "transforms would be fitted to rows of validation and test, or to none"
            check_units([times for _, times in found], effect, "time")
        return cls(None, before)


def _has_times_alone(table: Table) -> bool:
    """Return True if times determine the rows to fit to."""
    if table.time is None or (table.split, table.masks, table.splits) != (None,) * 3:
        return False
    return any(matrix.fitted for matrix in features_of(table).values())


def _held(table: Table) -> list[str]:
    """Return the columns that say which rows are held out."""
    of_masks = [table.masks.val, table.masks.test] if table.masks else []
    return [column for column in (table.split, *of_masks) if column is not None]


def _first_held_out(table: Table, files: Sequence[AnyPath]) -> tuple[int | None, TimeRange]:
    """Return the first time of a row for validation or test, if there is one, and all times."""
    assert table.time is not None
    column, columns = table.time.column, _held(table)
    times, firsts, samples = Times(table.time), list[int](), [np.zeros(0, np.int64)]
    for chunk in TableReader(files, [*columns, column], table.delimiter).chunks():
        found = times.of(chunk, column)
        samples.append(sample(found))
        if table.split is not None:
            held = codes.splits(chunk, table.split, table.split_words) > 0
        else:
            held = np.any([codes.truths(chunk, one) for one in columns], axis=0)
        if columns and held.any():
            firsts.append(int(found[held].min()))
    everyones = sample(np.sort(np.concatenate(samples)))
    found_in = TimeRange(f"column {column!r} of {files[0]}", everyones, times.in_microseconds)
    return min(firsts, default=None), found_in


def training_rows(table: Table, chunk: Chunk, before: int | None = None) -> Array:
    """Return which rows are for training, bool ``[n]``; without a split, all, or all ``before`` a
    time."""
    if table.time is not None and before is not None:
        return Times(table.time).of(chunk, table.time.column) < before
    if table.split is not None:
        return codes.splits(chunk, table.split, table.split_words) == 0
    if table.masks is not None:
        return codes.truths(chunk, table.masks.train)
    if table.splits is None:
        return np.ones(chunk.num, bool)
    drawn = draw(table.splits, chunk.num, chunk.first) == 0
    known = [_known(label, chunk) for label in table.targets.values()]
    return drawn & np.any(known, axis=0) if known else drawn  # without a label, in no split


def settle(
    kind: str,
    features: Mapping[str, Features],
    table: Table,
    files: Sequence[AnyPath],
    to: FitTo,
    keep: Keep,
) -> dict[str, Any]:
    """Give the transforms of features their state: that of the training, or what the rows for
    training say, for which their columns are read once.

    Args:
        kind: the node or edge type.
        keep: where numbers of rows for training are kept meanwhile.

    Returns:
        ``"<type>/<array>"`` → what is done, the state, and before which time (``before``) the rows
        lie that it is of, if not all; of the arrays with transforms.

    Raises:
        DataError: as reading does; there is nothing to fit to; or the training had others.
    """
    before = to.bound(table)
    if to.trained is not None:
        for name, matrix in features.items():
            matrix.replay(to.trained.get(f"{kind}/{name}"), f"{kind}/{name}")
    elif fitted := [one for matrix in features.values() for one in matrix.fitted]:
        masks = table.masks.train if table.masks else None
        time = None if table.time is None or before is None else table.time.column
        others = (c for c in (table.split, masks, time, *label_columns(table)) if c is not None)
        columns = [*(column for one in fitted for column in one.columns), *others]
        for chunk in TableReader(files, columns, table.delimiter).chunks():
            training = training_rows(table, chunk, before)
            for one in fitted:
                one.add(chunk, training, keep)
        for one in fitted:
            one.fit(f"{files[0]}, column {one.columns[0]!r}", before)
    made = {f"{kind}/{name}": matrix.manifest() for name, matrix in features.items()}
    return {key: state for key, state in made.items() if state is not None}


def vocabulary_of(graph: TablesGraph) -> dict[str, dict[str, list[Any]]]:
    """Return type → array → meaning of its codes, from the run or partition that the graph names.

    Raises:
        DataError: the file has no words.
    """
    if (file := graph.vocabulary) is None:
        return {}
    check_file(file)
    content = read_json(file)
    named = content.get("words", content.get("names"))
    if not isinstance(named, dict) or not all(isinstance(words, list) for words in named.values()):
        raise DataError(
            "has no words of tables",
            where=str(file),
            remedy="name a run's checkpoints/selected.json or a partition's raygnn.json",
        )
    vocabulary: dict[str, dict[str, list[Any]]] = {}
    for key, words in named.items():
        kind, _, name = key.rpartition("/")
        vocabulary.setdefault(kind, {})[name] = words
    return vocabulary


def fit_to(graph: TablesGraph, described: Description) -> FitTo:
    """Return the rows that transforms of features are fitted to, or their state in the run or
    partition that the graph names (see `GraphData`)."""
    kept = graph.vocabulary
    trained = None if kept is None else read_json(kept).get("transforms") or {}
    base, tables = Path(graph.path).parent, [*described.nodes.values(), *described.edges.values()]
    return FitTo.from_tables([(table, resolve(base, table.files)) for table in tables], trained)


def features_of(table: Table) -> dict[str, Features]:
    """Return array name → its columns."""
    return {name: Features(columns, table.fill) for name, columns in table.features.items()}


def node_reader(table: NodeTable, files: Sequence[AnyPath]) -> TableReader:
    """Return a reader of all columns of a table of nodes."""
    return _reader(table, files, [table.id or ROW, *_node_columns(table)])


def _node_columns(table: NodeTable) -> list[str]:
    """Return the columns but ids and features."""
    time = [] if table.time is None else [table.time.column]
    categories = [category.column for category in table.categories.values()]
    return [*categories, *Targets(table, "node").columns, *time]


def read_nodes(
    table: NodeTable, files: Sequence[AnyPath], num: int, vocabulary: Vocabulary
) -> tuple[dict[str, Array], dict[str, list[Any]]]:
    """Read all arrays of ``num`` nodes but their features: categories and ``time`` int64 ``[N]``,
    and what `Targets.take` returns. Nodes that edges added have no label and no split.

    Args:
        vocabulary: array → what its codes are to stand for; arrays without an entry are numbered
            by their words.

    Returns:
        The arrays, and what codes stand for by array.

    Raises:
        DataError: naming file, row and column.
    """
    categories = {
        name: codes.categories(category, vocabulary.get(name))
        for name, category in table.categories.items()
    }
    targets, times, when = Targets(table, "node", vocabulary), Times(table.time), Growing(np.int64)
    reader = TableReader(files, _node_columns(table), table.delimiter)
    for chunk in reader.chunks() if reader.columns else ():
        for category in categories.values():
            category.add(chunk)
        if table.time is not None:
            when.append(times.of(chunk, table.time.column))
        targets.add(chunk)
    names: dict[str, list[Any]] = {}
    data: dict[str, Array] = {}
    for name, category in categories.items():
        data[name], names[name] = category.take(reader, num)
    if table.time is not None:
        data["time"] = when.take()
    data |= targets.take(num, reader)
    return data, names | targets.names


def _reader(table: Table, files: Sequence[AnyPath], columns: Sequence[str]) -> TableReader:
    """Return a reader of some columns, and those of the features."""
    features = features_of(table).values()
    of_features = [column for matrix in features for column in matrix.columns]
    reader = TableReader(files, [*columns, *of_features], table.delimiter)
    reader.widening = sum(matrix.widening for matrix in features)
    return reader


def edge_reader(table: EdgeTable, files: Sequence[AnyPath], *, targets: bool = True) -> TableReader:
    """Return a reader of the table's columns, or all but labels and splits."""
    time = None if table.time is None else table.time.column
    columns = [table.source, table.target, table.weight, time]
    columns += Targets(table, "edge").columns if targets else []
    return _reader(table, files, [column for column in columns if column is not None])


class EdgeColumns:
    """Arrays of edges, a chunk after the other; labels and splits are `Targets`.

    Attributes:
        dtypes: of the arrays of one number for each edge.
        features: name → what reads the matrix.
    """

    def __init__(self, table: EdgeTable):
        self.table = table
        dtypes = {"weight": np.float32} if table.weight is not None else {}
        self.dtypes: dict[str, Any] = dtypes | ({"time": np.int64} if table.time else {})
        self.features = features_of(table)
        self._times = Times(table.time)

    def rows(self, chunk: Chunk) -> dict[str, Array]:
        """Return the arrays' rows; raises DataError naming file, row and column."""
        rows, table = dict[str, Array](), self.table
        if table.weight is not None:
            rows["weight"] = _weights(chunk, table.weight)
        if table.time is not None:
            rows["time"] = self._times.of(chunk, table.time.column)
        return rows | {name: matrix.rows(chunk) for name, matrix in self.features.items()}


def _weights(chunk: Chunk, column: str) -> Array:
    weights = numbers(chunk, column)
    if (weights < 0).any():
        row = int(np.argmax(weights < 0))
        message = f"the weight is {weights[row]:g}"
        raise chunk.error(row, column, message, "weights are numbers from 0")
    return weights
