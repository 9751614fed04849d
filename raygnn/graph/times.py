"""Times of nodes and edges: integers of any unit, and dates and durations in that unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations_with_replacement

import numpy as np

from raygnn.config.values import in_utc
from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray

# Integers of the years 1980 to 2099 show by their size which unit since 1970 they count. The year
# 9999, which often means "never", falls into none of these ranges, nor into one of a finer unit.
_MICROSECONDS = 10**6
_UNITS = {1: "seconds", 10**3: "milliseconds", _MICROSECONDS: "microseconds", 10**9: "nanoseconds"}
_FIRST, _LAST = 3 * 10**8, 41 * 10**8  # seconds
_NEVER = 2**62  # later than any
_FAR = 73 * 10**8  # seconds; later than 2200, so it means "never" or is a mistake
_APART = 50  # numbers that many times larger are in another unit; minutes are 60 seconds
_SAMPLED = 1000  # sampled times of each rank, to determine the unit
SOME_MICROSECONDS = 10**15  # a time whose size shows this unit
# Sizes of other units of the years 1980 to 2059, where they leave gaps between one another.
_COARSE = {
    "years": (1_900, 2_100),
    "days since 1970": (3_652, 32_873),
    "hours since 1970": (87_648, 788_952),
    "minutes since 1970": (5_258_880, 47_337_120),
}
_DIGITS = {"yyyymmdd": 1, "yyyymmddhhmm": 10**4, "yyyymmddhhmmss": 10**6}  # after the day


def unit_of(latest: int) -> int | None:
    """Return the units per second of a time; None if it is not in the years 1980 to 2099."""
    return next((unit for unit in _UNITS if _FIRST <= latest / unit < _LAST), None)


def sample(times: IntArray) -> IntArray:
    """Return up to 1,001 times, evenly spaced by position, and the latest, of int64 ``[n]``."""
    spaced = np.asarray(times[:: -(-len(times) // _SAMPLED) or 1], np.int64)
    return np.append(spaced, times.max()).astype(np.int64) if len(spaced) < len(times) else spaced


def typical(times: IntArray) -> int:
    """Return a time that shows the unit: the first quantile (50, 95, 5 %) that is a point in time,
    so that outliers such as the year 9999 do not hide it; else the latest; 0 without any."""
    if not len(times):
        return 0
    quantiles = np.quantile(times, (0.5, 0.95, 0.05), method="nearest").tolist()
    return next((int(time) for time in quantiles if unit_of(int(time))), int(times.max()))


@dataclass(frozen=True)
class TimeRange:
    """Range of the times of one type: an ascending sample, int64 ``[n]``, of what messages call
    ``of``. Nothing is guessed if they are ``is_explicit``: known to be microseconds since 1970."""

    of: str
    times: IntArray
    is_explicit: bool = False

    @property
    def unit(self) -> int | None:
        """Units per second; None if the times are no points in time."""
        return _MICROSECONDS if self.is_explicit else unit_of(typical(self.times))

    @property
    def _name(self) -> str | None:
        """Name of the unit that the size of the times suggests; None if it suggests none."""
        if self.unit is not None:
            return f"{_UNITS[self.unit]} since 1970"
        low, high = self._bounds
        dates = (name for name, after in _DIGITS.items() if _are_dates(self.times // after))
        sizes = (name for name, (a, b) in _COARSE.items() if a <= low and high < b)
        return next(dates, next(sizes, None))

    @property
    def is_informative(self) -> bool:
        """True if the times show a unit: they vary, or have the size of one. Nearly constant
        numbers such as 0 do not."""
        return len(self.times) > 0 and (len({*self._bounds}) > 1 or self._name is not None)

    @property
    def far(self) -> IntArray:
        """Times after the year 2200, in this unit."""
        return self.times[self.times > _FAR * self.unit] if self.unit else self.times[:0]

    def differs(self, other: TimeRange) -> bool:
        """Return True if the other times are in another unit, as far as numbers show that; if
        ``other`` is this range, if some of its times are. Numbers of no known unit, such as dates
        before 1980, differ from points in time if they are much smaller or larger."""
        if other is self:
            found = [np.mean((_FIRST * u <= self.times) & (self.times < _LAST * u)) for u in _UNITS]
            return not self.is_explicit and bool(sum(found) > 0.9 and sorted(found)[-2] >= 0.05)
        names = {each._name for each in (self, other)}
        if None not in names or len(names) == 1:
            return len(names) == 2
        sizes = [max(1, *(abs(bound) for bound in each._bounds)) for each in (self, other)]
        return not names & _COARSE.keys() and max(sizes) >= _APART * min(sizes)

    @property
    def _bounds(self) -> tuple[int, int]:
        low, high = np.quantile(self.times, (0.02, 0.98), method="nearest")
        return int(low), int(high)

    def __str__(self) -> str:
        low, high = self._bounds
        text = f"{self.of}: {low}" + f" to {high}" * (low != high)
        if self.unit is not None:
            return f"{text}, {self._name} ({_day(low, self.unit)} to {_day(high, self.unit)})"
        return f"{text}, perhaps {self._name}" if self._name else f"{text}, of no known unit"


def _are_dates(days: IntArray) -> bool:
    """Return True if nearly all numbers are dates from 1900 to 2100, written as yyyymmdd."""
    parts = days // 10_000, days // 100 % 100, days % 100
    ranges = (1900, 2100), (1, 12), (1, 31)  # year, month, day
    within = [(low <= part) & (part <= high) for part, (low, high) in zip(parts, ranges)]
    valid = np.logical_and.reduce(within)
    return bool(np.mean(valid) >= 0.95)


def _day(time: int, unit: int) -> str:
    seconds = min(max(time // unit, -62_135_596_800), 253_402_300_799)  # the years 1 to 9999
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def check_units(
    ranges: Sequence[TimeRange],
    effect: str = "later edges would be seen as earlier ones",
    where: str = "sampling.time",
) -> None:
    """Raise DataError if times that are compared with one another are in different units, which
    would have this ``effect``."""
    informative = [each for each in ranges if each.is_informative]
    for one, other in combinations_with_replacement(informative, 2):
        if one.differs(other):
            more = other if other is not one else "and in another unit"
            raise DataError(
                f"times are in different units, so {effect}: {one}; {more}",
                where=where,
                remedy="give all times in one unit, or as dates; tables convert a column of "
                "numbers whose unit is named: time: {column: at, unit: s}",
            )


def per_second(latest: int) -> int:
    """Return `unit_of` the latest time. Raises DataError if it is no point in time."""
    if (unit := unit_of(latest)) is not None:
        return unit
    raise DataError(
        f"the latest time is {latest}, which are no seconds, milliseconds, microseconds or "
        "nanoseconds since 1970, so it is not clear what a date or a duration is",
        remedy="give times and lengths of time as whole numbers, in the units of the data",
    )


def moment(value: int | str, latest: int, among: Sequence[TimeRange] = (), of: str = "") -> int:
    """Convert a number, or ISO text, in UTC unless it names a zone, to the unit that ``latest``
    shows (see `typical`); a number outside of ``among`` must not show another."""
    if isinstance(value, int):
        if not any(len(r.times) and r.times[0] <= value <= r.times[-1] for r in among):
            check_units([*among, TimeRange(of, np.array([value]))], "all or none are before", of)
        return value
    return min(round(in_utc(value).timestamp() * per_second(latest)), _NEVER)


def since(times: IntArray, val: float | int | str, test: float | int | str) -> tuple[int, int]:
    """Return the times from which on seeds are for validation, and for test.

    ``val`` and ``test`` are times (see `moment`), or shares, which are met as nearly as possible
    with seeds of one time in one split.
    """
    if not (isinstance(val, float) and isinstance(test, float)):
        among = typical(times), [TimeRange("the times", np.sort(times))], "task.split"
        assert not isinstance(val, float)
        assert not isinstance(test, float)
        return moment(val, *among), moment(test, *among)
    ascending = np.sort(times)
    marks = [round(len(times) * (1 - part)) for part in (val + test, test)]
    first, second = (int(ascending[m]) if m < len(times) else _NEVER for m in marks)
    return first, second


def codes_since(times: IntArray, bounds: tuple[int, int]) -> Array:
    """Return the split of each time, int8 ``[n]``: 0 train, 1 validation, 2 test."""
    return np.searchsorted(np.array(bounds), times, side="right").astype(np.int8)
