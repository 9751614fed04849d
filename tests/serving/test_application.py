"""A served run over HTTP, on a real Ray Serve: answers, refusals, a killed replica, a new run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import ray
import yaml
from ray import serve

from raygnn import predict, train
from raygnn.config.load import load_config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import InputError, PreflightError, TrainingError
from raygnn.serving import app
from raygnn.serving.application import LARGEST
from raygnn.serving.commands import _check_port
from raygnn.serving.commands import serve as serve_until_stopped
from tests.support.commands import Command
from tests.support.pages import CHECKOUT
from tests.support.postgres import free_port
from tests.support.small_jobs import job, until

TOKEN = "what only callers know"


def post(port: int, path: str, body: Any, token: str | None = TOKEN) -> tuple[int, Any]:
    """Return status and answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data)
    request.add_header("content-type", "application/json")
    if token is not None:
        request.add_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        try:
            return error.code, json.loads(text)
        except json.JSONDecodeError:
            return error.code, text
    except OSError as error:
        return 0, repr(error)


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two runs, predictions of the first, and a file with the token."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def port(place: Path) -> Iterator[int]:
    """Two replicas of the first run."""
    storage, number = place / "runs", free_port()
    values = job(storage, name="one", train={"epochs": 1}, cluster={"workers": 1})
    (place / "token").write_text(TOKEN + "\n")
    with RayCluster(load_config(values)) as cluster:
        cluster.wait()
        for name, seed in (("one", 0), ("other", 1)):
            train({**values, "name": name, "train": {"epochs": 1, "seed": seed}}, display=False)
            predict(storage / name, out=place / f"{name}.parquet", display=False)
        serve.start(http_options={"port": number}, proxy_location="HeadOnly")
        deploy(place, "one")
        yield number
        serve.shutdown()


def deploy(place: Path, name: str) -> None:
    application = app(place / "runs" / name, token_file=place / "token", replicas=2)
    serve.run(application, name="test", route_prefix="/")


def known(place: Path, name: str, ids: list[int]) -> list[dict[str, Any]]:
    frame = pd.read_parquet(place / f"{name}.parquet").set_index("node").loc[ids].reset_index()
    rows: list[dict[str, Any]] = frame[["node", "prediction", "probability"]].to_dict("records")
    return [{**row, "probability": pytest.approx(row["probability"], abs=1e-6)} for row in rows]


pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


def test_answers(port: int, place: Path) -> None:
    ids = [5, 3, 1999]
    assert post(port, "/predict", {"ids": ids}) == (
        200,
        {"run": "one", "rows": known(place, "one", ids)},
    )
    sampled = {"ids": ids, "fanout": [3, 2], "scores": True}
    first, again = (post(port, "/predict", sampled) for _ in range(2))
    assert first == again
    assert len(first[1]["rows"][0]["scores"]) == 4
    (row,) = post(port, "/predict", {"ids": [5], "explain": 2})[1]["rows"]
    assert row["explanation"]["score"] == pytest.approx(row["probability"], abs=1e-5)
    assert [len(row["explanation"][of]) for of in ("features", "nodes", "edges")] == [2, 2, 2]


