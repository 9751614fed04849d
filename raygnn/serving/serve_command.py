"""``raygnn serve``: serves a run on Ray Serve until Ctrl-C."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raygnn.driver.job_plan import display_of
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import InputError, PreflightError, TrainingError
from raygnn.runs.display import Display
from raygnn.runs.run import Run, open_run
from raygnn.serving.served_run import Served, check_updates, digest_of
from raygnn.serving.updates import UpdateLog, updates_of

if TYPE_CHECKING:
    from os import PathLike

_DEADLINE = 60.0  # seconds for a request
_POLL = 1.0  # seconds between checks of Ray
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        InputError: there is no such run, it cannot have updates, or the port is in use.
        DataError: the kept updates cannot be read.
        PreflightError: the packages of Ray Serve are missing, or Ray does not start.
        TrainingError: the model could not be loaded, or Ray died.
    """
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
    with RayCluster(config, verbose=verbose, tell=show.note) as cluster:
        if cluster.local:
            _check_port(host, port)
        with show.stage("Ray"):
            cluster.wait()
        try:
            from ray import serve as ray_serve  # reads variables that the start of Ray sets

            from raygnn.serving.application import app
        except ImportError as error:
            what = f"Ray Serve is not installed: {error}"
            raise PreflightError(what, remedy='pip install "raygnn[serve]"') from None
        _check_room(config.cluster.cpus_per_worker, replicas)
        name = config.name
        options |= {"overrides": overrides, "replicas": replicas, "updates": updates}
        if not verbose:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with show.stage("model"):
            if ray_serve.status().proxies:
                show.note("Ray Serve already runs on this cluster and keeps its host and port")
            ray_serve.start(
                proxy_location="HeadOnly",
                http_options={"host": host, "port": port, "request_timeout_s": _DEADLINE},
            )
            try:
                ray_serve.run(
                    app(run, token_file=token_file, **options), name=name, route_prefix="/"
                )
            except Exception as error:
                what, trace = "Ray Serve could not deploy the model", str(error)
                raise TrainingError(what, where=name, trace=trace) from None
        try:
            _watch(cluster, show, host, port, token_file is not None)
        finally:
            if not cluster.local:  # which continues, and may have other applications
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
