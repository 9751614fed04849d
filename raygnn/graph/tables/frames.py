"""Arrays of a table's rows: features, categories, labels, splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import MASKS, SPLITS
from raygnn.graph.partition.manifest import read_json
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables.columns import (
    Codes,
    Kind,
    Times,
    WeightColumn,
    first,
    is_list,
    matrix,
    split_codes,
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

Vocabulary = Mapping[str, Sequence[Any]]


class NumberLabels:
    """Numeric labels: float32 ``[N]`` or ``[N, K]``, NaN = unknown; multi-label targets are int8
    ``[N, K]``, -1 = unknown."""

    def __init__(self, label: Label):
        self.columns, self._kind = label.column, label.kind
        self.missing = -1 if label.kind == "multi" else np.nan
        self.width: int | None = None  # None until a row has a value

    @property
    def kind(self) -> Kind:
        if self._kind == "multi":
            return "int8", (self.width or 1,)
        return "float32", () if self.width in (None, 1) else (self.width,)

    def rows(self, chunk: Chunk) -> Array:
        """Return a chunk's rows; raises DataError naming file, row and column."""
        rows = self._numbers(chunk)
        if self._kind == "multi":
            bad = ~np.isin(rows, (-1, 0, 1)) & ~np.isnan(rows)
            if bad.any():
                row, place = np.argwhere(bad)[0]
                column = self.columns[place if len(self.columns) > 1 else 0]
                remedy = "use 0 or 1, and -1 or nothing if it is unknown"
                message = f"the label is {rows[row, place]:g}"
                raise chunk.error(int(row), column, message, remedy)
            rows = np.nan_to_num(rows, nan=-1).astype(np.int8)
        return rows.reshape(-1, *self.kind[1])

    def known(self, chunk: Chunk) -> Array:
        """Return which rows have the label, bool ``[n]``."""
        return ~unknown(self._kind, self.rows(chunk))

    def _numbers(self, chunk: Chunk) -> Array:
        arrays = [chunk.columns[column] for column in self.columns]
        if len(arrays) == 1 and is_list(arrays[0].type):
            width = self.width or pc.max(pc.list_value_length(arrays[0])).as_py()
            if width is None:  # no row has a list so far
                return np.full((chunk.num, 1), np.nan, np.float32)
            nothing = pa.scalar([None] * width, arrays[0].type)
            arrays = [pc.coalesce(arrays[0], nothing)]
        width = self.width if len(arrays) == 1 else 1
        made = [
            matrix(chunk, column, width, np.nan, np.float32, array)
            for column, array in zip(self.columns, arrays, strict=True)
        ]
        rows = np.concatenate(made, axis=1)
        self.width = rows.shape[1]
        return rows


def unknown(kind: LabelKind, rows: Array) -> Array:
    """Return which rows have no label, bool ``[N]``."""
    missing: Array = np.isnan(rows) if kind == "number" else rows < 0
    if rows.ndim == 1:
        return missing
    return np.all(missing, axis=1) if kind == "multi" else np.any(missing, axis=1)


def draw(shares: RandomSplit, num: int, first_row: int = 0) -> Array:
    """Return the random split of rows from ``first_row`` on: int8 ``[num]``, 0 train, 1 val, 2
    test, -1 none. It depends on the seed and the row's number only, so more rows do not change
    it."""
    bounds = [shares.train, shares.train + shares.val]
    bounds.append(1.0 if shares.test is None else min(bounds[1] + shares.test, 1.0))
    key = mix(np.array([shares.seed], np.uint64))
    rows = np.arange(first_row, first_row + num, dtype=np.uint64)
    split = np.searchsorted(bounds, uniform(mix(rows + key)), side="right").astype(np.int8)
    return np.where(split < 3, split, np.int8(-1))


@dataclass(frozen=True)
class FitTo:
    """Source of vocabularies and of the state of transforms.

    Attributes:
        vocabulary: type → array → value of each code; other arrays are coded by their sorted
            values.
        trained: state that `TableArrays.fit` returned in training; None = this is the training.
        before: tables with times and without a split are fitted to their rows before this time;
            None = to all rows.
    """

    vocabulary: Mapping[str, Vocabulary] = field(default_factory=dict)
    trained: Mapping[str, Any] | None = None
    before: int | None = None


