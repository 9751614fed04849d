"""One table of nodes or of edges: ids or ends, features, categories, labels, splits.

What reads a chunk raises DataError, naming file, row and column; what takes the arrays does for a
row that is in a split and has no label, and for a word that the vocabulary does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import MASKS, SPLITS
from raygnn.graph.outofcore.disk_graph import Appended, DiskArray, store
from raygnn.graph.partition.manifest import read_json
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables import codes
from raygnn.graph.tables.columns import (
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
    LabelKind,
    NodeTable,
    RandomSplit,
    Table,
)
from raygnn.graph.tables.feature_columns import Features
from raygnn.graph.tables.reader import Chunk, TableReader, resolve
from raygnn.graph.times import TimeRange, check_units, sample
from raygnn.storage.remote import AnyPath
from raygnn.util.hashing import mix, uniform

_PIECE = 1 << 20  # rows of which splits are drawn at once

Vocabulary = Mapping[str, Sequence[Any]]


class _NumberLabels:
    """Label of each row that is a number, or several: see `Codes` for its methods."""

    def __init__(self, label: Label, file: Path):
        self.label, self._file = label, file
        self._rows: Appended | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's rows; raises DataError naming file, row and column."""
        width = None if self._rows is None else self._rows.array.row_shape[0]
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
            rows = np.nan_to_num(rows, nan=-1).astype(np.int8)
        self._padded(chunk.first, rows.shape[1]).add(rows)

    def finish(self, reader: TableReader, num: int) -> tuple[DiskArray, None]:
        """Return the label, see `read_rows`, and no names."""
        array = self._padded(num, len(self.label.columns)).close()
        is_one = array.row_shape == (1,) and self.label.kind == "number"
        return replace(array, row_shape=()) if is_one else array, None

    def _padded(self, num: int, width: int) -> Appended:
        """Return the labels of at least ``num`` rows, so wide if there are none yet: those before
        the first list are not known."""
        multi = self.label.kind == "multi"
        if self._rows is None:
            self._rows = Appended(self._file, "int8" if multi else "float32", (width,))
        self._rows.pad(num, -1 if multi else np.nan)
        return self._rows


def unknown(kind: LabelKind, rows: Array) -> Array:
    """Return which rows have no label, bool ``[N]``."""
    missing: Array = np.isnan(rows) if kind == "number" else rows < 0
    if rows.ndim == 1:
        return missing
    return np.all(missing, axis=1) if kind == "multi" else np.any(missing, axis=1)


def read_rows(
    table: Table, files: Sequence[AnyPath], num: int, vocabulary: Vocabulary, directory: Path
) -> tuple[dict[str, DiskArray], dict[str, list[Any]]]:
    """Store categories, labels and masks of ``num`` rows.

    Categories are int64 ``[N]``; classes too, -1 = unknown; numbers float32 ``[N]`` or ``[N, K]``,
    NaN = unknown; multi-label targets int8 ``[N, K]``, -1 = unknown; masks bool ``[N]``. Nodes that
    edges added have no label and no split.

    Args:
        vocabulary: array → meaning of its codes; arrays without an entry are numbered by their
            words.

    Returns:
        The arrays, and the meaning of codes by array.

    Raises:
        DataError: naming file, row and column.
    """
    of_nodes = table.categories if isinstance(table, NodeTable) else {}
    found: dict[str, codes.Codes | _NumberLabels] = {}
    for name, one in of_nodes.items():
        file = directory / f"array-{len(found)}"
        found[name] = codes.Codes(one.column, vocabulary.get(name), file, one)
    for name, label in table.targets.items():
        file, is_class = directory / f"array-{len(found)}", label.kind == "class"
        coded = codes.Codes(label.columns[0], vocabulary.get(name), file) if is_class else None
        found[name] = coded or _NumberLabels(label, file)
    splits = Appended(directory / "split", "int8")
    columns = [*(one.column for one in of_nodes.values()), *target_columns(table)]
    reader = TableReader(files, columns, table.delimiter)
    for chunk in reader.chunks() if columns else ():
        for column in found.values():
            column.add(chunk)
        if table.split is not None:
            splits.add(codes.splits(chunk, table.split, table.split_words))
    arrays, names = dict[str, DiskArray](), dict[str, list[Any]]()
    for name, column in found.items():
        arrays[name], stand_for = column.finish(reader, num)
        if stand_for is not None:
            names[name] = stand_for
    missing = [unknown(label.kind, arrays[name].map()) for name, label in table.targets.items()]
    unlabelled = np.all(missing, axis=0) if missing else np.zeros(num, bool)
    splits.pad(num, -1)
    split = splits.close().map()
    if table.splits is not None:
        split = draw(table.splits, num)
        split[unlabelled] = -1
    elif table.split is None:
        return arrays, names
    elif (bad := (split >= 0) & unlabelled).any():
        held_in = SPLITS[split[row := int(np.argmax(bad))]]
        row_of = "node" if isinstance(table, NodeTable) else "edge"
        message = f"the {row_of} is in {held_in} and has no label"
        remedy = f"give one, or take it out of {held_in}"
        raise reader.error(row, target_columns(table)[0], message, remedy)
    masks = {mask: store(directory / mask, split == code) for code, mask in enumerate(MASKS)}
    return arrays | masks, names


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


def target_columns(table: Table) -> list[str]:
    """Return the columns of labels and splits."""
    of_labels = [column for label in table.targets.values() for column in label.columns]
    return of_labels if table.split is None else [*of_labels, table.split]


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


