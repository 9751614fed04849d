"""Feature columns: used unchanged, or imputed, scaled and encoded.

The state of a transform is fitted to the training rows. `TableArrays` fits it in an earlier pass
over the table; the partition's manifest keeps it, and new data are transformed with it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.config.values import in_utc
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import NEVER
from raygnn.graph.outofcore.disk_graph import Appended
from raygnn.graph.tables.columns import (
    INTEGER,
    Kind,
    Times,
    encoded,
    first,
    is_list,
    matrix,
    missing_value,
    no_number,
    shown,
    to_numpy,
)
from raygnn.graph.tables.description import AVERAGES, MAX_WIDTH, SEED, FeatureColumn
from raygnn.graph.tables.reader import Chunk

_ROWS = 1 << 16  # summed or transformed at once
_QUANTILES = 1001  # of a distribution, at most
_DAY = 86_400 * 10**6  # microseconds
_PERIODS = {"month": 12, "weekday": 7, "hour": 24}
_PARTS = {"week": pc.iso_week, "weekday": pc.day_of_week}  # other parts have Arrow's names


class Transformed:
    """A column with transforms, read chunk by chunk.

    Args:
        fill: replacement of missing numbers if the column does not impute.

    Attributes:
        columns: names of the columns to read.
        state: for each value of a row, the fitted numbers of each step, or the vocabulary; None =
            nothing was fitted.
        before: the state was fitted to rows before this time; None = to all training rows.
    """

    def __init__(self, described: FeatureColumn, fill: float | None):
        self.described, self.columns = described, [described.column]
        if described.since is not None and described.since != SEED:
            try:
                self._since = round(in_utc(described.since).timestamp() * 10**6)
            except ValueError:
                self.columns.append(described.since)
        self._times = [Times(column) for column in self.columns]
        self._missing: Any = described.impute
        if self._missing is None and not described.of_words:
            self._missing = fill
        scales = ((scale, "") for scale in described.scale)
        steps = [("impute", self._missing), *scales, ("bucket", described.bucket)]
        self.steps = [(step, argument) for step, argument in steps if argument is not None]
        self.state: list[list[Any]] | None = None
        self._width: int | None = None  # length of the column's lists
        self._values: Appended | None = None
        self._words: list[Counter[str]] = []
        self.before: int | None = None

    @property
    def manifest(self) -> dict[str, Any]:
        """Transform and state, for the partition's manifest."""
        before = {} if self.before is None else {"before": self.before}
        return {"does": self.signature, "state": self.state, **before}

    @property
    def signature(self) -> dict[str, Any]:
        """Transform without its column name; a state is valid for an equal transform only."""
        said = self.described.model_dump(mode="json", exclude_defaults=True, exclude={"column"})
        return said if self._missing is None else {**said, "impute": self._missing}

    @property
    def is_fitted(self) -> bool:
        """True if the transform is fitted to data."""
        return self.described.onehot or not all(_is_given(*step) for step in self.steps)

    def rows(self, chunk: Chunk) -> Array:
        """Return a chunk's features, float32 ``[n, F]``; with ``since: seed`` times, int64 ``[n,
        1]``, as ages depend on the seed."""
        if self.described.since == SEED:
            return to_numpy(pc.fill_null(self._arrays(chunk)[0], NEVER)).reshape(-1, 1)
        if self.described.of_words:
            return np.concatenate(self._indicators_of(chunk), axis=1)
        values, blocks = self._numbers(chunk), list[Array]()
        given = [[_fitted(*step, values) for step in self.steps]] if self.state is None else []
        for column, states in zip(values.T, self.state or given * values.shape[1], strict=True):
            for (step, _), state in zip(self.steps, states, strict=True):
                column = _applied(step, state, column)
            blocks.append(column.reshape(len(column), -1))
        if self.described.indicator:
            blocks.append(np.isnan(values).any(axis=1).reshape(-1, 1))
        return np.concatenate(blocks, axis=1, dtype=np.float32)

    def add(self, chunk: Chunk, training: Array, file: Path) -> None:
        """Collect what `fit` needs of a chunk's rows where ``training`` (bool ``[n]``) is true. The
        numbers are kept in ``file`` until then."""
        if self.described.of_words:
            found = self._encoded(chunk)
            self._words = self._words or [Counter() for _ in found]
            for counter, (rows, codes, words) in zip(self._words, found, strict=True):
                num, chosen = len(words) + 1, training[rows]
                once = np.unique(rows[chosen] * num + codes[chosen] + 1)  # count a row once
                counts = np.bincount(once % num, minlength=num)[1:]
                for word, count in zip(words, counts.tolist(), strict=True):
                    counter[word] += count  # the imputed value may be listed twice
            return
        values = self._numbers(chunk)
        if self._values is None:
            self._values = Appended(file)
        self._values.add(values[training] + 0.0)  # -0 to 0, so that sorting is deterministic

    def fit(self, where: str, before: int | None) -> None:
        """Fit the state to the collected rows, which are those before ``before`` if it is set.
        Raises DataError if there are none, naming ``where``."""
        if self.described.of_words:
            self.state = [[self._vocabulary(counter, where)] for counter in self._words]
        elif self._values is None or not self._values.num:
            later = "no row is earlier than the first validation row"
            raise _cannot_fit(where, "there are no training rows" if before is None else later)
        else:  # a single feature is sorted in place, one of several is copied first
            values = self._values.close().map(writable=True)
            self._values.array.path.unlink()
            self.state = [self._fitted(np.ascontiguousarray(one), where) for one in values.T]
        self.before, self._values, self._words = before, None, []

    def _fitted(self, values: Array, where: str) -> list[list[float]]:
        state = []
        for step, argument in self.steps:
            values.sort()  # NaN (missing values) last
            known = values[: np.searchsorted(values, np.inf, side="right")]
            if not len(known) and argument in AVERAGES:
                raise _cannot_fit(where, "no training row has a number")
            state.append(_fitted(step, argument, known))
            # bucket is the last step, so nothing is fitted to its output
            for start in range(0, len(values) if step != "bucket" else 0, _ROWS):
                piece = values[start : start + _ROWS]
                piece[:] = _applied(step, state[-1], piece)
        return state

    def _vocabulary(self, counts: Counter[str], where: str) -> list[str | None]:
        words = [word for word, num in counts.items() if num >= self.described.min_count]
        bucket = [None] if self.described.unknown == "bucket" else []
        if not 0 < len(words) <= MAX_WIDTH:
            message = f"there are {len(words):,} categories, expected 1 to {MAX_WIDTH:,}"
            remedy = "encode them with hash, or name the column under categories"
            raise DataError(message, where=where, remedy=remedy)
        numbers = all(re.match(INTEGER, word) for word in words)
        return [*bucket, *sorted(words, key=int if numbers else None)]

    def _arrays(self, chunk: Chunk) -> list[pa.Array]:
        """Return the column's values, or those computed from its dates."""
        described = self.described
        parts = described.parts or described.cyclic
        if not parts and described.since is None:
            return [chunk.columns[described.column]]
        points = []
        for times in self._times:
            array = times.array(chunk)
            if not pa.types.is_temporal(array.type):
                remedy = "parts, cyclic and since need dates, such as 2024-05-01 12:30"
                raise chunk.error(0, times.columns[0], "the values are integers", remedy)
            points.append(pc.cast(array, pa.int64()))
        if described.since == SEED:
            return points
        if described.since is not None:
            since = points[1] if len(points) > 1 else pa.scalar(self._since, pa.int64())
            days = pc.cast(pc.subtract(points[0], since), pa.float64(), safe=False)
            return [pc.divide(days, float(_DAY))]
        utc = pc.cast(points[0], pa.timestamp("us"))
        made = [(_PARTS.get(part) or getattr(pc, part))(utc) for part in parts]
        if described.parts:
            return made
        turns = zip(made, (2 * math.pi / _PERIODS[part] for part in parts), strict=True)
        angles = [pc.multiply(pc.cast(one, pa.float64()), by) for one, by in turns]
        return [wave(angle) for angle in angles for wave in (pc.sin, pc.cos)]

    def _numbers(self, chunk: Chunk) -> Array:
        """Return float64 ``[n, w]``; NaN = missing."""
        column = self.columns[0]
        made = [
            matrix(chunk, column, self._width, np.nan, np.float64, array)
            for array in self._arrays(chunk)
        ]
        self._width, values = made[0].shape[1], np.concatenate(made, axis=1)
        if self._missing is None and (missing := np.isnan(values).any(axis=1)).any():
            raise no_number(chunk, first(missing), column)
        if "log" in self.described.scale and (low := (values <= -1).any(axis=1)).any():
            message = f"log needs numbers above -1, and the number is {values[first(low)].min():g}"
            raise chunk.error(first(low), column, message, "choose another scale")
        return values

    def _encoded(self, chunk: Chunk) -> list[tuple[Array, Array, list[str]]]:
        """Return for each array of the column: the rows of its values, int64 ``[v]``; the values as
        indices into the distinct values, -1 = missing; and the distinct values. A row has one
        value, a list any number."""
        column, described, found = self.columns[0], self.described, []
        for array in self._arrays(chunk):
            owners = np.arange(len(array))
            if described.separator is not None and not is_list(array.type):
                array = pc.split_pattern(pc.cast(array, pa.large_string()), described.separator)
            if is_list(array.type):
                owners, array = to_numpy(pc.list_parent_indices(array)), pc.list_flatten(array)
                if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
                    array = pc.utf8_trim_whitespace(pc.cast(array, pa.large_string()))
                    some = pc.fill_null(pc.not_equal(array, ""), True)
                    owners, array = owners[to_numpy(some)], array.filter(some)
            remedy = "onehot and hash need text or integers"
            found_words, codes = encoded(chunk, column, array, remedy)
            words, missing = [str(word) for word in found_words[:-1]], codes < 0
            if self._missing is not None and missing.any():
                codes[missing] = len(words)
                words.append(str(self._missing))
            elif described.unknown == "error" and missing.any():
                remedy = f"impute a category, such as {{column: {column}, …, impute: none}}"
                remedy += ", or set unknown: bucket" if described.onehot else ""
                raise missing_value(chunk, owners[first(missing)], column, "value", remedy)
            found.append((owners, codes, words))
        return found

    def _indicators_of(self, chunk: Chunk) -> list[Array]:
        """Return the features of each array's categories, float32 ``[n, F]``. Raises DataError for
        categories unseen in training."""
        blocks = []
        for at, (owners, values, words) in enumerate(self._encoded(chunk)):
            if (width := self.described.hash) is not None:
                codes = [_hash(word) % width for word in words]
            else:
                assert self.state is not None
                numbers = {word: number for number, word in enumerate(self.state[at][0])}
                width, other = len(numbers), numbers.get(None, -1)
                codes = [numbers.get(word, other) for word in words]
            of_word = np.array([*codes, 0], np.int64)  # the last one is for missing values
            if (unknown := of_word < 0).any():
                listed = ", ".join(map(shown, itertools.compress(words, unknown)))
                remedy = "correct it, or train with unknown: bucket for the column"
                message = f"no training row has {listed[:300]}"
                raise chunk.error(owners[first(unknown[values])], self.columns[0], message, remedy)
            blocks.append(_indicators(chunk.num, owners, of_word[values], width))
        return blocks


