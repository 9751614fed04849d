"""The application of Ray Serve: HTTP requests → questions → one batch of a model."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic_core import PydanticCustomError
from ray import serve
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from raygnn import __version__
from raygnn.config.task import built_in_kind
from raygnn.errors import RaygnnError
from raygnn.runs.run import Run, open_run
from raygnn.serving.graph_answers import GraphAnswers
from raygnn.serving.link_answers import LinkAnswers
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import (
    AnyQuestion,
    GraphQuestion,
    ListQuestion,
    NodeQuestion,
    PairQuestion,
    RequestError,
)
from raygnn.serving.served_run import Served, ServedModel, digest_of

if TYPE_CHECKING:
    from os import PathLike

    from ray.serve import Application

LARGEST = 1 << 20  # bytes of a request
_MOST = 1000  # ids or pairs of a request, and targets of a list
_EXPLAINED = 10  # ids of a request
_WAITING = 10_000  # ids and pairs that wait for a replica's model
_BATCH = 1024  # of them in a batch
_WAIT = 0.002  # seconds for others to join a batch
_TOLD = 10  # problems of a request that are answered
_AFTER = "1"  # seconds after which a refused request may come again

AnyAnswers = NodeAnswers | LinkAnswers | GraphAnswers
Models = dict[str, AnyAnswers]  # by task
PlacedQuestion = tuple[Any, str, AnyQuestion]  # a model, the name of its run, and a question for it

GivenId = Annotated[StrictInt | StrictStr, Field(description="as in the graph's tables")]
GivenIds = Annotated[list[GivenId], Field(min_length=1, max_length=_MOST)]
_Scalar = StrictBool | StrictInt | StrictFloat | StrictStr | None
GivenRows = Annotated[
    dict[str, list[dict[str, _Scalar | list[_Scalar]]]],
    Field(default_factory=dict, description="table → new rows, which only this request sees"),
]
GivenRelation = Annotated[str | None, Field(description="of the links, if there are several")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    task: str | None = Field(None, description="one of the run's tasks, if several would do")


class NodeBody(_Body):
    """Nodes to predict for."""

    ids: GivenIds
    fanout: list[Annotated[int, Field(ge=-1, lt=2**31)]] | None = Field(
        None, description="neighbours to sample per layer, from the nodes outward; all by default"
    )
    at: StrictInt | StrictStr | None = Field(
        None, description="predict from what was before this time, such as 2026-01-31"
    )
    scores: bool = Field(False, description="also answer each class's probability")
    explain: int = Field(
        0,
        ge=0,
        le=_MOST,
        description="also answer so many contributions of features, of nodes and of edges to each "
        f"prediction; then at most {_EXPLAINED} ids",
    )

    nodes: GivenRows
    edges: GivenRows

    @model_validator(mode="after")
    def _few(self) -> NodeBody:
        if self.explain and len(self.ids) > _EXPLAINED:
            raise PydanticCustomError("few", f"at most {_EXPLAINED} ids are explained at a time")
        return self

    def question(self) -> NodeQuestion:
        fanout = None if self.fanout is None else tuple(self.fanout)
        rows = self.nodes, self.edges
        return NodeQuestion(self.ids, fanout, self.at, self.scores, self.explain, *rows)


TypedArrays = Annotated[
    dict[str, dict[str, list[Any]]], Field(description="type → array → rows, as /schema says")
]


class GraphRows(BaseModel):
    """A graph. Edges have ``source`` and ``target``, numbers of the nodes in the order of their
    rows."""

    model_config = ConfigDict(extra="forbid")

    nodes: TypedArrays
    edges: TypedArrays


class GraphBody(_Body):
    """Graphs to predict for."""

    graphs: list[GraphRows] = Field(min_length=1, max_length=_MOST)
    scores: bool = Field(False, description="also answer each class's probability")

    def question(self) -> GraphQuestion:
        return GraphQuestion([graph.model_dump() for graph in self.graphs], self.scores)


class PairBody(_Body):
    """Links to score."""

    pairs: list[tuple[GivenId, GivenId]] = Field(
        min_length=1, max_length=_MOST, description="source and target of each"
    )
    relation: GivenRelation = None

    def question(self) -> PairQuestion:
        return PairQuestion(self.pairs, self.relation)


class ListBody(_Body):
    """Sources to recommend targets for."""

    ids: GivenIds
    k: int = Field(10, ge=1, le=_MOST, description="targets of each source")
    known: Literal["exclude", "keep"] = Field(
        "exclude", description="targets that a source has a link to"
    )
    relation: GivenRelation = None

    def question(self) -> ListQuestion:
        return ListQuestion(self.ids, self.k, self.relation, self.known == "keep")


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
) -> Application:
    """Return an application of Ray Serve that answers requests with a run's selected weights.

    Every replica maps the run's partition, once per node. To replace the model without losing a
    request, deploy the application of another run of the same kind under the same name: replicas
    load it beside the old one.

    Args:
        run, task, storage, at, trust, overrides: see `Served.find`.
        token_file: a file whose text every request must carry, ``Authorization: Bearer TEXT``,
            ``/healthz`` aside; None = none must.
        replicas: their number; ``auto`` = Ray scales them with the load.

    Raises:
        InputError: there is no such run, or the token's file cannot be read.
    """
    found = run if isinstance(run, Run) else open_run(run, storage)
    cluster: Mapping[str, Any] = found.config.get("cluster") or {}
    options = {"task": task, "at": at, "trust": trust, "overrides": list(overrides)}
    token = None if token_file is None else digest_of(Path(token_file).expanduser())
    deployment = serve.deployment(
        serve.ingress(_http(_kinds(found, task), token is not None))(ModelReplica),
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
    return deployment.bind(token)


class Settings(BaseModel):
    """Arguments of `app` in a file of ``serve deploy``."""

    model_config = ConfigDict(extra="forbid")

    run: str
    task: str | None = None
    storage: str = "runs"
    at: int | str | None = None
    trust: bool = False
    overrides: list[str] = []
    token_file: str | None = None
    replicas: int | Literal["auto"] = 1


def build(args: dict[str, Any]) -> Application:
    """Build `app` of the arguments in a file of ``serve deploy``, see `Settings`: ``import_path:
    raygnn.serving:build``."""
    return app(**Settings.model_validate(args).model_dump())


class ModelReplica:
    """Copy of the model in a process of its own.

    Args:
        token: SHA-256 of the token, in hex; None = requests need none.
    """

    def __init__(self, token: str | None):
        self._token = token
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raygnn-model")
        self._waiting = 0
        self._models: Models

    async def reconfigure(self, options: dict[str, Any]) -> None:
        """Load a run's model, while the present one answers."""
        self._models, self._run = await asyncio.to_thread(_load, options)

    def allows(self, token: str) -> bool:
        given = hashlib.sha256(token.encode()).hexdigest()
        return self._token is None or hmac.compare_digest(given, self._token)

    def schema(self) -> dict[str, Any]:
        found = {name: model.schema() for name, model in self._models.items()}
        return {**found.get("", {"tasks": found}), "raygnn": __version__}

    def _model(self, question: AnyQuestion, task: str | None) -> AnyAnswers:
        kinds = {NodeQuestion: NodeAnswers, GraphQuestion: GraphAnswers}
        kind = kinds.get(type(question), LinkAnswers)
        names = [name for name, model in self._models.items() if isinstance(model, kind)]
        if task in names or (task is None and len(names) == 1):
            return self._models[task or names[0]]
        what = (
            "several tasks could answer this" if task is None else f"no task {task!r} answers this"
        )
        remedy = "leave it out" if names == [""] else f"name one of {', '.join(names)}"
        raise RequestError(what, where="task", remedy=remedy)

    async def answer(self, question: AnyQuestion, task: str | None = None) -> dict[str, Any]:
        """Return the answer of a request.

        Args:
            task: name of one of several tasks; None = the only one that can answer.

        Raises:
            RequestError: the request cannot be answered.
            HTTPException: too many wait.
        """
        model = self._model(question, task)
        size = _size(question)
        if self._waiting and self._waiting + size > _WAITING:
            raise HTTPException(503, "too many requests wait", headers={"Retry-After": _AFTER})
        self._waiting += size
        try:
            answer, run = await self._batch((model, self._run, question))
        finally:
            self._waiting -= size
        if isinstance(answer, RaygnnError):
            raise answer
        return {"run": run, "rows": answer}

    @serve.batch(
        max_batch_size=_BATCH,
        batch_wait_timeout_s=_WAIT,
        batch_size_fn=lambda asked: sum(_size(question) for _, _, question in asked),
    )
    async def _batch(self, asked: list[PlacedQuestion]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _answers, asked)


