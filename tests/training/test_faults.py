"""What is left of the error that ended a rank."""

from __future__ import annotations

import pytest

from raygnn.errors import DataError, TrainingError
from raygnn.training.faults import describe


def _described(error: BaseException, cause: BaseException | None = None) -> TrainingError:
    try:
        raise error from cause
    except type(error) as caught:
        failure = describe(caught, 1, "", [])
    assert "Traceback" in failure.trace  # for the rank's log, whatever the user is told
    return failure.as_error()


def test_bad_input_is_told_without_a_trace() -> None:
    error = _described(DataError("no node has the id 9", where="ids.txt", remedy="leave it out"))
    assert (error.what, error.where) == ("no node has the id 9", "rank 1, ids.txt")
    assert error.trace is None
    assert error.exit_code == DataError.exit_code


@pytest.mark.parametrize(
    ("error", "cause"),
    [(DataError("row 3 cannot be read"), ValueError("of your own")), (KeyError("x"), None)],
)
def test_what_the_users_code_raised_is_shown(
    error: BaseException, cause: BaseException | None
) -> None:
    assert "Traceback" in str(_described(error, cause).trace)
