"""The life of a run directory: claimed, begun, written, let go of; and what is never deleted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from raygnn.errors import InputError, TrainingError
from raygnn.runs import run_directory
from raygnn.runs.run import open_run
from raygnn.runs.run_directory import RunDir, is_run, storage_path
from raygnn.util import files, locks
from raygnn.util.files import json_text, storage_errors, write_atomic
from raygnn.util.locks import Holder

CONFIG = {"name": "a", "train": {"lr": 0.1}}


def finished(storage: Path, name: str = "a") -> Path:
    with RunDir(str(storage), name) as run:
        run.begin(CONFIG)
        run.update_summary(status="done", steps=5)
        (run.checkpoints / "last.ckpt").write_text("weights")
    return run.path


def claim_in_child(storage: Path, then: str) -> subprocess.Popen[str]:
    """Start a process that claims run ``a``, reports that, and does ``then``."""
    code = f"""
import sys, time
from raygnn.errors import RaygnnError
from raygnn.runs.run_directory import RunDir
try:
    run = RunDir({str(storage)!r}, "a", mode="overwrite")
except RaygnnError as error:
    print("refused", error.what, flush=True)
    sys.exit(2)
print("claimed", flush=True)
{then}
"""
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_run_from_claim_to_done(tmp_path: Path) -> None:
    (tmp_path / "deep/runs/a/logs").mkdir(parents=True)  # of a command that was killed at once
    (tmp_path / "deep/runs/a/.config.yaml.tmp-99").touch()
    run = RunDir(str(tmp_path / "deep" / "runs"), "a")
    assert not is_run(run.path)
    run.begin(CONFIG)
    assert open_run(run.path).status == "running"
    assert open_run(run.path).config == CONFIG
    assert run.checkpoints.is_dir()
    run.write("preflight.json", {"ok": True})
    run.update_summary(status="done", metrics={"test/accuracy": 0.8})
    run.release()
    found = open_run(run.path)
    assert found.status == "done"
    assert found.summary["metrics"] == {"test/accuracy": 0.8}
    assert json.loads((run.path / "preflight.json").read_text()) == {"ok": True}
    assert {entry.name for entry in run.path.iterdir()} == {
        *("config.yaml", "preflight.json", "summary.json", "checkpoints", "logs", ".lock")
    }


def test_a_file_uri_is_a_directory(tmp_path: Path) -> None:
    assert storage_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    with pytest.raises(InputError, match="s3://"):
        storage_path("s3://bucket/runs")
    for text in ("s3://", "file:///", "file://elsewhere/runs", "ftp://host/runs"):
        with pytest.raises(InputError, match="cannot be the storage of runs"):
            storage_path(text)


def test_a_claim_without_a_run_leaves_nothing(tmp_path: Path) -> None:
    RunDir(str(tmp_path / "x" / "runs"), "a").release()
    with pytest.raises(InputError, match="no run to resume"):
        RunDir(str(tmp_path / "x" / "runs"), "a", mode="resume")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "a").mkdir(parents=True)  # existing files stay
    RunDir(str(tmp_path / "runs"), "a").release()
    assert list((tmp_path / "runs" / "a").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written") as caught:
        RunDir(str(tmp_path / "file"), "a")
    assert "storage" in str(caught.value.remedy)


def test_a_taken_name_is_refused_and_untouched(tmp_path: Path) -> None:
    path = finished(tmp_path)
    with pytest.raises(InputError, match="taken") as caught:
        RunDir(str(tmp_path), "a")
    assert caught.value.exit_code == 2
    assert "--overwrite" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert open_run(path).status == "done"


def test_overwrite_removes_the_old_run_when_the_new_one_begins(tmp_path: Path) -> None:
    path = finished(tmp_path)
    (path / "report.html").write_text("x")
    (path / "logs" / "rank-0.log").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (path / "link").symlink_to(outside)
    with RunDir(str(tmp_path), "a", mode="overwrite") as run:
        assert (path / "checkpoints" / "last.ckpt").exists(), "bad input must not cost a run"
        assert not run.begun
        run.begin({"name": "b"})
        assert run.begun
    assert {entry.name for entry in path.iterdir()} == {
        *("config.yaml", "summary.json", "checkpoints", "logs", ".lock")
    }
    assert list((path / "checkpoints").iterdir()) == []
    assert "steps" not in open_run(path).summary
    assert (outside / "precious").exists()


def test_resume_keeps_the_run(tmp_path: Path) -> None:
    path = finished(tmp_path)
    started = open_run(path).summary["started"]
    with RunDir(str(tmp_path), "a", mode="resume") as run:
        assert run.summary["status"] == "done"
        run.update_summary(job="that ran it before")
        run.begin({**CONFIG, "train": {"lr": 0.2}})
        assert open_run(path).status == "running"
        assert "job" not in run.summary
    assert (path / "checkpoints" / "last.ckpt").read_text() == "weights"
    assert open_run(path).config["train"] == {"lr": 0.2}
    assert open_run(path).summary["steps"] == 5
    assert open_run(path).summary["started"] == started


@pytest.mark.parametrize("mode", ["new", "overwrite", "resume"])
@pytest.mark.parametrize("what", ["files", "foreign config", "file", "link", "linked config"])
def test_what_is_not_a_run_directory_is_never_touched(
    tmp_path: Path, what: str, mode: run_directory.Mode
) -> None:
    real = finished(tmp_path / "elsewhere")
    path = tmp_path / "runs" / "a"
    path.parent.mkdir()
    if what == "file":
        path.write_text("x")
    elif what == "link":
        path.symlink_to(real)
    else:
        path.mkdir()
        if what == "files":
            (path / "thesis.tex").write_text("x")
        elif what == "foreign config":
            (path / "config.yaml").write_text("name: a\n")
        else:
            (path / "config.yaml").symlink_to(real / "config.yaml")
    before = sorted(str(entry) for entry in tmp_path.rglob("*"))
    with pytest.raises(InputError):
        RunDir(str(tmp_path / "runs"), "a", mode=mode)
    assert sorted(str(entry) for entry in tmp_path.rglob("*")) == before
    assert (real / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a"])
def test_a_name_is_one_path_component(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        RunDir(str(tmp_path), name, mode="overwrite")


def test_an_overwrite_that_is_cut_short_leaves_a_run_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our mark is removed last, whichever removal is the last to succeed."""
    path = finished(tmp_path)
    gone: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda entry: gone.append(entry.name))
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: gone.append(self.name))
    with RunDir(str(tmp_path), "a", mode="overwrite") as run:
        run.begin(CONFIG)
        assert sorted(gone[:-1]) == ["checkpoints", "logs", "summary.json"]
        assert gone[-1] == "config.yaml"
    assert is_run(path)


