"""Times of nodes and edges: whole numbers of any unit, and what dates and durations are in them."""

from __future__ import annotations

import numpy as np

from raygnn.config.values import in_utc
from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray

# of the years 1980 to 2099 whole numbers say by themselves which units since 1970 they count; the
# year 9999, with which people mean never, is in none of them, a thousand times finer ones included
_UNITS = (1, 10**3, 10**6, 10**9)  # in a second
_FIRST, _LAST = 3 * 10**8, 41 * 10**8  # seconds
_NEVER = 2**62  # later than any


def unit_of(latest: int) -> int | None:
    """How many units of times there are in a second, as the latest of them tells; None: they are no
    points in time of the years 1980 to 2099."""
    return next((unit for unit in _UNITS if _FIRST <= latest / unit < _LAST), None)


def per_second(latest: int) -> int:
    """As `unit_of`.

    Raises:
        DataError: they are no points in time.
    """
    if (unit := unit_of(latest)) is not None:
        return unit
    raise DataError(
        f"the latest time is {latest}, which are no seconds, milliseconds, microseconds or "
        "nanoseconds since 1970, so it is not clear what a date or a duration is",
        remedy="give times and lengths of time as whole numbers, in the units of the data",
    )


def moment(value: int | str, latest: int) -> int:
    """A time in the data's units.

    Args:
        value: in these units, or ISO text, of UTC where it has no zone.
        latest: of the data's times.
    """
    if isinstance(value, int):
        return value
    return min(round(in_utc(value).timestamp() * per_second(latest)), _NEVER)


def since(times: IntArray, val: float | int | str, test: float | int | str) -> tuple[int, int]:
    """From when on there are seeds for validation, and for test.

    What is at one time is in one split, so that shares are met as nearly as that allows.

    Args:
        times: int64 ``[n]``, of all seeds.
        val, test: shares, or such times (see `moment`).
    """
    if not (isinstance(val, float) and isinstance(test, float)):
        latest = int(times.max(initial=0))
        assert not isinstance(val, float)
        assert not isinstance(test, float)
        return moment(val, latest), moment(test, latest)
    ascending = np.sort(times)
    marks = [round(len(times) * (1 - part)) for part in (val + test, test)]
    first, second = (int(ascending[m]) if m < len(times) else _NEVER for m in marks)
    return first, second


def codes_since(times: IntArray, bounds: tuple[int, int]) -> Array:
    """The split of each time, int8 ``[n]``: 0 to train, 1 to validate, 2 to test."""
    return np.searchsorted(np.array(bounds), times, side="right").astype(np.int8)
