"""What a replica refuses before its model is asked."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.exceptions import HTTPException

from raygnn.serving import application
from raygnn.serving.application import LARGEST, Door, Loaded, ModelReplica, _http
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import NodeQuestion, RequestError


def scope(path: str, token: str = "") -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {token}".encode())]
    return {"type": "http", "path": path, "headers": headers}


def test_so_many_requests_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_WAITING", 100)
    may = asyncio.Event()

    async def batch(self: ModelReplica, asked: tuple[Any, Any, NodeQuestion]) -> Any:
        await may.wait()
        return [] if asked[2].ids[0] else RequestError("there is no 0")

    monkeypatch.setattr(ModelReplica, "_batch", batch)

    async def ask() -> tuple[list[Any], Any]:
        served = ModelReplica(None, None)
        served._loaded = Loaded("", "run", {"": Mock(NodeAnswers)}, Mock())
        asked = [asyncio.ensure_future(served.answer(NodeQuestion([n] * 9))) for n in range(13)]
        await asyncio.sleep(0)
        may.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return answers, await served.answer(NodeQuestion([1] * 1000))  # alone, of any size

    (wrong, *others), alone = asyncio.run(ask())
    assert isinstance(wrong, RequestError)
    assert others[:10] == [{"run": "run", "rows": []}] * 10
    for refused in others[10:]:
        assert isinstance(refused, HTTPException)
        assert (refused.status_code, refused.headers) == (503, {"Retry-After": "1"})
    assert alone["rows"] == []


def test_the_token() -> None:
    digest = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"  # of "password"
    assert ModelReplica(digest, None).allows("password")
    assert not ModelReplica(digest, None).allows("Password")
    assert not ModelReplica(digest, None).allows("")
    assert not ModelReplica(digest, None).allows(digest)
    assert ModelReplica(None, None).allows("")


@pytest.mark.parametrize(("guarded", "described"), [(False, True), (True, False)])
def test_a_guarded_service_describes_itself_to_nobody(guarded: bool, described: bool) -> None:
    paths = {getattr(route, "path", "") for route in _http({"node"}, guarded, False).routes}
    assert "/healthz" in paths
    assert ({"/docs", "/openapi.json", "/redoc"} <= paths) == described
    assert bool({"/docs", "/openapi.json", "/redoc"} & paths) == described


@pytest.mark.parametrize(
    ("size", "status"), [(0, 422), (LARGEST, 422), (LARGEST + 1, 413), (2**24, 413)]
)
def test_a_body_is_read_up_to_its_limit(size: int, status: int) -> None:
    """Of a larger body no more is read, however much comes."""
    piece, read, sent = 1 << 16, 0, []

    async def receive() -> dict[str, Any]:
        nonlocal read
        body = b"x" * min(piece, size - read)
        read += len(body)
        return {"type": "http.request", "body": body, "more_body": read < size}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    request = {**scope("/predict"), "method": "POST", "query_string": b"", "root_path": ""}
    asyncio.run(_http({"node"}, False, False)(request, receive, send))
    assert sent[0]["status"] == status
    assert b'{"errors":' in sent[1]["body"]
    assert read <= LARGEST + piece


@pytest.mark.parametrize(
    ("path", "token", "passes"),
    [
        ("/predict", "right", True),
        ("/predict", "wrong", False),
        ("/predict", "", False),
        ("/schema", "", False),
        ("/healthz", "", True),
        ("/healthz/../predict", "", False),
        ("/unknown", "", False),
    ],
)
def test_nothing_is_read_of_a_request_without_the_token(
    path: str, token: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    monkeypatch.setattr(application, "_replica", lambda: ModelReplica(digest, None))
    done = []

    async def receive() -> dict[str, Any]:
        done.append("read")
        return {"type": "http.request", "body": b"", "more_body": False}

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        done.append("asked")

    async def send(message: dict[str, Any]) -> None:
        done.append(message.get("status", "body"))

    asyncio.run(Door(inner, guarded=True)(scope(path, token), receive, send))
    assert done == (["read", "asked"] if passes else [401, "body"])
