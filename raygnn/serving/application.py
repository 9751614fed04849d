"""Application of Ray Serve: HTTP requests → questions → one batch of a model."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray import serve
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from raygnn import __version__
from raygnn.config.task import built_in_kind
from raygnn.runs.run import Run, open_run
from raygnn.serving.link_graph_answers import GraphAnswers, LinkAnswers
from raygnn.serving.new_rows import AllRows
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import (
    AnswerRows,
    AnyQuestion,
    GraphQuestion,
    ListQuestion,
    NodeQuestion,
    PairQuestion,
    RequestError,
    Update,
)
from raygnn.serving.served_run import Served, ServedModel, check_updates, digest_of
from raygnn.serving.updates import Updates, encoded

if TYPE_CHECKING:
    from os import PathLike

    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

_log = logging.getLogger("ray.serve")

LARGEST = 1 << 20  # bytes of a request
_WAITING = 10_000  # ids and pairs that wait for a replica's model
_BATCH = 1024  # ids and pairs in a batch
_UPDATE = 100  # ids and pairs that an update counts as
_WAIT = 0.002  # seconds for further requests to join a batch
_REPORTED = 10  # problems of a request in its answer
_TRIES = 64  # to write an update, if other replicas write at the same time
_PATIENCE = 30.0  # seconds to wait for the log of updates
_START = 600.0  # seconds to read the complete log
_KEPT = 100_000  # rows of all updates
_LATER = {"Retry-After": "1"}  # seconds until a refused request may be repeated

AnyAnswers = NodeAnswers | LinkAnswers | GraphAnswers
Models = dict[str, AnyAnswers]  # by task


@dataclass(frozen=True)
class Loaded:
    """A run in a replica.

    Attributes:
        place: path or URI of the run.
        rows: new rows that its tasks on nodes see.
    """

    place: str
    name: str
    models: Models
    rows: AllRows


PlacedQuestion = tuple[AnyAnswers, Loaded, AnyQuestion]  # a question, for a model of a run


def app(
    run: str | Path | Run,
    *,
    task: str | None = None,
    storage: str = "runs",
    at: Any = None,
    trust: bool = False,
    overrides: Sequence[str] = (),
    token_file: str | PathLike[str] | None = None,
    replicas: int | Literal["auto"] = 1,
    updates: bool = False,
) -> Application:
    """Return an application of Ray Serve that answers requests with a run's selected weights.

    The replicas of a node share one mapping of the run's partition. To replace the model without
    losing a request, deploy the application of another run of the same kind under the same name:
    replicas answer with the old model while they load the new one.

    Args:
        run, task, storage, at, trust, overrides: see `Served.find`.
        token_file: file with the token that every request but ``/healthz`` must carry,
            ``Authorization: Bearer TOKEN``; None = no token.
        replicas: number of replicas; ``auto`` = Ray scales them with the load.
        updates: keep new rows that are sent to ``/nodes`` and ``/edges``, in the run's directory.
            Needs a token.

    Raises:
        InputError: the run does not exist or cannot have updates, or the token's file cannot be
            read.
    """
    found = run if isinstance(run, Run) else open_run(run, storage)
    cluster: Mapping[str, Any] = found.config.get("cluster") or {}
    options = {"task": task, "at": at, "trust": trust, "overrides": list(overrides)}
    token = None if token_file is None else digest_of(Path(token_file).expanduser())
    if updates:
        check_updates(Served.find(found, **options), token_file)
    kinds, guarded = _kinds(found, task), token is not None
    deployment = serve.deployment(
        # each replica makes its own, since Ray 2.55 cannot pickle every FastAPI
        serve.ingress(lambda: _http(kinds, guarded, updates))(ModelReplica),
        name="raygnn",
        num_replicas=replicas,
        max_ongoing_requests=1000,
        max_queued_requests=1000,
        ray_actor_options={
            "num_cpus": cluster.get("cpus_per_worker", 1),
            "num_gpus": cluster.get("gpus_per_worker", 0),
        },
        user_config={"run": found.shown, **options},
    )
    log = serve.deployment(
        Updates, name="updates", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    return deployment.bind(token, log.bind() if updates else None)


def build(args: dict[str, Any]) -> Application:
    """Build `app` from the arguments in a file of ``serve deploy``: ``import_path:
    raygnn.serving:build``."""
    return app(**args)


class ModelReplica:
    """Replica of the model in a separate process.

    Args:
        token: SHA-256 of the token, in hex; None = requests need no token.
        updates: deployment of `Updates`; None = the service keeps no new rows.
    """

    def __init__(self, token: str | None, updates: DeploymentHandle | None):
        self._token = token
        self._updates = updates
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raygnn-model")
        self._waiting = 0
        self._updating = asyncio.Lock()
        self._loaded: Loaded

    async def reconfigure(self, options: dict[str, Any]) -> None:
        """Load a run's model, while the current one answers requests."""
        loaded = await asyncio.to_thread(_load, options)
        if self._updates is not None:
            known = await asyncio.wait_for(self._updates.since.remote(loaded.place, 0), _START)
            await asyncio.to_thread(loaded.rows.keep, 0, known)
        self._loaded = loaded

    def allows(self, token: str) -> bool:
        given = hashlib.sha256(token.encode()).hexdigest()
        return self._token is None or hmac.compare_digest(given, self._token)

    def schema(self) -> dict[str, Any]:
        found = {name: model.schema() for name, model in self._loaded.models.items()}
        return {**found.get("", {"tasks": found}), "raygnn": __version__}

    async def answer(self, question: AnyQuestion) -> dict[str, Any]:
        """Answer a request.

        Raises:
            RequestError: the request cannot be answered.
            HTTPException: too many requests wait.
        """
        loaded = self._loaded
        model = _model(loaded.models, question)
        with self._counted(_size(question)):
            answer = await self._batch((model, loaded, question))
        if isinstance(answer, RequestError):
            raise answer
        return {"run": loaded.name, "rows": answer}

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        """Count a waiting request during the block. Raises HTTPException if too many wait."""
        if self._waiting and self._waiting + size > _WAITING:
            raise HTTPException(503, "too many requests wait", headers=_LATER)
        self._waiting += size
        try:
            yield
        finally:
            self._waiting -= size

    async def update(self, update: Update) -> dict[str, Any]:
        """Keep new rows, which every later request sees; returns the run and the number of rows.

        Raises:
            RequestError: the rows cannot be read.
            HTTPException: the rows cannot be written.
        """
        assert self._updates is not None
        loop = asyncio.get_running_loop()
        with self._counted(_UPDATE):
            async with self._updating:
                for _ in range(_TRIES):  # other replicas may write at the same time
                    loaded = self._loaded
                    known = await self._kept(loaded)
                    number, count = await loop.run_in_executor(
                        self._thread, _checked, loaded.rows, known, update
                    )
                    kept = await _awaited(self._updates.add.remote(loaded.place, number, update))
                    if kept:
                        return {"run": loaded.name, "rows": count}
                    if kept is None:
                        raise _full("updates, or bytes of them,")
        raise HTTPException(503, "other replicas are writing rows", headers=_LATER)

    async def _kept(self, loaded: Loaded) -> tuple[int, list[Update]]:
        """Return the updates that this replica lacks, after the number of the first."""
        count, updates = loaded.rows.count, list[Update]()
        if self._updates is not None:
            updates = await _awaited(self._updates.since.remote(loaded.place, count))
        return count, updates

    @serve.batch(
        max_batch_size=_BATCH,
        batch_wait_timeout_s=_WAIT,
        batch_size_fn=lambda asked: sum(_size(question) for _, _, question in asked),
    )
    async def _batch(self, asked: list[PlacedQuestion]) -> list[AnswerRows | RequestError]:
        loop = asyncio.get_running_loop()
        runs = {id(run): run for _, run, one in asked if isinstance(one, NodeQuestion)}
        known = [(loaded.rows, *await self._kept(loaded)) for loaded in runs.values()]
        return await loop.run_in_executor(self._thread, _answers, asked, known)


