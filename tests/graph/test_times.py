"""Times in the units of the data, and splits by them."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.errors import DataError
from raygnn.graph.times import (
    TimeRange,
    check_units,
    codes_since,
    moment,
    per_second,
    sample,
    since,
    typical,
)

SHARES = st.floats(0, 0.49)


@given(st.lists(st.integers(-50, 50), max_size=60), SHARES, SHARES)
def test_equal_times_are_in_the_same_split(values: list[int], val: float, test: float) -> None:
    times = np.array(values, np.int64)
    codes = codes_since(times, since(times, val, test))
    for time in set(values):
        assert len(set(codes[times == time].tolist())) == 1
    assert (np.diff(codes[np.argsort(times)]) >= 0).all()  # the earliest train, the latest test
    # counts follow the fractions, except for edges at the time at which a split begins
    most = max([values.count(time) for time in values], default=0)
    for code, share in ((2, test), (1, val + test)):
        assert abs(int((codes >= code).sum()) - share * len(values)) <= most + 1


def test_splits_that_begin_at_a_time() -> None:
    times = np.array([9, 10, 11, 20, 21])
    assert codes_since(times, since(times, 10, 20)).tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_dates_are_in_the_units_of_the_data(unit: int) -> None:
    latest = 1_790_000_000 * unit
    assert per_second(latest) == unit
    assert moment("2026-01-01", latest) == 1_767_225_600 * unit
    assert moment("2026-01-01T01:00:00+01:00", latest) == 1_767_225_600 * unit
    assert moment(17, latest) == 17


NEVER = 253_402_214_400  # seconds to the last day of 9999


@pytest.mark.parametrize(
    "latest", [0, 1000, 10**10, 10**13, 2**62, *(NEVER * unit for unit in (1, 10**3, 10**6))]
)
def test_times_that_are_no_points_in_time(latest: int) -> None:
    with pytest.raises(DataError, match="it is not clear what a date or a duration is"):
        moment("2026-01-01", latest)
    assert moment(17, latest) == 17


UNITS = [1, 10**3, 10**6, 10**9]
DAY = 86_400


def some_times(unit: int, begin: int = 1_600_000_000, days: int = 90) -> np.ndarray:
    """Return a thousand times over some days."""
    return (begin + np.arange(1000) * days * DAY // 1000) * unit


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("other", UNITS)
@pytest.mark.parametrize("never", [0, 1, 40])
def test_units_are_compared_by_quantiles(unit: int, other: int, never: int) -> None:
    one, two = some_times(unit), some_times(other, 1_650_000_000)
    one[:never] = min(NEVER * unit, 2**62)
    for times in (two, two[:1]):  # the unit of seeds with a single date is recognised, too
        ranges = [TimeRange("a", np.sort(one)), TimeRange("b", np.sort(times))]
        if unit == other:
            check_units(ranges)
            continue
        with pytest.raises(DataError, match=r"times are in different units.*a: .*2020-") as caught:
            check_units(ranges)
        assert "unit: s" in str(caught.value.remedy)


@pytest.mark.parametrize("unit", UNITS)
def test_days_and_ordinals_are_no_points_in_time(unit: int) -> None:
    days, ordinals = some_times(1) // DAY, np.arange(20_000)
    constant = np.zeros(1000, np.int64)  # edges that were always there
    for numbers in (days, ordinals):
        check_units([TimeRange("a", numbers), TimeRange("b", np.arange(5, 4000))])
        with pytest.raises(DataError, match="different units"):
            check_units([TimeRange("a", numbers), TimeRange("b", some_times(unit))])
    check_units([TimeRange("a", constant), TimeRange("b", some_times(unit))])
    assert "perhaps days since 1970" in str(TimeRange("a", days))


def test_times_long_ago_have_the_unit_of_later_ones() -> None:
    """Dates of birth since 1900 are beside events of one year."""
    births = np.sort(some_times(10**6, -2_200_000_000, 100 * 365))
    check_units([TimeRange("a", births), TimeRange("b", some_times(10**6))])
    with pytest.raises(DataError, match="different units"):
        check_units([TimeRange("a", births), TimeRange("b", some_times(1))])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (some_times(10**6, 200_000_000), some_times(10**6)),  # 1976, and 2020
        (np.arange(0, 6 * 10**7, 10**5), some_times(1)),  # 1970 to 1972, and 2020
        (np.arange(0, 2 * 10**9, 10**6), np.arange(0, 2 * 10**8, 10**5)),  # steps of a recording
    ],
    ids=["dates before 1980", "dates of 1970", "ordinals"],
)
def test_time_ranges_that_may_share_a_unit_pass(one: np.ndarray, two: np.ndarray) -> None:
    check_units([TimeRange("a", one), TimeRange("b", two)])


SECONDS = some_times(1, 1_577_836_800, 1500)  # 2020 to 2024
DATES = [datetime.fromtimestamp(second, UTC) for second in SECONDS.tolist()]
WRITTEN = {
    name: np.array([int(date.strftime(form)) for date in DATES])
    for name, form in {"years": "%Y", "yyyymmdd": "%Y%m%d", "yyyymmddhhmm": "%Y%m%d%H%M"}.items()
}
COARSE = WRITTEN | {
    f"{name} since 1970": SECONDS // length
    for name, length in {"days": DAY, "hours": 3600, "minutes": 60}.items()
}


@pytest.mark.parametrize(("one", "two"), [*combinations([*COARSE, "milliseconds since 1970"], 2)])
def test_units_that_are_no_parts_of_seconds(one: str, two: str) -> None:
    """Minutes since 1970 are beside dates written as numbers of about the same size."""
    units = COARSE | {"milliseconds since 1970": SECONDS * 1000}
    check_units([TimeRange("a", units[one]), TimeRange("b", units[one][::2])])
    with pytest.raises(DataError, match=f"a: .*{one}.*; b: .*{two}"):
        check_units([TimeRange("a", units[one]), TimeRange("b", units[two])])


def test_nothing_is_guessed_where_units_are_named() -> None:
    """Two clocks in microseconds have values of the size of seconds since 1970, and of steps."""
    one, two = np.arange(4 * 10**8, 4 * 10**9, 10**6), np.arange(1000)
    check_units([TimeRange("a", one, True), TimeRange("b", two, True)])
    with pytest.raises(DataError, match="different units"):
        check_units([TimeRange("a", one), TimeRange("b", two)])


@given(st.integers(0, 5000))
def test_a_sample_is_small_and_of_the_times(num: int) -> None:
    taken = sample(np.arange(num))
    assert len(taken) == min(num, len(taken)) <= 1001
    assert not num or taken[-1] == num - 1  # one far time among many is named, too
    assert (len(taken) > 0) == (num > 0)
    assert typical(np.arange(num)) == (num - 1 if num else 0)


def test_splits_by_date_beside_the_year_9999() -> None:
    times = np.append(some_times(1000), NEVER * 1000)
    assert since(times, "2020-10-01", "2020-11-01") == (1_601_510_400_000, 1_604_188_800_000)


@pytest.mark.parametrize(("one", "other"), [*combinations(UNITS, 2)])
def test_units_within_one_column_and_of_a_bound(one: int, other: int) -> None:
    """Half in each are refused; so is a time of another unit, which would select all or nothing."""
    mixed = np.sort(np.append(some_times(one)[::2], some_times(other)[1::2]))
    with pytest.raises(DataError, match=r"in different units, so .*a: .*; and in another unit"):
        check_units([TimeRange("a", mixed)])
    check_units([TimeRange("a", mixed, True)])
    for data, bound in ((one, other), (other, one)):
        with pytest.raises(DataError, match=r"the times: .*; task.split: 16"):
            since(some_times(data), "2020-10-01", 1_604_188_800 * bound)
    steps = np.arange(0, 10**9, 10**6)  # half of them have the size of seconds
    assert since(steps, 20_000_000, 950_000_000) == (20_000_000, 950_000_000)
