"""The rows that transforms of features are fitted to, and the state of a training's."""

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
from raygnn.graph.partition.manifest import read_json
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables import codes
from raygnn.graph.tables.columns import Times, nan_to_null, to_numpy
from raygnn.graph.tables.description import Description, Label, Table
from raygnn.graph.tables.feature_columns import Features, Keep
from raygnn.graph.tables.frames import draw, features_of, label_columns, label_rows
from raygnn.graph.tables.reader import Chunk, TableReader, resolve
from raygnn.graph.times import TimeRange, check_units, sample
from raygnn.storage.remote import AnyPath


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