async def _awaited(response: Any) -> Any:
    """Return the log's response. Raises HTTPException if it fails or takes too long."""
    try:
        return await asyncio.wait_for(response, _PATIENCE)
    except Exception as error:  # the storage fails, or the log's process has died
        _log.error("raygnn: the log of updates fails: %s", error)
        text = "the log of updates cannot be read or written now"
        raise HTTPException(503, text, headers=_LATER) from None


def _full(what: str) -> RequestError:
    remedy = "train a run on tables that have the rows"
    return RequestError(f"the service keeps no more {what}", where="nodes, edges", remedy=remedy)


def _model(models: Models, question: AnyQuestion) -> AnyAnswers:
    """Return the model that answers a question. Raises RequestError if none or several do."""
    kinds = {NodeQuestion: NodeAnswers, GraphQuestion: GraphAnswers}
    kind = kinds.get(type(question), LinkAnswers)
    names, task = [n for n, model in models.items() if isinstance(model, kind)], question.task
    if task in names or (task is None and len(names) == 1):
        return models[task or names[0]]
    what = "several tasks could answer this" if task is None else f"no task {task!r} answers this"
    remedy = "leave it out" if names == [""] else f"name one of {', '.join(names)}"
    raise RequestError(what, where="task", remedy=remedy)


def _answers(
    asked: Sequence[PlacedQuestion], known: Sequence[tuple[AllRows, int, list[Update]]]
) -> list[AnswerRows | RequestError]:
    """Return the answer to each question; ``known``: updates that the answers must see."""
    for rows, first, updates in known:
        rows.keep(first, updates)
    found: dict[int, AnswerRows | RequestError] = {}
    for model in {id(model): model for model, _, _ in asked}.values():
        numbers = [number for number, (of, _, _) in enumerate(asked) if of is model]
        answers: Sequence[Any] = model.answer([cast(Any, asked[number][2]) for number in numbers])
        found |= zip(numbers, answers)
    return [found[number] for number in range(len(asked))]


