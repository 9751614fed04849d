"""Descriptions of the error that ended a rank."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import FailureConfig
from ray.train.v2.api.exceptions import WorkerGroupError

from raygnn.compat import FailureDecision
from raygnn.driver.launch import explain
from raygnn.driver.scaling import Failures
from raygnn.errors import LONGEST_TEXT, LONGEST_TRACE, DataError, TrainingError
from raygnn.util.files import storage_errors
from raygnn.worker import blackbox, main
from raygnn.worker import failures as faults
from raygnn.worker.failures import describe
from raygnn.worker.job import Job
from raygnn.worker.rank_setup import cause_of
from tests.support.small_jobs import JobFactory, train_on_ranks


def _described(error: BaseException, cause: BaseException | None = None) -> TrainingError:
    try:
        raise error from cause
    except type(error) as caught:
        failure = describe(caught, 1, "", [])
    assert "Traceback" in failure.trace  # for the rank's log, whatever the user's message is
    return failure.as_error()


def test_bad_input_is_reported_without_a_trace() -> None:
    error = _described(DataError("no node has the id 9", where="ids.txt", remedy="leave it out"))
    assert (error.what, error.where) == ("no node has the id 9", "rank 1, ids.txt")
    assert error.trace is None
    assert error.exit_code == DataError.exit_code


def test_storage_that_is_away_is_told_with_its_path() -> None:
    error = _described(OSError(errno.EIO, "Input/output error", "/runs/r/checkpoints"))
    assert error.what == "the storage does not answer: Input/output error"
    assert error.where == "rank 1, /runs/r/checkpoints"
    assert "--resume" in str(error.remedy)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(DataError("row 3 cannot be read"), ValueError("of your own")), (KeyError("x"), None)],
)
def test_what_the_users_code_raised_is_shown(
    error: BaseException, cause: BaseException | None
) -> None:
    assert "Traceback" in str(_described(error, cause).trace)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


STRANGE: dict[str, tuple[BaseException, str]] = {
    "surrogates": (ValueError("a name: d\udcff\udce9"), r"ValueError: a name: d\udcff\udce9"),
    "unspeakable": (Unspeakable(), "Unspeakable: <no text: __str__ raised Runtime"),
    "long": (ValueError("x" * 3_000_000), "characters left out"),
    "ours": (DataError("y" * 3_000_000, where="z"), "characters left out"),
    "exit": (SystemExit("enough"), "SystemExit: enough"),
    "interrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_any_exception_can_be_told(
    name: str, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every file for it holds a bounded text in UTF-8, and so does the raised error."""
    monkeypatch.setattr(blackbox, "_current", None)
    monkeypatch.setattr(main, "_watch", lambda stop, recorder: None)
    error, words = STRANGE[name]
    job = Job(make_job(), None, tmp_path, {}, True, 0.0, 128)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-0.log"
    raised = pytest.raises(TrainingError)
    with faults.log_to(log), raised as caught, main.recorded(job, 0, 1, 1, []):
        raise error
    told = caught.value
    assert words in told.what
    assert len(told.what) < LONGEST_TEXT + 100
    json.dumps([told.what, told.trace], ensure_ascii=False).encode()
    (failure,) = faults.recorded(tmp_path)
    assert failure.what == told.what
    assert "test_failures.py" in failure.trace
    for file in (tmp_path / "logs").iterdir():
        assert len(file.read_bytes().decode("utf-8", "ignore")) < 2 * LONGEST_TRACE, file


@pytest.mark.dgl
@pytest.mark.parametrize("how", ["exit", "interrupt", "stop"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_exceptions_that_end_loops_are_reported(
    how: str, evaluates: bool, make_job: JobFactory
) -> None:
    """Lightning treats these as Ctrl-C, or as the end of the process or of the data."""
    args: dict[str, Any] = {"how": how, "evaluates": evaluates}
    config = make_job(
        graph={"nodes": 200},
        model={"kind": "tests.support.unfit:ExitsInBatch", "args": args},
        cluster={"workers": 1},
    )
    kind = {"exit": "SystemExit", "interrupt": "KeyboardInterrupt", "stop": "StopIteration"}[how]
    with pytest.raises(RuntimeError, match=f"{kind}: enough was raised in the model") as caught:
        train_on_ranks(config)
    assert "unfit.py" in str(caught.value)


@pytest.mark.parametrize("cause", [OSError(errno.EIO, "Input/output error"), None])
def test_a_batch_that_fails_keeps_its_cause(cause: OSError | None) -> None:
    """Storage that is away ends the attempt only, and bad data the run, whatever failed next."""
    failure: Any = SimpleNamespace(failure=DataError("cannot be read", where="/parts/feat.npy"))
    failure.failure.__cause__ = cause
    with pytest.raises(DataError) as caught, cause_of(failure):
        raise RuntimeError("Connection closed by peer")
    assert describe(caught.value, 1, "", []).final is (cause is None)


@pytest.mark.parametrize(
    ("number", "final"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, True), (errno.EIO, False)],
)
def test_storage_that_stays_full_is_not_tried_by_another_start(
    number: int, final: bool, tmp_path: Path
) -> None:
    """No attempt follows, even if the failure could not be recorded."""
    with pytest.raises(TrainingError) as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert os.strerror(number) in caught.value.what
    assert caught.value.where == str(tmp_path)
    error = pickle.loads(pickle.dumps(_described(caught.value)))
    assert (error.final, error.where) == (final, f"rank 1, {tmp_path}")
    other = TrainingError("RuntimeError: Connection closed by peer", rank=0)
    failures = WorkerGroupError("two workers failed", {0: other, 1: error})
    wanted = FailureDecision.RAISE if final else FailureDecision.RETRY
    assert Failures(FailureConfig(max_failures=3)).make_decision(failures) is wanted
    if final:
        assert explain(failures, []) is error
