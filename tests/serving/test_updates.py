"""Rows that a service is sent are seen by every replica at once, and after a restart."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import psutil
import pytest

from raygnn.config.places import Uri
from raygnn.errors import DataError, InputError
from raygnn.runs.run import open_run
from raygnn.runs.run_directory import RunDir
from raygnn.serving import updates
from raygnn.serving.application import _checked
from raygnn.serving.commands import serve as serve_until_stopped
from raygnn.serving.new_rows import AllRows, NewRows
from raygnn.serving.questions import RequestError, Update
from raygnn.serving.updates import UpdateLog
from raygnn.storage.remote import AnyPath, any_path
from tests.prediction.test_new_data import asked
from tests.prediction.test_predict import ask
from tests.serving.test_answers import serve
from tests.serving.test_application import TOKEN, is_up, post
from tests.serving.test_new_rows import EDGES, IDS, NODES, trained, write
from tests.support.commands import Command
from tests.support.postgres import free_port
from tests.support.small_jobs import JobFactory, train_on_ranks, until
from tests.support.stores import LocalStore

ONE = Update(nodes={"item": [{"code": 901, "price": 0.1, "on": [True, "a"]}]})
OTHER = Update(edges={"buys": [{"item": 901, "at": None}]})


def check_log(directory: AnyPath) -> None:
    log = UpdateLog(directory)
    assert log.since(0) == []
    assert log.add(0, ONE)
    assert not log.add(0, OTHER)  # another replica was first
    assert log.add(1, OTHER)
    again = UpdateLog(directory)
    assert again.since(0) == [ONE, OTHER]
    assert again.since(1) == [OTHER]
    assert again.add(2, OTHER)
    assert not log.add(2, ONE)  # another service was first
    assert log.since(2) == [OTHER]
    for number in range(3, 12):
        assert again.add(number, Update(edges={"buys": [{"item": number}]}))
    assert UpdateLog(directory).since(10) == again.since(10)


def test_a_log(tmp_path: Path) -> None:
    check_log(tmp_path / "updates")


def test_a_log_in_an_object_store(store: LocalStore, tmp_path: Path) -> None:
    place = any_path(store.uri) / "run" / "updates"
    check_log(place)
    with pytest.raises(InputError, match="has kept rows in updates/"):
        RunDir(tmp_path, "run", mode="overwrite", store=Uri(store.uri))
    assert len(place.glob("*.json")) == 12
    store.stop()
    with pytest.raises(DataError):
        UpdateLog(place)
    store.start()


def test_many_writers_at_once(tmp_path: Path) -> None:
    """Each of two services tries again with the next number: nothing is lost or there twice."""
    logs = [UpdateLog(tmp_path / "updates") for _ in range(2)]

    def write(number: int) -> None:
        log = logs[number % 2]
        while not log.add(len(log.since(0)), Update(edges={"buys": [{"item": number}]})):
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(60)))
    rows = [one.edges["buys"][0]["item"] for one in UpdateLog(tmp_path / "updates").since(0)]
    assert sorted(rows) == [*range(60)]


@pytest.mark.parametrize("damage", ["removed", "cut", "foreign"])
def test_a_damaged_log(damage: str, tmp_path: Path) -> None:
    log = UpdateLog(tmp_path / "updates")
    assert log.add(0, ONE)
    assert log.add(1, OTHER)
    first = tmp_path / "updates" / "00000000.json"
    if damage == "removed":
        first.unlink()
    else:
        first.write_text('{"nodes": {' if damage == "cut" else '{"people": {}}')
    with pytest.raises(
        DataError, match=r"0000000\d\.json: (updates before|the file is not an update)"
    ):
        UpdateLog(tmp_path / "updates")


def test_a_full_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = UpdateLog(tmp_path / "updates")
    monkeypatch.setattr(updates, "_MOST_BYTES", 140)
    assert log.add(0, ONE)
    assert log.add(1, ONE) is None
    monkeypatch.setattr(updates, "_MOST_BYTES", 1500)
    monkeypatch.setattr(updates, "_MOST", 1)
    assert log.add(1, ONE) is None
    assert UpdateLog(tmp_path / "updates").since(0) == [ONE]


@pytest.mark.long
def test_what_is_refused_before_ray_starts(tmp_path: Path, make_job: JobFactory) -> None:
    run = train_on_ranks(make_job(name="planted", train={"epochs": 1}))
    serve(run)
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(InputError, match="need a token"):
        serve_until_stopped(run, updates=True, display=False)
    given: dict[str, Any] = {"token_file": tmp_path / "token", "display": False}
    with pytest.raises(InputError, match="not built from tables"):
        serve_until_stopped(run, updates=True, **given)
    run, _ = trained(tmp_path, kind="sage")
    serve(run)
    (run.path / "updates").mkdir()
    (run.path / "updates" / "00000001.json").write_text("{}")
    with pytest.raises(DataError, match="updates before this one are missing"):
        serve_until_stopped(run, updates=True, **given)
    with pytest.raises(InputError, match="has kept rows in updates/"):
        RunDir(run.path.parent, run.name, mode="overwrite")


def test_text_that_cannot_be_kept(tmp_path: Path) -> None:
    rows = Mock(AllRows, kept=NewRows(), count=0)
    rows.beside.return_value = NewRows(count=1)
    with pytest.raises(RequestError, match="surrogates"):
        _checked(rows, (0, []), Update(nodes={"item": [{"code": "\ud800"}]}))
    assert _checked(rows, (0, []), Update(nodes={"item": [{"code": "a"}]})) == (0, 1)


@pytest.mark.system
@pytest.mark.timeout(500)
def test_a_service_with_updates(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, kind="sage", categories={"city": 3}, edge_features=["how"])
    serve(run)  # a command records the partition
    (tmp_path / "token").write_text(TOKEN)
    data = asked(run, f"graph.path={write(tmp_path / 'new', more=True)}")
    table = ask(run, data.config, 2, sizes=data.weights.sizes).to_pandas()
    names = pd.read_csv(tmp_path / "new" / "0.csv")["id"].tolist()
    want = np.stack(table["scores"].tolist())[[names.index(name) for name in IDS]]
    port = free_port()
    command = ["serve", str(run.path), "--port", str(port), "--replicas", "2", "--updates"]
    command += ["--token-file", str(tmp_path / "token")]

    def scores() -> np.ndarray:
        status, answer = post(port, "/predict", {"ids": IDS, "scores": True})
        assert status == 200, answer
        return np.array([row["scores"] for row in answer["rows"]])

    process = Command(command, tmp_path)
    try:
        until(lambda: is_up(port) or process.process.poll() is not None, 180)
        assert process.process.poll() is None, process.finish(60)
        assert post(port, "/nodes", {"nodes": NODES}, token=None)[0] == 401
        bad = {"nodes": {"item": [{"code": 99, "price": "dear"}]}}
        status, answer = post(port, "/nodes", bad)
        assert (status, answer["errors"][0]["where"]) == (400, "nodes.item[0].price")
        assert post(port, "/nodes", {"nodes": {"item": []}})[0] == 400
        assert [*(run.path / "updates").glob("*")] == []
        name = open_run(run.path).name
        assert post(port, "/nodes", {"nodes": NODES}) == (200, {"run": name, "rows": 3})
        assert post(port, "/edges", {"edges": EDGES}) == (200, {"run": name, "rows": 9})
        for _ in range(20):  # of both replicas
            assert np.abs(scores() - want).max() < 1e-6
        status, answer = post(port, "/nodes", {"nodes": NODES})
        assert (status, answer["errors"][0]["what"]) == (400, "'new1' exists already")
        logs = [
            p
            for p in psutil.process_iter()
            if "ServeReplica:" in _title(p) and "updates" in _title(p)
        ]
        (writer,) = (p for p in logs if process.process.pid in {q.pid for q in p.parents()})
        writer.send_signal(signal.SIGKILL)
        until(lambda: post(port, "/predict", {"ids": ["c1"]})[0] == 200, 60)
        assert np.abs(scores() - want).max() < 1e-6
        more = {"edges": {"customer:kin:customer": [{"one": "c3", "other": "new2"}]}}
        until(lambda: post(port, "/edges", more) == (200, {"run": name, "rows": 10}), 60)
        assert np.abs(scores() - want)[2].max() > 1e-6
        with ThreadPoolExecutor(16) as pool:
            told = list(pool.map(lambda _: post(port, "/edges", more), range(32)))
        assert {status for status, _ in told} == {200}, told
        assert sorted(answer["rows"] for _, answer in told) == [*range(11, 43)]
        changed = scores()
    finally:
        process.process.send_signal(signal.SIGINT)
    assert process.finish(60)[0] == 130
    process = Command(command, tmp_path)
    try:
        until(lambda: is_up(port) or process.process.poll() is not None, 180)
        assert np.abs(scores() - changed).max() < 1e-6
    finally:
        process.process.send_signal(signal.SIGINT)
    assert process.finish(60)[0] == 130
    assert process.left_behind() == []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