def _checked(rows: AllRows, known: tuple[int, list[Update]], update: Update) -> tuple[int, int]:
    """Return the number of an update after the known ones, and the total of new rows with it.
    Raises RequestError if its rows cannot be read after those."""
    rows.keep(*known)
    count = rows.beside(update.nodes, update.edges).count
    try:
        encoded(update)
    except ValueError as error:
        what, remedy = f"the rows cannot be kept: {error}", "send text in UTF-8"
        raise RequestError(what, where="nodes, edges", remedy=remedy) from None
    if count == rows.kept.count:
        raise RequestError("there are no rows", where="nodes, edges", remedy="send some")
    if count > _KEPT:
        raise _full("rows")
    return rows.count, count


def _load(options: dict[str, Any]) -> Loaded:
    found = Served.find(**options)
    model, models = ServedModel(found[0]), dict[str, AnyAnswers]()
    rows = AllRows(model)
    for served in found:
        task, own = served.one.task, model.for_task(served)
        if task.of_links:
            models[served.task] = LinkAnswers(own)
        else:
            models[served.task] = GraphAnswers(own) if task.of_graphs else NodeAnswers(own, rows)
    return Loaded(options["run"], found[0].config.name, models, rows)


def _size(question: AnyQuestion) -> int:
    if isinstance(question, GraphQuestion):
        return len(question.graphs)
    return len(question.pairs if isinstance(question, PairQuestion) else question.ids)


def _http(kinds: Collection[str], guarded: bool, updates: bool) -> FastAPI:
    """Return the routes for models of these kinds, see `_kinds`."""
    # without the description FastAPI adds no /docs either, which would need no token
    described = None if guarded else "/openapi.json"
    handlers: Any = dict.fromkeys((RequestError, RequestValidationError, HTTPException), _refusal)
    http = FastAPI(
        title="raygnn", version=__version__, openapi_url=described, exception_handlers=handlers
    )
    http.add_middleware(Door, guarded)

    @http.get("/healthz")
    async def healthz() -> str:
        """Report that the service is up."""
        return "ok"

    @http.get("/schema")
    async def schema() -> dict[str, Any]:
        """Describe the model and its requests."""
        return _replica().schema()

    def route(path: str, body: type[Any]) -> None:
        async def answer(body: Any) -> Any:
            replica = _replica()
            return await (replica.update if isinstance(body, Update) else replica.answer)(body)

        answer.__annotations__["body"] = body
        http.post(path, description=body.__doc__)(answer)

    if "link" in kinds:
        route("/score", PairQuestion)
        route("/recommend", ListQuestion)
    if "node" in kinds:
        route("/predict", NodeQuestion)
        for path in ("/nodes", "/edges") if updates else ():
            route(path, Update)
    if "graph" in kinds:
        route("/predict", GraphQuestion)
    return http


def _replica() -> ModelReplica:
    found: ModelReplica = serve.get_replica_context().servable_object
    return found


async def _refusal(_: Request, error: Any) -> JSONResponse:
    """Report the problems of a request in one form, without its values, which may not be JSON."""
    if isinstance(error, RequestValidationError):
        texts = {"unexpected_keyword_argument": "the request has no such field"}
        found = [
            (texts.get(one["type"], one["msg"]), ".".join(map(str, one["loc"])), None)
            for one in error.errors()[:_REPORTED]
        ]
        return _errors(422, *found)
    if isinstance(error, RequestError):
        return _errors(400, (error.what, error.where, error.remedy))
    return _errors(error.status_code, (error.detail, None, None), headers=error.headers)


def _errors(status: int, *problems: tuple[str | None, ...], headers: Any = None) -> JSONResponse:
    # a request's text may contain surrogates, which cannot be sent back
    plain = [[text and text.encode(errors="replace").decode() for text in one] for one in problems]
    facts = [dict(zip(("what", "where", "remedy"), one)) for one in plain]
    return JSONResponse({"errors": facts}, status, headers)


class Door:
    """Middleware that refuses requests without the token, except ``/healthz``, before they are
    read, and stops reading requests of more than `LARGEST` bytes."""

    def __init__(self, inner: Callable[..., Any], guarded: bool):
        self._inner = inner
        self._guarded = guarded

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        route = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if self._guarded and scope["type"] == "http" and route != "/healthz":
            given = Headers(scope=scope).get("authorization", "")
            kind, _, token = given.partition(" ")
            if not _replica().allows(token if kind.lower() == "bearer" else ""):
                needed, headers = ("a token is needed", None, None), {"WWW-Authenticate": "Bearer"}
                return await _errors(401, needed, headers=headers)(scope, receive, send)
        size = 0

        async def limited() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST:
                raise HTTPException(413, f"a request has at most {LARGEST:,} bytes")
            return message

        return await self._inner(scope, limited, send)


def _kinds(run: Run, task: str | None) -> set[str]:
    """Return what each task, or the one of this name, predicts: ``node``, ``link``, ``graph``."""
    tasks = run.config.get("tasks") or {task: run.config.get("task") or {}}
    chosen = tasks.values() if task is None else [tasks.get(task, {})]
    return {str(built_in_kind(one)).partition("_")[0] for one in chosen}