def _has_times_alone(table: Table) -> bool:
    """True if a table's times determine the rows that its transforms are fitted to."""
    if table.time is None or (table.split, table.splits) != (None, None):
        return False
    return any(Features(of, table.fill).fitted for of in table.features.values())


def _first_held_out(table: Table, files: Sequence[AnyPath]) -> tuple[int | None, TimeRange]:
    """Return the earliest time of a validation or test row, if any, and a sample of all times."""
    assert table.time is not None
    column, columns = table.time.column, [table.split] if table.split is not None else []
    times, firsts, samples = Times(column, table.time), list[int](), [np.zeros(0, np.int64)]
    for chunk in TableReader(files, [*columns, column], table.delimiter).chunks():
        found = times.rows(chunk)
        samples.append(sample(found))
        for of in columns:
            firsts += found[split_codes(chunk, of, table.split_words) > 0].tolist()
            firsts = [min(firsts)] if firsts else []
    of_all = sample(np.sort(np.concatenate(samples)))
    range_ = TimeRange(f"column {column!r} of {files[0]}", of_all, times.in_microseconds)
    return min(firsts, default=None), range_


def fit_to(graph: TablesGraph, described: Description) -> FitTo:
    """Return the vocabularies and the state of transforms of the run or partition that the graph
    names, or else the time of the first validation or test row. Tables are read for that only if a
    transform needs it. Raises DataError if the units of times differ."""
    if (file := graph.vocabulary) is not None:
        check_file(file)
        content = read_json(file)
        named = content.get("words", content.get("names"))
        if not isinstance(named, dict) or not all(isinstance(of, list) for of in named.values()):
            message = "the file has no vocabulary of tables"
            remedy = "name a run's checkpoints/selected.json or a partition's raygnn.json"
            raise DataError(message, where=str(file), remedy=remedy)
        vocabulary: dict[str, dict[str, list[Any]]] = {}
        for key, words in named.items():
            kind, _, name = key.rpartition("/")
            vocabulary.setdefault(kind, {})[name] = words
        return FitTo(vocabulary, content.get("transforms") or {})
    tables = described.tables.values()
    if not any(map(_has_times_alone, tables)):
        return FitTo()
    compared = [one for one in tables if one.time and (one.split or _has_times_alone(one))]
    base = Path(graph.path).parent
    found = [_first_held_out(one, resolve(base, one.files)) for one in compared]
    before = min((first for first, _ in found if first is not None), default=None)
    if before is not None:
        effect = "transforms would be fitted to validation and test rows, or to no rows"
        check_units([times for _, times in found], effect, "time")
    return FitTo(before=before)