@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_a_run_that_cannot_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mkdir = Path.mkdir

    def refused(self: Path, *args: Any, **options: Any) -> None:
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        mkdir(self, *args, **options)

    with RunDir(str(tmp_path / "runs"), "a") as run, monkeypatch.context() as context:
        context.setattr(Path, "mkdir", refused)
        with pytest.raises(InputError, match="cannot be written"):
            run.begin(CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_is_away_does_not_hide_why_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(str(tmp_path), "a")
    run.begin(CONFIG)
    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EIO, "")))
        run.release()


@pytest.mark.parametrize("fault", ["error", "short read"])
def test_a_summary_that_cannot_be_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(files, "_RETRY_EVERY", 0.0)
    away, opened = [True], files.open_regular

    @contextmanager
    def failing(path: Path) -> Iterator[Any]:
        with opened(path) as file:
            if away and fault == "error":
                away.pop()
                raise OSError(errno.EIO, "Input/output error", str(path))
            if away:
                file.seek(away.pop())
            yield file

    with RunDir(str(tmp_path), "a") as run:
        run.begin(CONFIG)
        with monkeypatch.context() as context:
            context.setattr(files, "open_regular", failing)
            with pytest.raises(TrainingError) as caught:
                run.update_summary(status="done")
            assert caught.value.where == str(run.path / "summary.json")
            away.append(True)
            assert run.update_summary(5.0, status="done")["started"]
    assert open_run(run.path).status == "done"