def _cannot_fit(where: str, message: str) -> DataError:
    remedy = "mark training rows, or reuse the state of a training with graph.vocabulary"
    return DataError(f"{message}, so transforms cannot be fitted", where=where, remedy=remedy)


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _indicators(num: int, rows: Array, codes: Array, width: int) -> Array:
    """Return float32 ``[num, width]``: 1 at each pair of row and code, else 0."""
    made = np.zeros((num, width), np.float32)
    made[rows, codes] = 1
    return made


def _is_given(step: str, argument: Any) -> bool:
    """True if a step's state is its argument, and needs no data."""
    is_bounds = step == "bucket" and not isinstance(argument, int)
    return step == "log" or is_bounds or (step == "impute" and argument not in AVERAGES)


def _fitted(step: str, argument: Any, ascending: Array) -> list[float]:
    """Return the state of a step, fitted to sorted values. Equal numbers are scaled to 0."""
    if _is_given(step, argument):
        return [] if step == "log" else np.atleast_1d(argument).tolist()
    if argument == "mean":
        return [_mean(ascending)]
    if step in ("standard", "minmax"):
        low, high = float(ascending[0]), float(ascending[-1])
        if low == high:
            return [low, 1.0]
        mean = _mean(ascending)
        deviation = math.sqrt(_mean(ascending, mean))
        return [mean, deviation] if step == "standard" else [low, high - low]
    shares = np.linspace(0, 1, min(len(ascending), _QUANTILES))  # for rank_gauss
    if argument == "median":
        shares = np.array([0.5])
    elif step == "bucket":
        shares = np.arange(1, argument) / argument
    places = shares * (len(ascending) - 1)  # interpolated between neighbours
    below = np.floor(places).astype(np.int64)
    start, end = ascending[below], ascending[np.minimum(below + 1, len(ascending) - 1)]
    quantiles: list[float] = (start + (end - start) * (places - below)).tolist()
    return quantiles