def _answers(asked: Sequence[PlacedQuestion]) -> list[Any]:
    """Return the answer to each question, and the run that it is of."""
    found: dict[int, Any] = {}
    for model in {id(model): model for model, _, _ in asked}.values():
        numbers = [number for number, (of, _, _) in enumerate(asked) if of is model]
        found |= zip(numbers, model.answer([asked[number][2] for number in numbers]))
    return [(found[number], run) for number, (_, run, _) in enumerate(asked)]


def _load(options: dict[str, Any]) -> tuple[Models, str]:
    found = Served.find(**options)
    model, models = ServedModel(found[0]), dict[str, AnyAnswers]()
    for served in found:
        task = served.one.task
        kind = LinkAnswers if task.of_links else GraphAnswers if task.of_graphs else NodeAnswers
        models[served.task] = kind(model.for_task(served))
    return models, found[0].config.name


def _size(question: AnyQuestion) -> int:
    if isinstance(question, GraphQuestion):
        return len(question.graphs)
    return len(question.pairs if isinstance(question, PairQuestion) else question.ids)


def _http(kinds: Collection[str], guarded: bool) -> FastAPI:
    """Return the routes of models of these kinds, see `_kinds`."""
    # without a description there is no /docs either, which would need no token
    described = None if guarded else "/openapi.json"
    http = FastAPI(title="raygnn", version=__version__, openapi_url=described)
    http.add_middleware(Door, guarded)
    for kind in (RequestError, RequestValidationError, HTTPException):
        http.exception_handler(kind)(_told)

    @http.get("/healthz")
    async def healthz() -> str:
        """Answer whether the service is up."""
        return "ok"

    @http.get("/schema")
    async def schema() -> dict[str, Any]:
        """Answer what the model predicts."""
        return _replica().schema()

    def route(path: str, body: type[_Body]) -> None:
        async def answer(body: Any) -> Any:
            return await _replica().answer(body.question(), body.task)

        answer.__annotations__["body"] = body
        answer.__doc__ = body.__doc__
        http.post(path)(answer)

    if "link" in kinds:
        route("/score", PairBody)
        route("/recommend", ListBody)
    if "node" in kinds:
        route("/predict", NodeBody)
    if "graph" in kinds:
        route("/predict", GraphBody)
    return http


