"""Lengths of time, read and printed."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.values import Duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30m", 1800),
        ("10s", 10),
        ("2h", 7200),
        ("1d", 86400),
        ("1.5h", 5400),
        (" 10 m ", 600),
        (90, 90),
        (0.25, 0.25),
        (timedelta(minutes=2), 120),
        (Duration(7), 7),
    ],
)
def test_parse(value: str | float | timedelta | Duration, seconds: float) -> None:
    assert Duration.parse(value) == Duration(seconds)


@pytest.mark.parametrize(
    "value",
    ["", "30", "m", "-1m", "0s", "1w", "1h30m", "1e3s", "٣m", "999999999d", 0, -1, 1e-9]
    + [True, None, [1], float("nan"), float("inf"), 10**400],
)
def test_refused(value: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        Duration.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"), [(1800, "30m"), (90, "90s"), (7200, "2h"), (86400, "1d"), (0.5, "0.5s")]
)
def test_print(seconds: float, text: str) -> None:
    assert str(Duration(seconds)) == text


@given(st.integers(1, 10 * 365 * 86400) | st.floats(1e-3, 1e6))
def test_print_is_read_back(seconds: float) -> None:
    assert Duration.parse(str(Duration(seconds))) == Duration(seconds)
