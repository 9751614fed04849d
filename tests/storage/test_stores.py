"""Runs that are kept in an object store: a real S3-speaking server on loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import socketserver
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raygnn
from raygnn.checkpoint import store as checkpoints
from raygnn.checkpoint.remote_checkpoints import Courier, RemoteCheckpoints
from raygnn.config.load import load_config
from raygnn.config.places import Uri
from raygnn.config.schema import Config
from raygnn.driver.resume import StartPoint, find_start
from raygnn.errors import ConfigError, DataError, InputError, TrainingError
from raygnn.preflight.probe import Question, node_facts
from raygnn.runs.diagnose.judge import diagnose
from raygnn.runs.display import NullDisplay
from raygnn.runs.run import list_runs, open_run
from raygnn.runs.run_directory import EVENTS, Events, RunDir
from raygnn.storage import claim, replica
from raygnn.storage.claim import CLAIMS, Claim
from raygnn.storage.remote import RemotePath
from raygnn.storage.replica import Publisher, download_directory, fetch
from raygnn.util.locks import Holder
from raygnn.worker.node_files import FileServer, Forwarder, is_away
from tests.support.small_jobs import about, job, until
from tests.support.stores import LocalStore, uri_of

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shorten polling intervals, retries and the wait for a dead claim."""
    monkeypatch.setattr(claim, "_POLL", 0.05)
    monkeypatch.setattr(claim, "BEAT", 0.5)
    monkeypatch.setattr(claim, "SILENCE", 5.0)
    monkeypatch.setattr(replica, "_EVERY", 0.1)
    monkeypatch.setattr(replica, "_FRESH", 0.0)
    monkeypatch.setattr("raygnn.checkpoint.remote_checkpoints._AGAIN", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()


@pytest.fixture
def place(store: LocalStore) -> RemotePath:
    return RemotePath.of(Uri(store.uri), "storage")


def config_of(store: LocalStore, tmp_path: Path, **sections: Any) -> Config:
    values = job(tmp_path, staging={"path": str(tmp_path / "here")}, **sections)
    return load_config({**values, "storage": store.uri})


def created(config: Config, **options: Any) -> RunDir:
    return RunDir(config.local_storage, config.name, store=config.store, **options)


def write_checkpoint(directory: Path, config: Config, *steps: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for step in steps:
        checkpoints.write(directory, {"global_step": step}, step, 9, about(config))


# ------------------------------------------------------------------------------------ the claim


def test_of_many_commands_one_has_the_name(place: RemotePath) -> None:
    claims, taken = [Claim(place / "run") for _ in range(4)], []

    def take(one: Claim) -> None:
        try:
            one.acquire()
            taken.append(one)
        except InputError:
            pass

    threads = [threading.Thread(target=take, args=(one,)) for one in claims]
    for thread in threads:
        thread.start()
    until(lambda: taken)
    time.sleep(1.0)  # other claimants see the holder, and wait for its heartbeat
    assert len(taken) == 1
    taken[0].release()
    for thread in threads:
        thread.join(60)
        for one in claims:
            one.release()
    assert not (place / "run" / CLAIMS).files()


def test_the_later_of_two_claims_gives_way(
    place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later claim gives way, even if its name is first in order."""
    monkeypatch.setattr(claim, "BEAT", 0.2)
    first, second = Claim(place / "run"), Claim(place / "run")
    first._name, second._name = "b", "a"
    first.acquire()
    with pytest.raises(InputError, match="is writing into this run"):
        second.acquire()
    assert not first.lost
    first.release()
    second.acquire()
    second.release()


def test_a_dead_command_is_replaced_and_a_silent_one_reported(
    place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place / "run"
    dead = Holder(socket.gethostname(), 2**22 - 1, 1)
    (run / CLAIMS / "dead").write(json.dumps(asdict(dead)).encode())
    monkeypatch.setattr(claim, "BEAT", 3.0)
    monkeypatch.setattr(claim, "SILENCE", 1.0)
    silent, next_one = Claim(run), Claim(run)
    told: list[str] = []
    silent.acquire(told.append)
    assert silent.stale == f"process {dead.pid} on {dead.host}"
    assert told == []  # a local process is known to have ended, so there is no wait
    next_one.acquire(told.append)  # after a second without a sign
    here = Holder.here()
    assert next_one.stale == f"process {here.pid} on {here.host}"
    # a store's times are whole seconds: the claim may seem to be a second old already
    ways = [f"waiting up to {seconds} s for a heartbeat" for seconds in (0, 1)]
    assert told in [[f"{next_one.stale} holds {run}: {way}"] for way in ways]
    until(lambda: silent.lost)
    assert not next_one.lost
    next_one.release()
    silent.release()


# ---------------------------------------------------------------------------- what a run writes


def test_a_check_leaves_nothing_in_the_store(
    store: LocalStore, place: RemotePath, tmp_path: Path
) -> None:
    assert raygnn.check(config_of(store, tmp_path), display=False).ok
    assert not place.is_dir()
    assert not place.parent.files()


def test_unusable_storage_is_reported(store: LocalStore, tmp_path: Path) -> None:
    nowhere = config_of(store, tmp_path).model_copy(
        update={"storage": Uri(store.uri.replace("bucket", "none"))}
    )
    (finding,) = (
        found
        for found in raygnn.check(nowhere, display=False).findings
        if found.check == "storage_visible"
    )
    assert "the bucket does not exist" in finding.what
    assert "create the bucket" in finding.remedy
    for wrong in (
        "endpoint_override=none.invalid&scheme=http",
        f"endpoint_override=127.0.0.1:{store.port}",
    ):
        uri = Uri(f"s3://bucket/runs?{wrong}&region=us-east-1")
        with pytest.raises(DataError, match=r"endpoint_override=HOST:PORT&scheme=http"):
            (RemotePath.of(uri, "storage") / "file").write(b"")


def test_files_are_brought_and_fetched(place: RemotePath, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("config.yaml", "logs/rank-0.log", ".lock", "checkpoints/step", "rows/r", "old"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    one = Publisher(here, place / "run", print, lambda: False)
    one.start({})
    until(lambda: len((place / "run").files()) == 3)
    (here / "old").unlink()
    (here / "logs/rank-0.log").write_text("more")
    assert one.finish(30)
    there.mkdir()
    (there / "stale").touch()
    assert set(fetch(place / "run", there)) == {"config.yaml", "logs/rank-0.log"}
    found = {str(p.relative_to(there)): p.read_text() for p in there.rglob("*") if p.is_file()}
    assert found == {"config.yaml": "config.yaml", "logs/rank-0.log": "more"}


def test_names_in_a_store_lead_nowhere_else(place: RemotePath, tmp_path: Path) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=f"http://{place.root.text.partition('=')[2].partition('&')[0]}"
    )
    for name in ("runs/run/../../out", "runs/run/config.yaml", "runs/run/a/../../../out"):
        client.put_object(Bucket="bucket", Key=name, Body=b"x")
    directory = tmp_path / "deep" / "run"
    directory.mkdir(parents=True)
    fetch(place / "run", directory)
    download_directory(place / "run", tmp_path / "deep" / "whole")
    names = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert names == ["config.yaml"] * 2


def test_objects_that_no_directory_can_hold_are_named_and_ignored(
    place: RemotePath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=f"http://{place.root.text.partition('=')[2].partition('&')[0]}"
    )
    kept = ["config.yaml", "lo/x", "logs/rank-0.log", "summary.json"]
    for name in (*kept, "lo", "logs", "summary.json/x"):
        client.put_object(Bucket="bucket", Key=f"runs/run/{name}", Body=name.encode())
    for _ in range(2):  # into a directory that is there, too
        fetch(place / "run", tmp_path / "run")
    root = tmp_path / "run"
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == kept
    named = {record.getMessage().split()[1] for record in caplog.records}
    assert named == {"lo", "logs", "summary.json/x"}


def test_an_outage_is_reported_once_and_everything_is_uploaded_afterwards(
    store: LocalStore, place: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_RATE", 1.0)
    told: list[str] = []
    (tmp_path / "here").mkdir()
    one = Publisher(tmp_path / "here", place / "run", told.append, lambda: False)
    store.stop()
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / "here" / name).write_text("line")
    one.start({})
    until(lambda: told, 120)
    store.start()
    until(lambda: len(told) == 2, 120)
    assert one.finish(30)
    assert "wait in" in told[0]
    assert "config.yaml" in told[0]  # which is brought first
    assert "again" in told[1]
    assert set((place / "run").files()) == {"config.yaml", "metrics.jsonl"}
    (tmp_path / "here" / "config.yaml").unlink()
    for content in (b"1" * 2**9, b"2" * 2**9):  # the larger size is uploaded later
        (tmp_path / "here" / "metrics.jsonl").write_bytes(content)
        assert one.finish(30)
        assert set((place / "run" / "metrics.jsonl").read_bytes()) == set(content)
    assert [*(place / "run").files()] == ["metrics.jsonl"]
    lost = Publisher(tmp_path / "here", place / "lost", told.append, lambda: True)
    lost.start({})
    assert not lost.finish(1)
    assert not (place / "lost").exists()


def test_a_run_has_its_directory_here_only_while_it_is_written(
    store: LocalStore, place: RemotePath, tmp_path: Path
) -> None:
    config = config_of(store, tmp_path)
    with created(config) as run:
        run.begin(config.recorded())
        with pytest.raises(InputError, match="is writing into this run"):
            created(config)
        run.update_summary(status="done", metrics={"test/accuracy": 0.5})
        path = run.path
    assert not path.exists()
    with pytest.raises(InputError, match="is taken by an earlier run") as taken:
        created(config)
    assert taken.value.where == (Uri(store.uri) / "test").shared
    (place / "test/checkpoints/step-0000000001/manifest.json").write(b"{}")
    there = open_run((Uri(store.uri) / "test").text)
    assert (there.status, there.summary["metrics"]) == ("done", {"test/accuracy": 0.5})
    assert [run.name for run in list_runs(store.uri)] == ["test"]
    assert open_run("test", store.uri) == there
    assert diagnose((Uri(store.uri) / "test").text).run == (Uri(store.uri) / "test").shared
    with created(config, mode="resume") as run:
        assert run.summary["status"] == "done"
    with created(config, mode="overwrite") as run:
        run.begin(config.recorded())
        assert not [name for name in place.files() if "checkpoints" in name]
        until(lambda: (place / "test/summary.json").is_file())
        assert open_run("test", store.uri).status == "running"
    with pytest.raises(InputError, match="did you mean test"):
        open_run("tset", store.uri)


def test_a_run_that_ends_well_but_is_not_all_in_the_store_has_failed(
    store: LocalStore, place: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is a credential that may not replace a file (403)."""
    config, upload = config_of(store, tmp_path), RemotePath.upload

    def refuse(path: RemotePath, source: Path) -> None:
        if source.name == "summary.json" and "done" in source.read_text():
            raise DataError("cannot be written: HTTP status 403", where=str(path))
        upload(path, source)

    run = created(config, patience=1.0)
    run.begin(config.recorded())
    run.update_summary(status="done")
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "upload", refuse)
        with pytest.raises(TrainingError, match="not all files of the run are in") as caught, run:
            pass
    assert "--resume on this machine" in str(caught.value.remedy)
    with created(config, mode="resume"):
        assert json.loads((place / "test/summary.json").read_text())["status"] == "done"


def test_the_next_command_uploads_what_an_outage_left(
    store: LocalStore, place: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "SILENCE", 2.0)  # of the claim that could not be released
    config, told = config_of(store, tmp_path), []
    with contextlib.suppress(KeyError), created(config, patience=1.0) as run:
        run.notify = told.append
        run.begin(config.recorded())
        until(lambda: (place / "test/summary.json").is_file())
        store.stop()
        run.update_summary(status="failed")
        raise KeyError
    assert "the rest is in" in told[-1]
    store.start()
    assert json.loads((place / "test/summary.json").read_text())["status"] == "running"
    with created(config, mode="resume") as run:
        assert json.loads((place / "test/summary.json").read_text())["status"] == "failed"
        run.begin(config.recorded())
        without = shutil.ignore_patterns(".lock")
        shutil.copytree(run.path, tmp_path / "kept", ignore=without)
    shutil.copytree(tmp_path / "kept", run.path)
    with created(config, mode="resume") as run:
        run.begin(config.recorded())
        run.update_summary(status="done")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.copytree(tmp_path / "kept", run.path)  # another command has continued it meanwhile
    with created(config, mode="resume") as run:
        assert run.summary["status"] == "done"


# --------------------------------------------------------------------------------- checkpoints


def test_checkpoints_are_whole_or_passed_over(
    store: LocalStore, place: RemotePath, tmp_path: Path
) -> None:
    config = config_of(store, tmp_path)
    there = RemoteCheckpoints.from_config(config)
    assert there is not None
    assert there.names() == []
    here, copies = tmp_path / "rank", tmp_path / "copies"
    write_checkpoint(here, config, 1, 2, 3, 4)
    for step in (4, 1, 2, 3):  # the run went back, and those after it are not touched
        there.send(here / f"step-{step:010d}", keep=2)
    assert there.names() == [f"step-{step:010d}" for step in (2, 3, 4)]
    base = place / "test" / "checkpoints"
    (base / "step-0000000004" / "state.ckpt").write(b"damaged")
    (base / "step-0000000005" / "state.ckpt").write(b"no manifest came")

    judge = partial(checkpoints.judge, config=config)
    found, rejected = there.fetch_newest(copies, judge)
    assert found is not None
    assert found.step == 3
    assert list(rejected) == ["step-0000000004"]
    inode = found.state.stat().st_ino
    assert there.fetch(found.name, copies) == found.state.parent
    assert found.state.stat().st_ino == inode  # it is here already
    found.state.write_bytes(b"damaged")
    assert judge(there.fetch(found.name, copies)).step == 3
    assert (copies / "passed-over-step-0000000003").is_dir()
    there.pass_over(rejected)
    assert there.names() == [f"step-{step:010d}" for step in (2, 3)]
    assert (base / "step-0000000004" / "passed-over-manifest.json").is_file()


def test_a_resume_uses_the_newest_checkpoint_local_or_remote(
    store: LocalStore, place: RemotePath, tmp_path: Path
) -> None:
    config = config_of(store, tmp_path)
    there = RemoteCheckpoints.from_config(config)
    assert there is not None

    def start(other: Config = config) -> StartPoint:
        return find_start(other, run, 2, NullDisplay(), resume=True)

    with created(config) as run:
        run.begin(config.recorded())
        assert start().checkpoint is None
        write_checkpoint(tmp_path / "rank", config, 4, 6)
        for step in (4, 6):
            there.send(tmp_path / "rank" / f"step-{step:010d}", keep=9)
        newest = place / "test/checkpoints/step-0000000006/state.ckpt"
        content = newest.read_bytes()
        newest.write(content[:-1])  # so that the previous one is used
        found = start()
        assert found.checkpoint is not None
        assert found.checkpoint.step == 4
        assert found.rejected[0].startswith(f"step-0000000006 in {there}: ")
        newest.write(content)
        found = start()
        assert found.checkpoint is not None
        assert found.checkpoint.step == 6  # although step 4's is local by now
        write_checkpoint(run.checkpoints, config, 8)  # the command before could not upload it
        found = start()
        assert found.checkpoint is not None
        assert found.checkpoint.step == 8
        assert there.names()[-1] == "step-0000000008"
        with pytest.raises(InputError, match=r"another .*: model\.hidden was 16 and is 8"):
            start(config_of(store, tmp_path, model={"hidden": 8}))
        for name in there.names():
            (place / "test/checkpoints" / name / "state.ckpt").write(b"damaged")
        shutil.rmtree(run.checkpoints)
        with pytest.raises(InputError, match="no checkpoint can be used: step-0000000008 in s3:"):
            start()


def test_ranks_bring_their_rows_and_the_manifest_comes_last(
    store: LocalStore, place: RemotePath, tmp_path: Path
) -> None:
    config, here = config_of(store, tmp_path), tmp_path / "rank"
    there = RemoteCheckpoints.from_config(config)
    assert there is not None
    draft = checkpoints.draft_of(here, 1)
    draft.mkdir(parents=True)
    from raygnn.checkpoint.learned_rows import write_rows

    row = write_rows(draft / "rows-1-0.bin", "n", *_rows())
    files = checkpoints.RowFiles(dim=2, steps=1, files=(row,))
    there.put(draft / row.name, "step-0000000001")
    (draft / row.name).unlink()
    checkpoints.write(here, {"global_step": 1}, 1, 9, about(config), rows=files)
    there.send(here / "step-0000000001", keep=1)
    checkpoints.judge(there.fetch("step-0000000001", tmp_path / "other"), config)
    (place / "test/checkpoints/step-0000000001" / row.name).remove()
    with pytest.raises((OSError, DataError)):
        there.send(here / "step-0000000001", keep=1)
    assert there.names() == []


def _rows() -> tuple[Any, dict[str, Any]]:
    import numpy as np

    return np.arange(3), {"row": np.ones((3, 2), np.float32)}


def test_of_those_that_wait_the_newest_goes_up_when_the_store_is_back(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, here = config_of(store, tmp_path), tmp_path / "rank"
    there = RemoteCheckpoints.from_config(config)
    assert there is not None
    here.mkdir()
    courier = Courier(there, 2, Events(tmp_path / EVENTS), lambda busy: None)
    store.stop()
    for step in (1, 2, 3):
        checkpoints.write(here, {"global_step": step}, step, 1, about(config))
        courier.send(here / f"step-{step:010d}")
    until(lambda: "step-0000000003 is not in" in caplog.text, 120)  # tried, and put back
    store.start()
    courier.finish(120)
    assert there.names() == ["step-0000000003"]
    away, back = told(tmp_path)
    assert "is not in s3://bucket/runs/test/checkpoints: " in away
    assert back == "step-0000000003 is in s3://bucket/runs/test/checkpoints again"
    assert [path.name for path in here.iterdir()] == ["step-0000000003"]


def test_a_silent_store_is_reported_before_its_client_gives_up(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raygnn.checkpoint.remote_checkpoints._SILENCE", 0.5)
    monkeypatch.setattr("raygnn.checkpoint.remote_checkpoints._POLL", 0.1)
    config, here = config_of(store, tmp_path), tmp_path / "rank"
    there = RemoteCheckpoints.from_config(config)
    assert there is not None
    write_checkpoint(here, config, 1)
    store.stop()
    courier = Courier(there, 2, Events(tmp_path / EVENTS), lambda busy: None)
    with socket.create_server(("127.0.0.1", store.port)):  # which answers nothing
        courier.send(here / "step-0000000001")
        until(lambda: (tmp_path / EVENTS).exists(), 120)
    store.start()
    courier.finish(120)
    assert there.names() == ["step-0000000001"]
    away, back = told(tmp_path)
    assert away.endswith("checkpoints: it has accepted nothing for 0.5 s; training continues")
    assert back == "step-0000000001 is in s3://bucket/runs/test/checkpoints again"


def told(tmp_path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (tmp_path / EVENTS).read_text().splitlines()]


def test_three_attempts_detect_an_outage(store: LocalStore) -> None:
    """The default of pyarrow, thirty attempts, hides an outage for 100 s."""
    tries: list[Any] = []
    handler: Any = lambda *connection: tries.append(connection)  # noqa: E731
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = RemotePath.of(Uri(uri_of(f"127.0.0.1:{server.server_address[1]}")), "storage")
        with pytest.raises(DataError):
            place.is_file()
        server.shutdown()
    assert len(tries) == 3


def test_an_attempt_that_was_taken_over_sends_nothing(store: LocalStore, tmp_path: Path) -> None:
    config, here = config_of(store, tmp_path), tmp_path / "rank"
    there = RemoteCheckpoints.from_config(config)
    assert there is not None
    write_checkpoint(here, config, 1)
    courier = Courier(there, 2, Events(tmp_path / EVENTS), lambda busy: None, lambda: False)
    courier.send(here / "step-0000000001")
    courier.finish(60)
    assert there.names() == []


def test_files_for_a_resume_are_sent_before_the_checkpoint(
    store: LocalStore, tmp_path: Path
) -> None:
    """The checkpoint is sent even if the call before it fails."""
    config, here = config_of(store, tmp_path), tmp_path / "rank"
    there = RemoteCheckpoints.from_config(config)
    assert there is not None
    write_checkpoint(here, config, 1)
    found: list[list[str]] = []

    def before() -> None:
        found.append(there.names())
        raise ConnectionError("the command's node does not answer")

    events = Events(tmp_path / EVENTS)
    courier = Courier(there, 2, events, lambda busy: None, before=before)
    courier.send(here / "step-0000000001")
    courier.finish(60)
    assert found == [[]]
    assert there.names() == ["step-0000000001"]


# ---------------------------------------------------------- files of ranks on nodes of their own


def served(directory: Path) -> Any:
    server = FileServer(directory)
    return lambda method, *args: getattr(server, method)(*args)


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=600), st.integers(0, 400)), max_size=12))
@settings(max_examples=30, deadline=None)
def test_a_file_that_grows_or_is_cut_arrives(tmp_path_factory: Any, changes: list[Any]) -> None:
    root = tmp_path_factory.mktemp("files")
    theirs, mine = root / "theirs", root / "mine"
    for directory in (theirs, mine):
        (directory / "logs").mkdir(parents=True)
    (theirs / "logs" / "rank-1.log").write_bytes(b"an earlier start\n")
    sender = Forwarder(mine, 1, served(theirs))
    sender.start()
    content = b"an earlier start\n"
    for change in changes:
        content = content[:change] if isinstance(change, int) else content + change
        (mine / "logs" / "rank-1.log").write_bytes(content)
        sender.send()
        assert (theirs / "logs" / "rank-1.log").read_bytes() == content
    sender.close()