class TableArrays:
    """Arrays of a table's rows: weights, times, features, categories, labels and masks.

    Categories and classes are int64 ``[N]``, -1 = unknown class; other labels as in `NumberLabels`;
    masks bool ``[N]``. Methods that read a chunk raise DataError with file, row and column.

    Args:
        vocabulary: array → value of each code; other arrays are coded by their sorted values.

    Attributes:
        starts: number of the first row of each file, if edges are split at random.
    """

    def __init__(self, table: Table, vocabulary: Vocabulary | None = None):
        self.table, vocabulary, self.starts = table, vocabulary or {}, list[int]()
        self.features = {n: Features(of, table.fill) for n, of in table.features.items()}
        of_nodes = table.categories if isinstance(table, NodeTable) else {}
        codes = {n: Codes(one.column, vocabulary.get(n), one) for n, one in of_nodes.items()}
        self._labels: dict[str, Codes | NumberLabels] = {
            name: Codes(label.column[0], vocabulary.get(name))
            if label.kind == "class"
            else NumberLabels(label)
            for name, label in table.targets.items()
        }
        self._arrays: dict[str, Any] = {}
        if isinstance(table, EdgeTable) and table.weight is not None:
            self._arrays["weight"] = WeightColumn(table.weight)
        if table.time is not None:
            self._arrays["time"] = Times(table.time.column, table.time)
        self._arrays |= {**self.features, **codes, **self._labels}
        self._targets = [column for label in self._labels.values() for column in label.columns]
        self._of_splits = [*self._targets, *([table.split] if table.split is not None else [])]
        self.columns = [column for one in self._arrays.values() for column in one.columns]
        self.columns += self._of_splits
        if table.splits is not None:
            self.columns.append(ROW)  # a random split needs no other column

    @property
    def kinds(self) -> dict[str, Kind]:
        """Array → dtype and row shape, after `fit`."""
        has_masks = self.table.split is not None or self.table.splits is not None
        masks = dict.fromkeys(MASKS if has_masks else (), ("bool", ()))
        return {name: one.kind for name, one in self._arrays.items()} | masks

    @property
    def names(self) -> dict[str, list[Any]]:
        """Array → value of each code, after `fit`."""
        return {name: one.names for name, one in self._arrays.items() if isinstance(one, Codes)}

    @property
    def added(self) -> dict[str, float]:
        """Array → value of nodes that edges add."""
        return {name: one.missing for name, one in self._arrays.items()}

    def fit(
        self,
        kind: str,
        files: Sequence[AnyPath],
        to: FitTo,
        directory: Path,
        num: int | None = None,
    ) -> dict[str, Any]:
        """Assign codes to categories and classes, and fit transforms, or reuse their state from
        training. Returns ``"<type>/<array>"`` → `Features.manifest`.

        Args:
            kind: the node or edge type.
            directory: place for temporary files with the numbers of training rows.
            num: number of nodes, including those that edges add.
        """
        table, before = self.table, to.before if _has_times_alone(self.table) else None
        fitted = [one for matrix in self.features.values() for one in matrix.fitted]
        if to.trained is not None:
            fitted = []
            for name, features in self.features.items():
                features.replay(to.trained.get(f"{kind}/{name}"), f"{kind}/{name}")
        coded = [one for one in self._arrays.values() if isinstance(one, Codes)]
        columns = [column for one in coded for column in one.columns]
        columns += [column for transformed in fitted for column in transformed.columns]
        if fitted:
            columns += self._of_splits if before is None else self._arrays["time"].columns
        if table.splits is not None and isinstance(table, EdgeTable):
            columns.append(table.source)
        reader = TableReader(files, columns, table.delimiter)
        for chunk in reader.chunks():
            for one in coded:
                one.add(chunk)
            training = self._training(chunk, before) if fitted else np.zeros(0, bool)
            for at, transformed in enumerate(fitted):
                transformed.add(chunk, training, directory / f"numbers-{at}")
        for one in coded:
            one.fit(reader, 0 if num is None else num - reader.num)
        for transformed in fitted:
            transformed.fit(f"{files[0]}, column {transformed.columns[0]!r}", before)
        self.starts = reader.starts
        widths = [one for one in self._labels.values() if isinstance(one, NumberLabels)]
        for chunk in TableReader(files, self.columns, table.delimiter).chunks():
            self.rows(chunk, chunk.first)
            if all(one.width for one in widths):
                break
        made = {f"{kind}/{name}": matrix.manifest() for name, matrix in self.features.items()}
        return {key: state for key, state in made.items() if state is not None}

    def rows(self, chunk: Chunk, first_row: int) -> dict[str, Array]:
        """Return a chunk's rows of all arrays; ``first_row``: number of its first row, which random
        splits depend on."""
        rows = {name: one.rows(chunk) for name, one in self._arrays.items()}
        if (split := self._split(chunk, first_row)) is not None:
            rows |= {mask: split == code for code, mask in enumerate(MASKS)}
        return rows

    def _split(self, chunk: Chunk, first_row: int) -> Array | None:
        """Return the split of each row, int8 ``[n]``, -1 = none; None without splits."""
        table = self.table
        if table.split is None and table.splits is None:
            return None
        labels = [label.known(chunk) for label in self._labels.values()]
        known = np.any(labels, axis=0) if labels else np.ones(chunk.num, bool)
        if table.splits is not None:
            return np.where(known, draw(table.splits, chunk.num, first_row), np.int8(-1))
        assert table.split is not None
        split = split_codes(chunk, table.split, table.split_words)
        if (bad := (split >= 0) & ~known).any():
            held_in = SPLITS[split[row := first(bad)]]
            row_of = "node" if isinstance(table, NodeTable) else "edge"
            message = f"the {row_of} is in {held_in} and has no label"
            remedy = f"add a label, or remove the {row_of} from {held_in}"
            raise chunk.error(row, self._targets[0], message, remedy)
        return split

    def _training(self, chunk: Chunk, before: int | None) -> Array:
        """Return which rows are training rows: by split, or all, or all ``before`` a time."""
        if before is not None:
            earlier: Array = self._arrays["time"].rows(chunk) < before
            return earlier
        split = self._split(chunk, chunk.first)
        return np.ones(chunk.num, bool) if split is None else split == 0