def _replica() -> ModelReplica:
    found: ModelReplica = serve.get_replica_context().servable_object
    return found


async def _told(_: Request, error: Exception) -> JSONResponse:
    """Answer what is wrong with a request, in one form; not its values, which may not be JSON."""
    told: list[tuple[str, str | None, str | None]] = []
    status, headers = 400, None
    if isinstance(error, RequestValidationError):
        status = 422
        told = [(one["msg"], ".".join(map(str, one["loc"])), None) for one in error.errors()]
    elif isinstance(error, HTTPException):
        status, headers, told = error.status_code, error.headers, [(error.detail, None, None)]
    elif isinstance(error, RequestError):
        told = [(error.what, error.where, error.remedy)]
    return _errors(status, told[:_TOLD], headers)


def _errors(
    status: int, told: Sequence[tuple[str, str | None, str | None]], headers: Any = None
) -> JSONResponse:
    facts = [dict(zip(("what", "where", "remedy"), one)) for one in told]
    return JSONResponse({"errors": facts}, status, headers)


class Door:
    """Refuses requests without the token, ``/healthz`` aside, before they are read, and those of
    more than `LARGEST` bytes before they are parsed."""

    def __init__(self, inner: Callable[..., Any], guarded: bool):
        self._inner = inner
        self._guarded = guarded

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        route = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._guarded and route != "/healthz":
            given = Headers(scope=scope).get("authorization", "")
            kind, _, token = given.partition(" ")
            if not _replica().allows(token if kind.lower() == "bearer" else ""):
                needed = [("a token is needed", None, None)]
                refusal = _errors(401, needed, {"WWW-Authenticate": "Bearer"})
                return await refusal(scope, receive, send)
        body, more = bytearray(), True
        while more and len(body) <= LARGEST:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if len(body) > LARGEST:
            refusal = _errors(413, [(f"a request has at most {LARGEST:,} bytes", None, None)])
            return await refusal(scope, receive, send)
        whole = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def again() -> Any:
            return next(whole, None) or await receive()

        await self._inner(scope, again, send)
        return None


def _kinds(run: Run, task: str | None) -> set[str]:
    """Return what each task, or the one of this name, predicts: ``node``, ``link``, ``graph``."""
    tasks = run.config.get("tasks") or {task: run.config.get("task") or {}}
    chosen = tasks.values() if task is None else [tasks.get(task, {})]
    return {str(built_in_kind(one)).partition("_")[0] for one in chosen}