def _mean(values: Array, center: float | None = None) -> float:
    """Return the mean of the values, or of their squared distances to a center. Sums over pieces of
    fixed size make it independent of the chunks that were read."""
    total = 0.0
    for start in range(0, len(values), _ROWS):
        piece = values[start : start + _ROWS]
        total += float((piece if center is None else (piece - center) ** 2).sum())
    return total / len(values)


def _applied(step: str, state: Sequence[float], values: Array) -> Array:
    """Apply a fitted step: float64 ``[n]``, or float32 ``[n, buckets]`` for buckets."""
    if step == "impute":
        return np.where(np.isnan(values), state[0], values)
    if step == "log":
        return np.log1p(values)
    if step == "bucket":
        codes = np.searchsorted(state, values, side="right")
        return _indicators(len(values), np.arange(len(values)), codes, len(state) + 1)
    if step == "rank_gauss":
        return _rank_gauss(np.array(state), values)
    return (values - state[0]) / state[1]


def _rank_gauss(quantiles: Array, values: Array) -> Array:
    """Return the normal deviate of each value's rank among the training values. A value that equals
    several quantiles gets their middle rank; ranks stay half a quantile away from 0 and 1."""
    from scipy.special import ndtri  # slow to import, and rarely needed

    shares = np.linspace(0, 1, num := len(quantiles))
    up = np.interp(values, quantiles, shares)
    down = 1 - np.interp(-values, -quantiles[::-1], shares)
    normal: Array = ndtri(np.clip((up + down) / 2, 0.5 / num, 1 - 0.5 / num))
    return normal