def test_a_live_run_is_refused(tmp_path: Path) -> None:
    with claim_in_child(tmp_path, "run.begin({}); sys.stdin.read()") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "claimed\n"
        for mode in ("overwrite", "resume"):
            while not is_run(tmp_path / "a"):
                assert child.poll() is None
            with pytest.raises(InputError, match=f"process {child.pid} is writing") as caught:
                RunDir(str(tmp_path), "a", mode=mode)
            assert "stop it" in str(caught.value.remedy)
        child.kill()


def test_a_killed_run_is_marked_and_releases_its_lock(tmp_path: Path) -> None:
    code = "run.begin({}); print('begun', flush=True); time.sleep(60)"
    with claim_in_child(tmp_path, code) as child:
        assert child.stdout is not None
        assert child.stdout.readline() + child.stdout.readline() == "claimed\nbegun\n"
        assert open_run(tmp_path / "a").status == "running"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert open_run(tmp_path / "a").status == "killed"
    with RunDir(str(tmp_path), "a", mode="resume"):
        pass


def test_one_of_many_concurrent_claims_succeeds(tmp_path: Path) -> None:
    """The same holds right after a holder's death, when all processes find its stale lock."""
    finished(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    stale = Holder.here().__dict__ | {"pid": dead.pid, "started": 1}
    dead.wait()
    (tmp_path / "a" / ".lock").write_text(json.dumps(stale))
    children = [claim_in_child(tmp_path, "sys.stdin.read()") for _ in range(5)]
    said = [child.stdout.readline().split()[0] for child in children if child.stdout]
    for child in children:
        child.communicate("")
    assert sorted(said) == ["claimed"] + ["refused"] * 4


def test_a_lock_that_is_just_being_taken_is_busy(tmp_path: Path) -> None:
    """Its holder has not written its identity yet."""
    path = finished(tmp_path)
    with open(path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is writing"):
            RunDir(str(tmp_path), "a", mode="resume")


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a run that a process on another host holds."""
    monkeypatch.setattr(locks, "_POLL", 0.01)
    path = finished(tmp_path) / ".lock"
    path.write_text('{"host": "far-away", "pid": 1, "started": 5}')
    return path


def test_a_lock_of_a_live_process_on_another_host_is_kept(foreign: Path) -> None:
    """The lock is kept even if that host's flock is invisible here."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            os.utime(foreign)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(InputError, match="process 1 on far-away") as caught:
            RunDir(str(foreign.parents[1]), "a", mode="resume")
    finally:
        stop.set()
        thread.join()
    assert "stop it there" in str(caught.value.remedy)


def test_a_lock_of_a_dead_process_on_another_host_gives_way(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_SILENCE", 0.1)
    with RunDir(str(foreign.parents[1]), "a", mode="resume") as run:
        (note,) = run.notes()
        assert "process 1 on far-away" in note
        assert json.loads(foreign.read_text()) == Holder.here().__dict__
    with RunDir(str(foreign.parents[1]), "a", mode="resume") as run:
        assert not [*run.notes()]


def test_a_claim_taken_over_by_another_host_is_kept(tmp_path: Path) -> None:
    """Another host takes over a claim if locks do not reach it and it sees no heartbeat of this
    one."""
    claim = '{"host": "far-away", "pid": 1, "started": 5}'
    with RunDir(str(tmp_path), "a") as run:
        run.begin(CONFIG)
        (run.path / ".lock").write_text(claim)
    assert (run.path / ".lock").read_text() == claim


def test_a_lock_on_storage_that_is_away_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release succeeds on stale storage, so that it hides no error of the run."""

    def stale(descriptor: int, size: int) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    claim = locks.Lock(tmp_path / "lock")
    claim.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", stale)
        claim.release()
    assert claim._descriptor is None


def test_a_lock_that_another_host_has_is_not_waited_for(foreign: Path) -> None:
    """A lock that works across hosts is refused at once."""
    with open(foreign) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="process 1 on far-away"):
            RunDir(str(foreign.parents[1]), "a", mode="resume")


def test_a_holder_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_BEAT", 0.01)
    monkeypatch.setattr(locks, "_POLL", 0.01)
    with RunDir(str(tmp_path), "a") as run:
        run.begin(CONFIG)
        assert run._lock._beats()
    monkeypatch.setattr(locks, "_SILENCE", 0.1)
    assert not run._lock._beats()


def test_a_lock_is_one_process_and_one_claim(tmp_path: Path) -> None:
    """A later process with the holder's pid does not hold it, and one process cannot hold it
    twice."""
    path, mine = finished(tmp_path), Holder.here()
    (path / ".lock").write_text(json.dumps(mine.__dict__ | {"started": mine.started - 1}))
    with (
        RunDir(str(tmp_path), "a", mode="resume"),
        pytest.raises(InputError, match="is writing"),
    ):
        RunDir(str(tmp_path), "a", mode="resume")
    RunDir(str(tmp_path), "a", mode="resume").release()


@pytest.mark.parametrize("what", ["link", "fifo"])
def test_a_lock_file_of_a_stranger_leads_nowhere(what: str, tmp_path: Path) -> None:
    path, other = finished(tmp_path), tmp_path / "other.txt"
    (path / ".lock").unlink()
    other.write_text(json.dumps(Holder.here().__dict__))
    (path / ".lock").symlink_to(other) if what == "link" else os.mkfifo(path / ".lock")
    why = "symbolic links" if what == "link" else "not a regular file"
    with pytest.raises(InputError, match=why):
        RunDir(str(tmp_path), "a", mode="overwrite")
    assert other.read_text()
    assert locks.holder(path / ".lock") is None


def test_a_removed_file_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / ".lock", locks.try_flock

    def removed(descriptor: int) -> bool:
        monkeypatch.setattr(locks, "try_flock", flock)
        path.unlink()
        return flock(descriptor)

    monkeypatch.setattr(locks, "try_flock", removed)
    assert locks.try_lock(path) is None
    monkeypatch.setattr(locks, "try_flock", removed)
    lock = locks.Lock(path)
    lock.acquire()
    assert locks.holder(path) == Holder.here()
    lock.release()


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_directory_that_is_gone_is_noticed(what: str, tmp_path: Path) -> None:
    """Nothing is written to what replaced it, and nothing is removed there."""
    with RunDir(str(tmp_path), "a") as run:
        run.begin(CONFIG)
        run.path.rename(tmp_path / "b")
        assert run.lost == "removed"
        (tmp_path / "b").rename(run.path)  # moved away and back, it is the same
        assert run.lost is None
        run.update_summary(steps=3)
        shutil.rmtree(run.path)
        if what == "replaced":
            run.path.mkdir()
        assert run.lost == what
        with pytest.raises(TrainingError, match=f"was {what} while") as caught:
            run.update_summary(status="done")
        assert (caught.value.where, caught.value.exit_code) == (str(run.path), 4)
        assert "move it back" in str(caught.value.remedy)
    assert [*tmp_path.rglob("*")] == ([run.path] if what == "replaced" else [])


def test_an_atomic_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "summary.json"
    write_atomic(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="disk or the quota is full"), storage_errors(file):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_json_has_no_nan() -> None:
    text = json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), 1: True})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": "x", "1": True}
