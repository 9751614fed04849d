"""The package is in order, and no larger than it was: see `budget`."""

from __future__ import annotations

from tests import budget


def test_package_is_in_order() -> None:
    assert list(budget.disorder()) == []


def test_nothing_grows() -> None:
    assert list(budget.growth()) == []
