"""Times in the units of the data, and splits by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.errors import DataError
from raygnn.graph.times import codes_since, moment, per_second, since

SHARES = st.floats(0, 0.49)


@given(st.lists(st.integers(-50, 50), max_size=60), SHARES, SHARES)
def test_what_is_at_one_time_is_in_one_split(values: list[int], val: float, test: float) -> None:
    times = np.array(values, np.int64)
    codes = codes_since(times, since(times, val, test))
    for time in set(values):
        assert len(set(codes[times == time].tolist())) == 1
    assert (np.diff(codes[np.argsort(times)]) >= 0).all()  # the earliest train, the latest test
    # as many as the shares say, but for those of the time at which a split begins
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