def test_new_files_of_a_killed_rank_are_collected(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    for directory in (theirs, mine):
        (directory / "logs").mkdir(parents=True)
    (theirs / "logs/rank-1.log").write_text("one\n")
    (mine / "logs/rank-1.log").write_text("one\ntwo\n")
    (theirs / "logs/rank-2.log").write_text("one\nit ran elsewhere\n")
    (mine / "logs/rank-2.log").write_text("one\nand died here\n")
    (mine / "logs/rank-1.crash").write_text("SIGSEGV")
    Forwarder(mine, None, served(theirs)).send()
    assert (theirs / "logs/rank-1.log").read_text() == "one\ntwo\n"
    assert (theirs / "logs/rank-2.log").read_text() == "one\nit ran elsewhere\n"
    assert (theirs / "logs/rank-1.crash").read_text() == "SIGSEGV"


def test_a_node_has_a_directory_of_its_own_if_it_does_not_see_the_commands(tmp_path: Path) -> None:
    run = tmp_path / "work" / "test"
    run.mkdir(parents=True)
    (run / ".run-1").touch()
    assert not is_away(run, ".run-1")
    (run / "stale").touch()
    assert is_away(run, ".run-2")  # the directory is another command's
    assert not (run / "stale").exists()
    (run / "logs" / "rank-0.log").touch()
    assert is_away(run, ".run-2")
    assert (run / "logs" / "rank-0.log").exists()


def test_failure_files_of_other_ranks_are_mirrored(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    for directory in (theirs, mine):
        (directory / "logs").mkdir(parents=True)
    (theirs / "logs/rank-0.failure.json").write_text("{}")
    sender = Forwarder(mine, 1, served(theirs))
    sender.start()
    assert (mine / "logs/rank-0.failure.json").exists()
    (theirs / "logs/rank-0.failure.json").unlink()
    until(lambda: not (mine / "logs/rank-0.failure.json").exists())
    sender.close()


# ------------------------------------------------------------------------ configuration, checks


def test_secrets_of_a_uri_are_not_recorded(tmp_path: Path) -> None:
    text = "s3://KEY:W%2Ford@bucket/runs?region=eu&session_token=t0ken&scheme=http"
    config = load_config({**job(tmp_path), "storage": text})
    assert config.store is not None
    assert config.store.text == text
    assert config.recorded()["storage"] == "s3://bucket/runs?region=eu&scheme=http"
    assert (config.store / "a").text == text.replace("runs?", "runs/a?")
    assert (config.store / "a").parent == config.store
    assert "KEY" not in str(config.local_storage)
    with pytest.raises(ConfigError, match="storage"):
        load_config({**job(tmp_path), "storage": "ftp://host/runs"})


def test_each_node_reads_and_writes_the_store(
    store: LocalStore, place: RemotePath, tmp_path: Path
) -> None:
    config = config_of(store, tmp_path)
    token = place / ".probe"
    question = Question.about(config, None, token)
    assert node_facts(question).storage == "other"
    token.write(b"")
    assert node_facts(question).storage == "ok"
    token.remove()
    assert list(place.files()) == []
    store.stop()
    assert node_facts(question).storage == "missing"
