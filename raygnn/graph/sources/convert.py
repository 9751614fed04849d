"""From arrays as files hold them to the conventional ones of a NodeFrame and an EdgeFrame."""

from __future__ import annotations

from typing import Any

import numpy as np

from raygnn.errors import DataError

Array = np.ndarray[Any, Any]


def require_rows(array: Array, num: int, origin: str, of: str) -> None:
    """Refuse an array that has not one row for each of the ``num`` things called ``of``."""
    if array.ndim == 0 or len(array) != num:
        raise DataError(
            f"its shape is {array.shape}, but there are {num} {of}",
            where=origin,
            remedy=f"Give one row for each of the {of}.",
        )


def require_features(array: Array, origin: str) -> None:
    """Refuse anything but a matrix of numbers."""
    if array.dtype.kind not in "biuf" or array.ndim != 2:
        raise DataError(
            f"it has shape {array.shape} and dtype {array.dtype}",
            where=origin,
            remedy="Features are a matrix of numbers, one row for each node.",
        )


def to_features(array: Array, origin: str) -> Array:
    """Features as float32 ``[N, F]``; raises DataError for anything but a matrix of numbers that
    float32 holds."""
    require_features(array, origin)
    with np.errstate(over="ignore"):  # which is told below, with its place
        found = array.astype(np.float32, copy=False)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        for row in np.flatnonzero(np.isinf(found).any(axis=1)):
            for column in np.flatnonzero(np.isinf(found[row]) & np.isfinite(array[row])):
                value = array[row, column]
                raise DataError(
                    f"the value in column {column} is {value}, more than float32 holds",
                    where=f"{origin}, row {row}",
                    remedy="Scale the features, or replace or drop such rows.",
                )
    return found


def to_labels(array: Array, origin: str) -> Array:
    """Labels as int64 ``[N]``, from ``[N]`` or ``[N, 1]``; a float NaN becomes -1, unknown.

    Raises:
        DataError: another shape, or a value that is not an integer (the first one is named).
    """
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        raise DataError(
            f"it has shape {array.shape} and dtype {array.dtype}",
            where=origin,
            remedy="Labels are one integer for each node, -1 where unknown.",
        )
    if array.dtype.kind == "f":
        known = np.where(np.isnan(array), -1, array)
        bad = np.flatnonzero((known != np.trunc(known)) | (np.abs(known) >= 2**53))
        if len(bad):
            raise DataError(
                f"the label {array[bad[0]]} is not an integer",
                where=f"{origin}, row {bad[0]}",
                remedy="Labels are integers from 0 to the number of classes - 1, -1 where unknown.",
            )
        array = known
    return array.astype(np.int64, copy=False)


def to_mask(array: Array, origin: str) -> Array:
    """A mask as bool ``[N]``, from bool or from integers that are 0 or 1.

    Raises:
        DataError: another shape or dtype, or another value (the first one is named).
    """
    if array.dtype.kind not in "biu" or array.ndim != 1:
        raise DataError(
            f"it has shape {array.shape} and dtype {array.dtype}",
            where=origin,
            remedy="A mask is one bool (or 0 or 1) for each node, not a list of node ids.",
        )
    if array.dtype.kind != "b":
        bad = np.flatnonzero((array != 0) & (array != 1))
        if len(bad):
            raise DataError(
                f"the value {array[bad[0]]} is neither 0 nor 1",
                where=f"{origin}, row {bad[0]}",
                remedy="A mask is one bool (or 0 or 1) for each node, not a list of node ids.",
            )
    return array.astype(np.bool_, copy=False)


def to_ids(array: Array, num: int, origin: str, column: str) -> Array:
    """Node ids as int64 ``[E]``, each in ``0 … num-1``; DataError names the first that is not."""
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(
            f"{column} has shape {array.shape} and dtype {array.dtype}",
            where=origin,
            remedy="Edges are pairs of integer node ids.",
        )
    if len(array) and (array.min() < 0 or array.max() >= num):
        row = int(np.argmax((array < 0) | (array >= num)))
        raise DataError(
            f"{column} {array[row]} is not a node: there are {num}",
            where=f"{origin}, row {row}",
            remedy=f"Node ids run from 0 to {num - 1}.",
        )
    return array.astype(np.int64, copy=False)