def test_the_client_of_the_examples(port: int, place: Path) -> None:
    (place / "ids.txt").write_text("5\n3\n1999\n")
    client = [sys.executable, "examples/serving/client.py", f"http://127.0.0.1:{port}"]
    client += ["--ids", str(place / "ids.txt"), "--token-file", str(place / "token")]
    done = subprocess.run(client, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == known(place, "one", [5, 3, 1999])
    (place / "ids.txt").write_text("2000\n")
    done = subprocess.run(client, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert "RuntimeError: 400: " in done.stderr
    assert "there is no 2000" in done.stderr


@pytest.mark.parametrize(
    ("body", "code", "where", "what"),
    [
        ({"ids": [2000]}, 400, "ids[0]", "there is no 2000"),
        ({"ids": [1, "x"]}, 400, "ids[1]", "there is no 'x'"),
        ({"ids": [1], "fanout": [5]}, 400, "fanout", "2 layers"),
        ({"ids": [1], "at": "2026-01-01"}, 400, "at", "without times"),
        ({"ids": []}, 422, "body.ids", "at least 1"),
        ({"ids": [*range(1001)]}, 422, "body.ids", "at most 1000"),
        ({"ids": [1.5]}, 422, "body.ids.0.int", "valid integer"),
        ({"ids": [True]}, 422, "body.ids.0.int", "valid integer"),
        ({"ids": [[1]]}, 422, "body.ids.0.int", "valid integer"),
        ({"ids": [1], "run": "other"}, 422, "body.run", "no such field"),
        ({"ids": [*range(11)], "explain": 1}, 422, "body", "at most 10 ids are explained"),
        (b'{"ids": [NaN]}', 422, "body.ids.0.int", "integer"),
        (b"[" * 100_000, 400, None, "parsing the body"),
        (b"\x80", 400, None, "parsing the body"),
        (b"{", 422, "body", "JSON decode error"),
    ],
)
def test_refusals(port: int, body: Any, code: int, where: str | None, what: str) -> None:
    """Each says where and what is wrong, and nothing of the machine."""
    status, answer = post(port, "/predict", body)
    assert status == code, answer
    assert (answer["errors"][0]["where"] or "").startswith(where or "")
    assert what in answer["errors"][0]["what"]
    assert "/" not in json.dumps(answer)


def test_a_body_that_is_too_large(port: int) -> None:
    assert post(port, "/predict", b" " * (LARGEST + 1))[0] == 413
    assert post(port, "/predict", b" " * (LARGEST - 20) + b'{"ids": [1]}')[0] == 200


@pytest.mark.parametrize("token", [None, "", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_nothing_is_answered(port: int, token: str | None) -> None:
    assert post(port, "/predict", {"ids": [1]}, token)[0] == 401
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/schema", timeout=60)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
        assert answer.status == 200


def test_another_run_and_a_killed_replica(port: int, place: Path) -> None:
    """While another run takes the first one's place, no request is lost; when a replica is killed,
    only those that it computes."""
    answers: list[tuple[int, Any]] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answers.append(post(port, "/predict", {"ids": [7]}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answers) > 20)
        deploy(place, "other")
        until(lambda: "other" in str(answers[-1]))
        assert {status for status, _ in answers} == {200}
        replica = next(
            process
            for process in psutil.process_iter()
            if "ServeReplica" in " ".join(_title(process)) and os.getpid() in _parents(process)
        )
        replica.send_signal(signal.SIGKILL)
        count = len(answers)
        until(lambda: len(answers) > count + 100, 120)
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    right = {name: known(place, name, [7]) for name in ("one", "other")}
    lost = [answer for answer in answers if answer[0] != 200]
    assert len(lost) <= len(threads), lost
    assert {status for status, _ in lost} <= {500}, lost
    given = [answer for status, answer in answers if status == 200]
    assert all(answer["rows"] == right[answer["run"]] for answer in given)


def _title(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _parents(process: psutil.Process) -> list[int]:
    return [parent.pid for parent in process.parents()]


def test_callers_that_send_slowly_do_not_stop_others(place: Path, port: int) -> None:
    token = f"Authorization: Bearer {TOKEN}"
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\n{token}\r\nContent-Length: 99\r\n\r\n{{"
    with contextlib.ExitStack() as slow:
        for some in range(200):
            caller = slow.enter_context(socket.create_connection(("127.0.0.1", port)))
            caller.sendall(head.encode()[: None if some % 2 else 30])
        answer = post(port, "/predict", {"ids": [1]})[1]
        assert answer["rows"] == known(place, answer["run"], [1])


def test_a_service_that_is_deployed_from_a_file(place: Path, port: int) -> None:
    """As by ``serve deploy``, with another run; the old one is deployed again."""
    args = {"run": str(place / "runs" / "other"), "token_file": str(place / "token")}
    application = {"name": "test", "import_path": "raygnn.serving:build", "args": args}
    (place / "serve.yaml").write_text(yaml.safe_dump({"applications": [application]}))
    address = ray.get_runtime_context().gcs_address
    command = ["ray.serve.scripts", "run", "serve.yaml", "--address", address, "--non-blocking"]
    subprocess.run([sys.executable, "-m", *command], cwd=place, check=True, timeout=120)
    until(lambda: post(port, "/predict", {"ids": [1]})[1].get("run") == "other", 120)
    assert post(port, "/predict", {"ids": [1, 2]})[1]["rows"] == known(place, "other", [1, 2])
    deploy(place, "one")


def test_what_is_refused_before_anything_starts(place: Path, port: int) -> None:
    (place / "empty").write_text("\n")
    for file, part in (("none", "cannot be read"), ("empty", "is empty")):
        with pytest.raises(InputError, match=part):
            app(place / "runs" / "one", token_file=place / file)
    with pytest.raises(InputError, match="port cannot be opened"):
        _check_port("127.0.0.1", port)
    with pytest.raises(TrainingError, match="could not deploy the model"):  # another one is there
        serve_until_stopped(place / "runs" / "one", port=port, display=False)
    with pytest.raises(PreflightError, match="replicas"):
        serve_until_stopped(place / "runs" / "one", port=free_port(), replicas=999, display=False)
    assert ray.is_initialized()


def test_ray_serve_is_looked_for_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.serving.commands.find_spec", {}.get)
    with pytest.raises(PreflightError, match="Ray Serve is not installed"):
        serve_until_stopped(place / "runs" / "none", display=False)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Idle:
    pass


def test_a_service_that_is_interrupted_at_its_start_is_removed(
    place: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy = serve.run

    def interrupted(_: Any, *, name: str, **options: Any) -> None:
        deploy(Idle.bind(), name=name, route_prefix="/idle")
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve_until_stopped(place / "runs" / "one", port=port, display=False)
    assert list(serve.status().applications) == ["test"]


def test_the_command(tmp_path: Path) -> None:
    values = job(tmp_path / "runs", train={"epochs": 1}, cluster={"workers": 1})
    train(values, display=False)
    number = free_port()
    run = str(tmp_path / "runs" / "test")
    process = Command(["serve", run, "--port", str(number)], tmp_path)
    try:
        until(lambda: is_up(number) or process.process.poll() is not None, 180)
        status, answer = post(number, "/predict", {"ids": [1]}, None)
        assert status == 200
        assert answer["rows"][0]["node"] == 1
    finally:
        process.process.send_signal(signal.SIGINT)
    status, out, err = process.finish(60)
    assert status == 130, out + err
    assert process.left_behind() == []
