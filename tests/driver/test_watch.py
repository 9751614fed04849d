"""Display of a run's progress, and the files that remain of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from raygnn.config.load import load_config
from raygnn.driver import session, watch
from raygnn.driver.launch import Launch
from raygnn.driver.loggers import Loggers
from raygnn.driver.startup import startup_progress
from raygnn.driver.watch import SaveFile
from raygnn.errors import Interrupted, TrainingError
from raygnn.runs import interrupts, run_page
from raygnn.runs.display import NullDisplay
from raygnn.runs.run_directory import RunDir
from raygnn.worker.control import Control, RankProgress, Worker
from raygnn.worker.job import ROWS
from tests.support.small_jobs import job


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(str(tmp_path), "job") as run:
        yield run


def test_a_run_that_fails_leaves_a_report(run: RunDir) -> None:
    show = NullDisplay()
    run.begin({"name": "job"})
    with contextlib.suppress(TrainingError), run_page.reported(run, show) as record_notes:
        record_notes()
        show.note("rank 1 <failed>: no room")
        run.update_summary(status="failed", error="no room for <b>it</b>")
        raise TrainingError("no room")
    text = (run.path / "report.html").read_text()
    assert "no room for &lt;b&gt;it" in text
    assert "rank 1 &lt;failed&gt;: no room" in text
    show.note("after it")
    assert "after it" not in (run.path / "logs" / "told.jsonl").read_text()


def test_resuming_commands_append_to_the_notes(run: RunDir) -> None:
    run.begin({"name": "job"})
    for text in ("first", "second"):
        show = NullDisplay()
        with run_page.reported(run, show) as record_notes:
            record_notes()
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

    monkeypatch.setattr(run_page, "write_report", fail)
    with run_page.reported(run, NullDisplay()):
        run.begin({"name": "job"})
    with pytest.raises(KeyboardInterrupt), run_page.reported(run, NullDisplay()):
        raise KeyboardInterrupt


@pytest.mark.parametrize("replaced", [False, True])
def test_only_the_runs_own_directories_are_removed(run: RunDir, replaced: bool) -> None:
    """The run's temporary directories are removed, unless another command has replaced the run
    directory."""
    run.begin({"name": "job"})
    if replaced:
        shutil.rmtree(run.path)
    (run.path / ".ray").mkdir(parents=True)
    (run.path / ROWS).mkdir()
    with session._cleared(run):
        pass
    names = {path.name for path in run.path.glob("*")}
    assert names == ({".ray", ROWS} if replaced else set())
    assert run.path.exists() is replaced


def test_a_run_that_did_not_begin_has_no_report(run: RunDir) -> None:
    with run_page.reported(run, NullDisplay()):
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
def test_loggers_receive_the_final_status(
    tmp_path: Path, error: BaseException | None, status: str
) -> None:
    (tmp_path / "logs").mkdir()
    loggers = Loggers(load_config(job(tmp_path)), tmp_path)
    thread = Mock(done=True, is_alive=lambda: False)
    loggers._threads.append(thread)
    with contextlib.suppress(BaseException), loggers:
        if error is not None:
            raise error
    thread.finish.assert_called_once_with(status)


# ── before the first step ────────────────────────────────────────────────────────────────────


def progress_of(*phases: str) -> str:
    control = Control()
    control.begin([Worker("host", "node")] * len(phases))
    for rank, phase in enumerate(phases):
        control.report(RankProgress(1, rank, "host", 1, phase, beat=1))
    return startup_progress(control.snapshot())


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        ((), ""),
        (("setup", "staging"), "staging parts, 1 of 2 workers"),
        (("", "batch"), "starting, 1 of 2 workers"),
        (("forward", "batch"), "preparing the first batch, 2 of 2 workers"),  # of a step
    ],
)
def test_progress_is_that_of_the_slowest_rank(phases: tuple[str, ...], told: str) -> None:
    assert progress_of(*phases) == told


def test_ranks_of_an_earlier_attempt_are_not_reported() -> None:
    control = Control(attempts=3)
    control.begin([Worker("host", "node")])
    control.report(RankProgress(3, 0, "host", 1, "imports", beat=1))
    assert startup_progress(control.snapshot()) == ""


# ── a checkpoint for who makes a file ────────────────────────────────────────────────────────


@pytest.mark.parametrize("saved", [True, False])
def test_a_file_is_a_request(run: RunDir, saved: bool) -> None:
    control = Control()
    launch: Any = SimpleNamespace(running=lambda: True, snapshot=None, control=control)
    looks = SaveFile(run, launch)
    looks.poll()
    assert not control.pending_saves()
    file = run.path / ".save"
    file.touch()
    looks._next = 0.0
    for _ in range(3):
        looks.poll()
        launch.snapshot = control.snapshot()
    assert len(control.pending_saves()) == 1
    assert file.exists()
    control.answer_saves(control.pending_saves(), saved=saved)
    launch.snapshot = control.snapshot()
    looks.poll()
    assert not file.exists()
    assert not control.snapshot().answers


@pytest.mark.parametrize(
    ("answer", "sending", "waits"),
    [
        (None, False, True),
        (True, False, False),
        (False, False, False),
        (True, True, True),
        ("before", False, False),  # as of the last step, in the last evaluation
    ],
)
def test_a_last_checkpoint_is_waited_for_as_long_as_it_may_take(
    answer: Any, sending: bool, waits: bool, tmp_path: Path
) -> None:
    control = Control()
    control.update(sending=sending, saved_last=answer == "before")

    class Ranks(Launch):
        def __init__(self, config: Any):
            self._job: Any = SimpleNamespace(config=config)
            self._control: Any = control
            self.snapshot = control.snapshot()

        def running(self) -> bool:
            if isinstance(answer, bool):
                control.answer_saves(control.pending_saves(), saved=answer)
            self.snapshot = control.snapshot()
            return True

    launch = Ranks(load_config(job(tmp_path, fault={"save_timeout": "0.4s"})))
    began = time.monotonic()
    launch.save()
    seconds = time.monotonic() - began
    assert (seconds >= 0.4) is waits
    assert seconds < 20


def test_a_stop_ends_the_wait_for_the_workers(run: RunDir) -> None:
    """The wait ends between two polls, and interrupts neither."""
    looks: list[str] = []
    session_of: Any = SimpleNamespace(
        config=load_config(job(run.path)),
        run=run,
        show=NullDisplay(),
        workers=2,
    )
    launch: Any = SimpleNamespace(
        running=lambda: True, snapshot=Control().snapshot(), cluster=SimpleNamespace(ready=False)
    )
    launch.cluster.local = True

    def arrived() -> bool:
        looks.append("begun")
        signal.raise_signal(signal.SIGTERM)
        looks.append("ended")
        return False

    with interrupts.stoppable():
        try:
            with interrupts.held():
                watch.Watch(session_of, launch).start_up(lambda text: None, arrived)
        except KeyboardInterrupt:
            looks.append("stopped")
    assert looks == ["begun", "ended", "stopped"]