class Features:
    """Columns of one feature array, read chunk by chunk: float32, or float16 if all columns of the
    first chunk are."""

    def __init__(self, described: Sequence[FeatureColumn], fill: float | None):
        self.described = described
        self.transformed = [None if one.is_plain else Transformed(one, fill) for one in described]
        self.columns = [one.column for one in described]
        self.columns += [c for one in self.transformed if one is not None for c in one.columns]
        self.fill, self.missing = fill, fill or 0.0
        self._dtype: np.dtype[Any] | None = None  # None until rows are read
        self._widths: list[int | None] = [None] * len(described)

    @property
    def kind(self) -> Kind:
        return str(self._dtype or "float32"), (sum(width or 1 for width in self._widths),)

    @property
    def names(self) -> list[str]:
        """Name of each feature: its column's, with an index if the column has several."""
        return [
            f"{one.column}[{k}]" if width > 1 else one.column
            for one, width in zip(self.described, (w or 1 for w in self._widths), strict=True)
            for k in range(width)
        ]

    @property
    def widening(self) -> int:
        """Estimated bytes that the transforms add to a row."""
        total = 0
        for one in self.described:
            total += len(one.bucket) if isinstance(one.bucket, tuple) else one.bucket or 0
            total += (one.hash or 0) + len(one.parts + 2 * one.cyclic) + one.indicator
        return 4 * total

    @property
    def fitted(self) -> list[Transformed]:
        """Columns whose transforms are fitted to data."""
        return [one for one in self.transformed if one is not None and one.is_fitted]

    def manifest(self) -> list[dict[str, Any] | None] | None:
        """Return each column's transform and state; None if no column has a transform."""
        if not any(self.transformed):
            return None
        return [one.manifest if one else None for one in self.transformed]

    def replay(self, kept: Sequence[Mapping[str, Any] | None] | None, where: str) -> None:
        """Use the state that `manifest` returned in training. Raises DataError if the transforms
        differ."""
        kept = kept or [None] * len(self.transformed)
        then = [one and one["does"] for one in kept]
        now = [one and one.signature for one in self.transformed]
        if then != now:
            pairs = zip(self.described, now, then, strict=False)
            listed = ", ".join(repr(one.column) for one, new, old in pairs if new != old)
            listed = listed or f"there are {len(now)} columns, and were {len(then)}"
            message = f"columns are not transformed as in the training: {listed}"
            remedy = "describe them as in the YAML of the training"
            raise DataError(message, where=where, remedy=remedy)
        for one, made in zip(self.transformed, kept, strict=True):
            if one is not None and made is not None:
                one.state, one.before = made["state"], made.get("before")

    def rows(self, chunk: Chunk) -> Array:
        """Return a chunk's rows; raises DataError as `matrix` and `Transformed.rows` do, and if
        float32 follows float16."""
        both = zip(self.described, self.transformed, self._widths, strict=True)
        blocks = [
            matrix(chunk, plain.column, width, self.fill) if one is None else one.rows(chunk)
            for plain, one, width in both
        ]
        rows = np.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
        if self._dtype is None:
            self._widths, self._dtype = [block.shape[1] for block in blocks], rows.dtype
        if not np.can_cast(rows.dtype, self._dtype):
            message = f"the numbers are {rows.dtype}, and were {self._dtype}"
            remedy = "use one type in all files, and no missing values if it is float16"
            raise chunk.error(0, self.columns[0], message, remedy)
        return rows.astype(self._dtype, copy=False)
