"""What is left of a run for those who look at it later, however it ends."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.driver import record_forwarding, session
from raygnn.driver.loggers.process import Loggers
from raygnn.errors import Interrupted, TrainingError
from raygnn.runs.display import NullDisplay
from raygnn.runs.run_directory import RunDir
from raygnn.worker.job import ROWS, STOP, clean_up
from tests.small_jobs import job


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create(str(tmp_path), "job") as run:
        yield run


def test_a_run_that_fails_leaves_a_report(run: RunDir) -> None:
    show = NullDisplay()
    run.begin({"name": "job"})
    with contextlib.suppress(TrainingError), record_forwarding.reported(run, show):
        record_forwarding.record_notes(run, show)
        show.note("rank 1 <failed>: no room")
        run.update_summary(status="failed", error="no room for <b>it</b>")
        raise TrainingError("no room")
    page = (run.path / "report.html").read_text()
    assert "no room for &lt;b&gt;it" in page
    assert "rank 1 &lt;failed&gt;: no room" in page
    show.note("after it")
    assert "after it" not in (run.path / "logs" / "told.jsonl").read_text()


def test_commands_that_go_on_with_a_run_add_to_what_was_told(run: RunDir) -> None:
    run.begin({"name": "job"})
    for text in ("first", "second"):
        show = NullDisplay()
        record_forwarding.record_notes(run, show)
        show.note(text)
    lines = (run.path / "logs" / "told.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert [text for text in texts if "began" not in text] == ["first", "second"]
    assert len(texts) == 4


def test_a_report_that_cannot_be_written_hides_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(record_forwarding, "write_report", fail)
    with record_forwarding.reported(run, NullDisplay()):
        run.begin({"name": "job"})
    with pytest.raises(KeyboardInterrupt), record_forwarding.reported(run, NullDisplay()):
        raise KeyboardInterrupt


@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_removed_at_the_end_is_the_runs_own(run: RunDir, replaced: bool) -> None:
    """What another command has put in its place stays."""
    run.begin({"name": "job"})
    if replaced:
        shutil.rmtree(run.path)
    (run.path / ".ray").mkdir(parents=True)
    (run.path / ROWS).mkdir()
    (run.path / STOP).touch()
    with session._cleared(run, keep=False):
        clean_up(run, local=True)
    names = {path.name for path in run.path.glob("*")}
    assert names == ({".ray", ROWS, STOP} if replaced else set())
    assert run.path.exists() is replaced


def test_a_run_that_did_not_begin_has_no_report(run: RunDir) -> None:
    with record_forwarding.reported(run, NullDisplay()):
        pass
    assert not (run.path / "report.html").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "done"),
        (Interrupted("stop"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (TrainingError("bad"), "failed"),
    ],
)
def test_loggers_are_told_how_it_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | None,
    status: str,
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(Loggers, "end", lambda self, status: ends.append(status))
    loggers = Loggers(load_config(job(tmp_path)), tmp_path)
    with contextlib.suppress(BaseException), loggers.ending():
        if error is not None:
            raise error
    assert ends == [status]
