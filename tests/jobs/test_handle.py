"""Job handles: errors and progress read from a training's output, and the job server's address."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.job_submission import JobDetails, JobStatus, JobType
from rich.console import Console

from raygnn.errors import (
    InputError,
    Interrupted,
    PreflightError,
    RaygnnError,
    TrainingError,
    error_of,
)
from raygnn.jobs import server, submit
from raygnn.jobs.handle import said_error
from raygnn.jobs.server import JobInfo, JobServer, tail, unencrypted
from raygnn.jobs.submit import prepare, send
from raygnn.runs.comparison import age, metric, progress
from raygnn.runs.display import Display

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(WORDS, st.none() | WORDS, st.none() | WORDS)
def test_an_error_is_read_back(what: str, where: str | None, remedy: str | None) -> None:
    """An error that `Display` writes is read back from among other lines."""
    output = io.StringIO()
    console = Console(file=output, width=200)
    Display(console).error(TrainingError(what, where=where, remedy=remedy))
    said = said_error(f"epoch 1/2\nerror: an older one\n  at a\n{output.getvalue()}\ntrace\n")
    assert said == {
        name: text
        for name, text in (("what", what), ("where", where), ("remedy", remedy))
        if text is not None
    }


def test_several_problems_are_read_back() -> None:
    what = "2 problems\n  a.b: unknown key\n    → remove it\n  c: too small\n    → raise it"
    output = io.StringIO()
    display = Display(Console(file=output, width=200))
    display.error(TrainingError(what, where="job.yaml", remedy="see them", trace="no\n  trace"))
    assert said_error(output.getvalue()) == {
        "what": what,
        "where": "job.yaml",
        "remedy": "see them",
    }


def test_all_lines_and_the_rank_of_an_error_are_read_back() -> None:
    what = "RuntimeError: sizes differ:\n  weight: [3]\nbias: [4]"
    output = io.StringIO()
    error = TrainingError(what, where="rank 12, step 3", remedy="see them", trace="no\n  trace")
    Display(Console(file=output, width=200)).error(error)
    read = error_of(4, said_error(f"error: an older one\n{output.getvalue()}"))
    assert isinstance(read, TrainingError)
    assert (read.what, read.where, read.remedy) == (what, error.where, error.remedy)
    assert read.rank == 12
    assert said_error("error: no\nunrelated\n")["what"] == "no"


@pytest.mark.parametrize("kind", [InputError, PreflightError, TrainingError, Interrupted])
def test_an_exit_code_is_an_error(kind: type[RaygnnError]) -> None:
    error = error_of(kind.exit_code, {"what": "no", "where": "here", "remedy": "do", "rank": 3})
    assert type(error) is kind
    assert (error.what, error.where, error.remedy) == ("no", "here", "do")
    assert getattr(error, "rank", 3) == 3
    assert "exit code 77" in error_of(77, {}).what


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("http://127.0.0.1:8265", False),
        ("http://localhost:8265", False),
        ("http://[::1]:8265", False),
        ("https://head:8265", False),
        ("http://head:8265", True),
        ("http://10.0.0.1:8265", True),
        ("http://127.evil.org:8265", True),
    ],
)
def test_unencrypted_connections_cause_a_warning(address: str, warned: bool) -> None:
    assert (unencrypted(address) is not None) == warned


@pytest.mark.parametrize(
    ("given", "variables", "url"),
    [
        (None, {}, "http://127.0.0.1:8265"),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, "http://127.0.0.1:8265"),  # of Ray itself
        (None, {"RAY_ADDRESS": "http://10.0.0.1:8265/"}, "http://10.0.0.1:8265"),
        (
            None,
            {"RAY_ADDRESS": "http://10.0.0.1:8265", "RAY_API_SERVER_ADDRESS": "http://other:8265"},
            "http://other:8265",
        ),
        ("head:8265", {"RAY_API_SERVER_ADDRESS": "http://other:8265"}, "http://head:8265"),
        (" http://head:8265/\n", {}, "http://head:8265"),
    ],
)
def test_the_address(
    given: str | None, variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert server._url(given) == url


@pytest.mark.parametrize(
    "wrong",
    [
        *("ftp://a", "http://", "http://a:b", "ray://a:1", "http://a b:8265"),
        *("http://u:secret@a", "http://:secret@a:8265", "http://a:8265/?token=secret"),
    ],
)
def test_invalid_addresses_are_refused(wrong: str) -> None:
    with pytest.raises(InputError) as error:
        server._url(wrong)
    assert "secret" not in str(error.value)


def test_an_answer_that_does_not_come_is_not_awaited() -> None:
    here = JobServer.__new__(JobServer)
    here.address = "http://there"
    over = threading.Event()
    with pytest.raises(PreflightError, match="no answer from a job server"):
        here._ask(over.wait, most=0.05)
    over.set()


def test_a_token_that_lies_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    server._use_token()
    assert "RAY_AUTH_MODE" not in os.environ
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    server._use_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # set on purpose
    server._use_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.parametrize(
    ("status", "code", "state", "told"),
    [
        ("SUCCEEDED", None, "done", 0),
        ("FAILED", 2, "failed", 2),
        ("FAILED", -9, "failed", 137),
        ("FAILED", None, "failed", 4),
        ("FAILED", 130, "interrupted", 130),  # by a signal, not by the server
        ("STOPPED", 0, "interrupted", 130),
        ("RUNNING", None, "running", None),
    ],
)
def test_states_and_exit_codes_of_jobs(
    status: str, code: int | None, state: str, told: int | None
) -> None:
    details = JobDetails(
        type=JobType.SUBMISSION, status=JobStatus(status), entrypoint="x", driver_exit_code=code
    )
    info = server._info(details)
    assert (info.state, info.code) == (state, told)


def test_errors_of_the_server() -> None:
    failed = RuntimeError("Request failed with status code 500: job a-20260404-140404 is ill.")
    assert isinstance(server._error(failed, "http://a", "a-20260404-140404"), PreflightError)
    missing = RuntimeError("Request failed with status code 404: Job b does not exist.")
    assert isinstance(server._error(missing, "http://a", "b"), InputError)
    agent = RuntimeError("status code 500: No available agent to submit job, please try again")
    told = server._error(agent, "http://a", None)
    assert "No available agent" in told.what
    assert "--dashboard-agent-listen-port" in str(told.remedy)


class Growing:
    """A job server with an output that grows, and that does not answer for a while."""

    address = "http://there"

    def __init__(self, *texts: str | None):
        self.texts = list(texts)

    def info(self, job: str) -> SimpleNamespace:
        if self.texts[0] == "":
            self.texts.pop(0)
            raise PreflightError("no answer")
        return SimpleNamespace(over=len(self.texts) == 1)

    def log(self, job: str) -> str:
        if (text := self.texts.pop(0)) is None:
            raise PreflightError("no UTF-8")
        return text


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["one\ntw", "", "one\ntwo\nthr", "one\ntwo\nthree"], ["one", "two", "three"]),
        (["one\n\nhuge\n"], ["one", "", "huge"]),
        (["one\n", None], ["one", "(the job server cannot read the rest of the output)"]),
        (["one\n", None, "one\ntwo\n"], ["one", "two"]),
    ],
    ids=["grows", "over", "unreadable", "unreadable-once"],
)
def test_each_line_once_and_whole(
    texts: list[str | None], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raygnn.jobs.server._OFTENEST", 0.0)
    there: Any = Growing(*texts)
    assert list(tail(there, "job")) == shown


def test_rows() -> None:
    assert progress(80, 400) == "80/400 (20%)"
    assert progress(80, None) == "80"
    assert progress(0, 400) == ""
    assert metric({"val/loss": 1.0, "val/accuracy": 0.5, "test/f1": 0.25}) == "test/f1 0.2500"
    assert metric({"train/loss": 1.0, "val/loss": 2.0}) == "train/loss 1.0000"
    assert metric({"done": True}) == ""
    assert age(None) == ""
    assert age(1.0).endswith(" d")


def test_only_runs_of_listed_jobs_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [JobInfo(str(n), "done", 0, "cora", "/a", "raygnn", "", None) for n in range(300)]
    opened: list[str] = []
    monkeypatch.setattr(submit, "_run_of", lambda job, *_: opened.append(job))
    listed = [row["job"] for row in submit.rows_of(Mock(jobs=lambda: found))]
    assert listed == opened == [str(n) for n in range(100)]


def test_a_name_means_the_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was refused while another trained into that run is not meant."""

    def job(name: str, state: str, started: float) -> JobInfo:
        return JobInfo(name, state, None, "cora", "/mnt/runs", "raygnn", "", started)

    jobs = [job("b", "failed", 3.0), job("a", "running", 2.0), job("c", "done", 1.0)]
    here = JobServer.__new__(JobServer)
    here.address = "http://127.0.0.1:8265"
    monkeypatch.setattr(here, "jobs", lambda: jobs)
    assert here.find("cora").id == "a"
    assert here.find("c").id == "c"
    with pytest.raises(InputError, match="no job or run 'none'"):
        here.find("none")

    package = prepare(
        {
            "name": "cora",
            "storage": "/mnt/runs",
            "graph": {"format": "planted", "nodes": 100},
            "model": {"kind": "gcn"},
        }
    )
    with pytest.raises(InputError, match="a job of the run 'cora' is running: a"):
        send(package, here)
    jobs[1] = job("a", "interrupted", 2.0)
    assert here.find("cora").id == "b"
