"""``raygnn serve``, which serves a run on Ray Serve until Ctrl-C, and ``raygnn explain``."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from raygnn.driver.job_plan import display_of
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import InputError, PreflightError, TrainingError
from raygnn.prediction.merge import OTHER, free_file
from raygnn.runs.display import Display
from raygnn.runs.run import Run, open_run
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import LARGEST_TREE, NodeQuestion, UserId
from raygnn.serving.served_run import Served, ServedModel, check_updates, digest_of
from raygnn.serving.updates import UpdateLog, updates_of
from raygnn.util.files import replacing, storage_errors
from raygnn.worker.planes.prediction_rows import read_wanted

if TYPE_CHECKING:
    import pandas

_DEADLINE = 60.0  # seconds for a request
_POLL = 1.0  # seconds between checks of Ray
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_COLUMNS = (
    *("node", "prediction", "score", "without", "kind", "type"),
    *("feature", "source", "target", "contribution"),
)


def serve(
    run: str | Path | Run,
    *,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    replicas: int | Literal["auto"] = 1,
    token_file: str | PathLike[str] | None = None,
    updates: bool = False,
    task: str | None = None,
    at: Any = None,
    trust: bool = False,
    storage: str = "runs",
    overrides: Sequence[str] = (),
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> None:
    """Answer requests over HTTP with a run's selected weights, until Ctrl-C or SIGTERM.

    Args:
        address: address of a Ray cluster, ``HOST:PORT``; None = ``cluster.address`` of the run.
        host, port: address and port to listen on; ``0.0.0.0`` = all interfaces.
        run, replicas, token_file, updates, task, at, trust, storage, overrides: see
            `raygnn.serving.app`.
        verbose, display, started: see `raygnn.train`.

    Raises:
        InputError: the run does not exist or cannot have updates, or the port is in use.
        DataError: the kept updates cannot be read.
        PreflightError: the packages of Ray Serve are missing, or Ray does not start.
        TrainingError: the model could not be loaded, or Ray died.
    """
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn")):  # of ray[serve]
        raise PreflightError("Ray Serve is not installed", remedy='pip install "raygnn[serve]"')
    if address is not None:
        overrides = [*overrides, f"cluster.address={address}"]
    show = display_of(display, verbose)
    options: dict[str, Any] = {"task": task, "at": at, "trust": trust, "storage": storage}
    with show.stage("run"):
        run = run if isinstance(run, Run) else open_run(run, storage)
        found = Served.find(run, overrides=overrides, **options)
        config = found[0].config
        log = updates_of(run)
        if updates:
            check_updates(found, token_file)
            kept = len(UpdateLog(log).since(0))
    if updates:
        show.note(f"{kept} updates are kept")
    elif any(log.glob("*.json")):
        show.note("the kept updates are ignored without --updates")
    if token_file is not None:
        digest_of(Path(token_file).expanduser())
    with RayCluster(config, verbose=verbose, notify=show.note) as cluster:
        if cluster.local:
            _check_port(host, port)
        with show.stage("Ray"):
            cluster.wait()
        from ray import serve as ray_serve  # reads variables that the start of Ray sets

        from raygnn.serving.application import app

        _check_room(config.cluster.cpus_per_worker, replicas)
        name = config.name
        options |= {"overrides": overrides, "replicas": replicas, "updates": updates}
        if not verbose:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        application = app(run, token_file=token_file, **options)
        with show.stage("Ray Serve"):
            if ray_serve.status().proxies:
                show.note("Ray Serve already runs on this cluster and keeps its host and port")
            ray_serve.start(
                proxy_location="HeadOnly",
                http_options={"host": host, "port": port, "request_timeout_s": _DEADLINE},
            )
        try:
            with show.stage("model"):
                try:
                    ray_serve.run(application, name=name, route_prefix="/")
                except Exception as error:
                    what, trace = "Ray Serve could not deploy the model", str(error)
                    raise TrainingError(what, where=name, trace=trace) from None
            _watch(cluster, show, host, port, token_file is not None)
        finally:
            if not cluster.local:  # the cluster remains, with other applications
                with suppress(Exception):
                    ray_serve.delete(name)


def _watch(cluster: RayCluster, show: Display, host: str, port: int, guarded: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    documented = "" if guarded else ", documented at /docs"
    show.note(f"serving at http://{shown}:{port}{documented}; Ctrl-C ends it")
    if host not in _LOOPBACK and not guarded:
        show.note("anyone who reaches this address can send requests: see --token-file")
    while (death := cluster.death()) is None:
        time.sleep(_POLL)
    raise TrainingError(death, remedy="start the service again")


def _check_port(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        what, remedy = f"the port cannot be opened: {error}", "set others with --host and --port"
        raise InputError(what, where=f"{host}:{port}", remedy=remedy) from None


def _check_room(cpus: int, replicas: int | Literal["auto"]) -> None:
    import ray

    available = ray.cluster_resources().get("CPU", 0)
    if cpus * (1 if replicas == "auto" else replicas) > available:
        what = f"{replicas} replicas of {cpus} CPUs each do not fit on Ray's {available:g} CPUs"
        remedy = "reduce --replicas, or lower cluster.cpus_per_worker"
        raise PreflightError(what, where="--replicas", remedy=remedy)


def explain(
    run: str | Path | Run,
    ids: str | PathLike[str] | Sequence[UserId],
    *,
    out: str | PathLike[str] | None = None,
    k: int = 20,
    fanout: Sequence[int] | None = None,
    at: Any = None,
    task: str | None = None,
    storage: str = "runs",
    trust: bool = False,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
) -> pandas.DataFrame:
    """Explain a run's predictions for nodes, by integrated gradients of their neighbourhoods.

    The highest class probability, or the first of several targets, is explained, in this process,
    one node at a time.

    Args:
        run, at, task, storage, trust, overrides: see `raygnn.serving.app`.
        ids: ids of nodes, or a file of ids as for `raygnn.predict`.
        out: Parquet file to write.
        k: number of contributions of features, of nodes and of edges to return for each node, by
            magnitude.
        fanout: sampled neighbours per layer, from the nodes outward; None = all.
        overwrite: replace the file.

    Returns:
        Columns ``node``, ``prediction``; ``score``, the explained number; ``without``, its value if
        all features of the neighbourhood were 0; ``kind``: feature, node or edge; ``type`` of the
        node or edge; ``feature``, its name; ``source`` and ``target``, ids; ``contribution``.
        The contributions of all features, or of all nodes, add up to ``score`` - ``without``.

    Raises:
        InputError: the run or a node does not exist, its predictions are not for nodes, a node's
            neighbourhood is too large, the file cannot be written, or Captum is missing.
    """
    if not 1 <= k <= LARGEST_TREE:
        raise InputError(f"k is {k}", where="--k", remedy=f"give a number from 1 to {LARGEST_TREE}")
    file = None if out is None else free_file(out, overwrite)
    if isinstance(ids, (str, PathLike)):
        nodes: list[Any] = read_wanted(Path(ids).expanduser(), "node").to_pylist()
    else:
        nodes = [*ids]
    found = Served.find(run, task=task, storage=storage, at=at, trust=trust, overrides=overrides)
    found = [one for one in found if not (one.one.task.of_links or one.one.task.of_graphs)]
    if len(found) != 1:
        what = "the run has several tasks" if found else "only predictions for nodes are explained"
        raise InputError(what, where="explain", remedy="choose a --task that predicts for nodes")
    model = NodeAnswers(ServedModel(found[0]))
    if model.ids.whole:  # a file has ids as text
        nodes = [int(one) if str(one).isdecimal() else one for one in nodes]
    rows: list[dict[str, Any]] = []
    asked = None if fanout is None else tuple(fanout)
    for one in nodes:
        try:
            question = NodeQuestion([one], asked, explain=k)
        except ValidationError as error:
            what, remedy = error.errors()[0]["msg"], "give ids and numbers of neighbours"
            raise InputError(what, where=f"node {one!r}", remedy=remedy) from None
        (answer,) = model.answer([question])
        if isinstance(answer, InputError):
            raise InputError(answer.what, where=f"node {one!r}", remedy=answer.remedy)
        rows += _rows(answer[0])
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in _COLUMNS})
    if file is not None:
        with storage_errors(file, InputError, OTHER), replacing(file) as draft:
            pq.write_table(table, draft)
    frame: pandas.DataFrame = table.to_pandas()
    return frame


def _rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found, shared = answer["explanation"], {"prediction": answer.get("prediction")}
    shared |= {"node": answer["node"], "score": found["score"], "without": found["without"]}
    return [
        {"source": one.get("node"), **one, **shared, "kind": kind}
        for kind in ("feature", "node", "edge")
        for one in found[f"{kind}s"]
    ]


def _column(values: list[Any]) -> pa.Array:
    """Return a column; a mixture of numbers and text as text."""
    texts = any(isinstance(value, str) for value in values)
    return pa.array([str(v) if texts and v is not None else v for v in values])