def _has_times_alone(table: Table) -> bool:
    """Return True if times determine the rows to fit to."""
    if table.time is None or (table.split, table.splits) != (None, None):
        return False
    return any(matrix.fitted for matrix in features_of(table).values())


def _first_held_out(table: Table, files: Sequence[AnyPath]) -> tuple[int | None, TimeRange]:
    """Return the first time of a row for validation or test, if there is one, and all times."""
    assert table.time is not None
    column, columns = table.time.column, [table.split] if table.split is not None else []
    times, firsts, samples = Times(table.time), list[int](), [np.zeros(0, np.int64)]
    for chunk in TableReader(files, [*columns, column], table.delimiter).chunks():
        found = times.of(chunk, column)
        samples.append(sample(found))
        for of in columns:
            if (held := codes.splits(chunk, of, table.split_words) > 0).any():
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
    directory: Path,
) -> dict[str, Any]:
    """Give the transforms of features their state: that of the training, or what the rows for
    training say, for which their columns are read once.

    Args:
        kind: the node or edge type.
        directory: where numbers of rows for training are kept meanwhile.

    Returns:
        ``"<type>/<array>"`` → what is done, the state, and before which time (``before``) the rows
        lie that it is of, if not all; of the arrays with transforms.

    Raises:
        DataError: as reading does; there is nothing to fit to; or the training had others.
    """
    before = to.before if _has_times_alone(table) else None
    if to.trained is not None:
        for name, matrix in features.items():
            matrix.replay(to.trained.get(f"{kind}/{name}"), f"{kind}/{name}")
    elif fitted := [one for matrix in features.values() for one in matrix.fitted]:
        time = [] if table.time is None or before is None else [table.time.column]
        of_features = [column for one in fitted for column in one.columns]
        columns = [*of_features, *time, *target_columns(table)]
        for chunk in TableReader(files, columns, table.delimiter).chunks():
            training = training_rows(table, chunk, before)
            for at, one in enumerate(fitted):
                one.add(chunk, training, directory / f"numbers-{at}")
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
    """Return the state of transforms in the run or partition that the graph names (see
    `GraphData`), or the first time of a row for validation or test, in tables whose columns say
    which those are; they are read only where that decides. Raises DataError if units differ."""
    if (kept := graph.vocabulary) is not None:
        return FitTo(read_json(kept).get("transforms") or {})
    tables: list[Table] = [*described.nodes.values(), *described.edges.values()]
    if not any(map(_has_times_alone, tables)):
        return FitTo()
    compared = [one for one in tables if one.time and (one.split or _has_times_alone(one))]
    base = Path(graph.path).parent
    found = [_first_held_out(one, resolve(base, one.files)) for one in compared]
    before = min((first for first, _ in found if first is not None), default=None)
    if before is not None:
        effect = "transforms would be fitted to rows of validation and test, or to none"
        check_units([times for _, times in found], effect, "time")
    return FitTo(None, before)


def features_of(table: Table) -> dict[str, Features]:
    """Return array name → its columns."""
    return {name: Features(columns, table.fill) for name, columns in table.features.items()}


class RowArrays:
    """Arrays of rows that need no other chunk: weights, times and features.

    Attributes:
        names: columns that they are read from.
        features: name → columns of the matrix.
    """

    def __init__(self, table: Table):
        self.features = features_of(table)
        self._weight = table.weight if isinstance(table, EdgeTable) else None
        self._time = None if table.time is None else table.time.column
        self._times = Times(table.time)
        of_features = [column for matrix in self.features.values() for column in matrix.columns]
        self.names = [c for c in (self._weight, self._time, *of_features) if c is not None]

    @property
    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Array → dtype and row shape, once `rows` has seen a chunk."""
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        if self._weight is not None:
            kinds["weight"] = "float32", ()
        if self._time is not None:
            kinds["time"] = "int64", ()
        return kinds | {n: (str(m.dtype), (m.width,)) for n, m in self.features.items()}

    def rows(self, chunk: Chunk) -> dict[str, Array]:
        """Return the arrays' rows; raises DataError naming file, row and column."""
        rows = dict[str, Array]()
        if self._weight is not None:
            rows["weight"] = _weights(chunk, self._weight)
        if self._time is not None:
            rows["time"] = self._times.of(chunk, self._time)
        return rows | {name: matrix.rows(chunk) for name, matrix in self.features.items()}


def _weights(chunk: Chunk, column: str) -> Array:
    weights = numbers(chunk, column)
    if (weights < 0).any():
        row = int(np.argmax(weights < 0))
        message = f"the weight is {weights[row]:g}"
        raise chunk.error(row, column, message, "weights are numbers from 0")
    return weights


def extent(table: NodeTable | EdgeTable, files: Sequence[AnyPath]) -> tuple[int, int]:
    """Estimate the rows of a table and the bytes of its arrays: see `TableReader.extent`."""
    ends = [table.id or ROW] if isinstance(table, NodeTable) else [table.source, table.target]
    of_nodes = table.categories.values() if isinstance(table, NodeTable) else ()
    columns, categories = RowArrays(table), [category.column for category in of_nodes]
    read = [*ends, *columns.names, *categories, *target_columns(table)]
    rows, size = TableReader(files, read, table.delimiter).extent()
    made = sum(matrix.widening for matrix in columns.features.values())
    return rows, size + rows * (made + 4 * sum(text.width for text in table.text.values()))
