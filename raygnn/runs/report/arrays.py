"""The numbers of all ranks over time as arrays, in which W is the records and R the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raygnn.runs.metrics_files import Record, number, values
from raygnn.runs.report.chart import rounded

Array = NDArray[np.float64]

_MOST = 2**24  # numbers


@dataclass(frozen=True)
class Table:
    """One group of values.

    Attributes:
        steps: of the records, int64 [W].
        columns: name → float64 [W, R], NaN where nothing is known.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Array]

    @property
    def ranks(self) -> int:
        return max((column.shape[1] for column in self.columns.values()), default=0)

    def thinned(self, most: int) -> Table:
        """Means over at most ``most`` stretches, each named by its last step."""
        count = len(self.steps)
        if count <= most:
            return self
        starts = np.arange(most) * count // most
        ends = np.append(starts[1:], count)
        columns = {}
        for name, column in self.columns.items():
            known = np.isfinite(column)
            sums = np.add.reduceat(np.where(known, column, 0.0), starts, axis=0)
            counts = np.add.reduceat(known.astype(np.int64), starts, axis=0)
            columns[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return Table(self.steps[ends - 1], columns)


def of_ranks(records: Sequence[Record], group: str) -> Table:
    """A group of ``ranks.jsonl``."""
    rows = [(record["step"], found) for record in records if (found := values(record, group))]
    size = max((len(v) for _, found in rows for v in found.values()), default=0)
    size = min(size, _MOST // max(1, len(rows)))  # which only a damaged file has more of
    columns: dict[str, Array] = {}
    for name in dict.fromkeys(name for _, found in rows for name in found):
        column = np.full((len(rows), size), np.nan)
        for index, (_, found) in enumerate(rows):
            ranks = found.get(name, [])[:size]
            column[index, : len(ranks)] = ranks
        columns[name] = column
    return Table(_steps([step for step, _ in rows]), columns)


def of_means(records: Sequence[Record]) -> Table:
    """The seconds of ``metrics.jsonl``, means over the ranks, as if there were one."""
    head = "seconds/"
    rows = [record for record in records if any(key.startswith(head) for key in record)]
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(head))
    columns = {
        key.removeprefix(head): np.array([[number(row.get(key))] for row in rows]) for key in keys
    }
    return Table(_steps([row["step"] for row in rows]), columns)


def over(function: Any, values: Array, axis: int) -> Array:
    """``np.nanmean`` and the like, NaN without a warning where there is nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: Array = np.asarray(function(values, axis=axis))
    return found


def plain(values: Array) -> list[float | None]:
    """Five digits of each, None where it is not finite."""
    return [rounded(value) for value in values.tolist()]


def _steps(steps: Sequence[int]) -> NDArray[np.int64]:
    return np.array([min(max(step, -(2**62)), 2**62) for step in steps], dtype=np.int64)
