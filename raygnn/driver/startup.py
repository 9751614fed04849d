"""Startup of a job: resources reserved for its workers, and the progress of Ray and the ranks up to
the first step."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from raygnn import compat
from raygnn.config.schema import Config
from raygnn.driver.launch import CONTROLLER, WORKER
from raygnn.driver.ray_cluster import RayCluster, patience
from raygnn.errors import PreflightError, TrainingError
from raygnn.preflight.findings import some
from raygnn.runs.diagnose.causes import REMEDIES
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import last_lines
from raygnn.runs.progress_line import clock
from raygnn.worker import ray_nodes
from raygnn.worker.control import Snapshot

_POLL = 1.0  # seconds between polls of Ray
_NOTE_AFTER = 10.0  # seconds of waiting for resources before a note
_NO_ROOM = 15.0  # seconds to wait for resources that an embedded Ray will never have
_PROCESSES = 300.0  # seconds for processes to import Ray and register, on the slowest disk
_LONGEST = 64 * 2**10  # bytes read from the end of a log
_LINES = 40  # lines of it that are shown

Phase: TypeAlias = Literal["controller", "room", "processes", "done"]

_STARTED = re.compile(r"Started worker process with pid (\d+) worker_id=(\w+)")
_CAUSE = re.compile(r"\w*(Error|Exception|Fatal)\b.*|.*: (error|cannot|not found|No such)\b.*")

# phase of a rank before its first step → description
_PHASES = {
    "": "starting",
    "imports": "importing libraries",
    "partition": "waiting for the partition",
    "staging": "staging parts",
    "setup": "setting up",
    "batch": "preparing the first batch",
    "predict": "predicting",
}


class RoomRequest:
    """Reservation of resources for a job's workers (the fewest, if a range) before they start.

    It is a placement group: an autoscaler adds nodes for it, other jobs cannot take what has been
    added, and Ray removes it with this process. A request by
    `ray.autoscaler.sdk.request_resources` would outlive the process, and be replaced by any other
    job's: Ray Data and Ray Train make one every 20 s.
    """

    def __init__(self, config: Config, cluster: RayCluster, show: Display):
        limits = config.cluster.limits
        assert limits is not None  # see `ClusterConfig`
        self.workers = limits[0]
        self._config = config.cluster
        self._cluster = cluster
        self._show = show
        self._group: Any = None

    def wait(self) -> None:
        """Reserve the resources, once, and wait up to ``cluster.wait`` until they are available.
        Raises PreflightError if they are not available by then, or Ray has died."""
        from ray.util import placement_group

        if self._group is not None:
            return
        needs = self._config.worker_needs
        self._group = placement_group([needs] * self.workers, strategy="PACK")
        before = {node["NodeID"] for node in ray_nodes.living()}
        end = time.monotonic() + self._config.wait_seconds
        with self._show.stage(
            f"resources for {some(self.workers, 'worker')}", lines=True
        ) as detail:
            while not self._group.wait(_POLL):
                if (death := self._cluster.death()) is not None:
                    raise PreflightError(death, remedy=REMEDIES["ray_died"])
                nodes = {node["NodeID"] for node in ray_nodes.living()}
                fit = min(ray_nodes.room(needs), self.workers)
                left = end - time.monotonic()
                if left <= 0:
                    raise self._missing(fit, len(nodes))
                there = f"{fit} of {self.workers} fit on {some(len(nodes), 'node')}"
                new = len(nodes - before)
                detail(f"{there}{f' ({new} new)' if new else ''}, {clock(left)} left")

    def give_back(self) -> None:
        """Release the reserved resources, such as for Ray Train."""
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if group is not None and self._cluster.death() is None:
            with suppress(Exception):  # Ray ends, and the reservation with it
                remove_placement_group(group)

    def _missing(self, fit: int, nodes: int) -> PreflightError:
        asked, free = _asked_and_free(self._config.worker_needs)
        return PreflightError(
            f"after {self._config.wait} Ray has resources for {fit} of "
            f"{some(self.workers, 'worker')} with {asked} each: {free} are free on "
            f"{some(nodes, 'node')}",
            where=f"cluster.wait: {self._config.wait}",
            remedy="check the autoscaler on the head node (`ray status`), let it start more nodes "
            "(max_workers or maxReplicas in the cluster's file), raise cluster.wait, or lower "
            "cluster.workers",
        )


class Startup:
    """Monitor of the start of a job's workers.

    Ray waits silently and without limit for nodes that are large enough, and for a worker whose
    process dies repeatedly before it can report why. ``workers``: the requested number; the maximum
    of a range.
    """

    def __init__(self, config: Config, workers: int, cluster: RayCluster, show: Display):
        cluster_config = config.cluster
        self._needs = cluster_config.worker_needs
        limits = cluster_config.limits
        self._workers = limits[0] if cluster_config.elastic and limits else workers
        self._most = workers
        self._timeout = patience(config)
        self._cluster = cluster
        self._show = show
        # Ray's current activity; empty once the workers run
        self.detail = "starting Ray" if cluster.local else f"connecting to {cluster.address}"
        self._phase: Phase | None = None
        self._since = self._next = 0.0
        self._told = False

    def poll(self) -> None:
        """Report what Ray waits for, if that takes long. Raises TrainingError if the resources will
        never be available, or the wait was too long."""
        now = time.monotonic()
        if self._phase == "done" or now < self._next or not self._cluster.ready:
            return
        self._next = now + _POLL
        phase = self._find_phase()
        if phase != self._phase:
            self._phase, self._since = phase, now
        waited = now - self._since
        if phase == "room":
            self._wait_for_room(waited)
        elif phase != "done":
            self._wait_for_processes(waited)

    def _find_phase(self) -> Phase:
        room = self._groups("PENDING", "RESCHEDULING")
        actors = compat.list_actors()
        workers = [a["State"] for a in actors or () if a["ActorClassName"] == WORKER]
        if actors is None and not room and self._groups("CREATED"):
            workers = ["ALIVE"] * self._workers
        alive = workers.count("ALIVE")
        coming = len(workers) - alive - workers.count("DEAD")
        if alive >= self._workers and not coming:
            self.detail = ""
            return "done"
        if alive or coming:
            self.detail = f"starting processes, {alive} of {alive + coming} workers"
            return "processes"
        controllers = [a["State"] for a in actors or () if a["ActorClassName"] == CONTROLLER]
        # our policy waits with a live controller
        room = room or (self._workers < self._most and "ALIVE" in controllers)
        self.detail = (
            f"waiting for resources for {self._workers} workers" if room else "starting Ray Train"
        )
        return "room" if room else "controller"

    def _groups(self, *states: str) -> bool:
        """True if a placement group for as many workers as ours is in one of these states."""
        from ray.util import placement_group_table

        return any(
            group["state"] in states and self._workers <= len(group["bundles"]) <= self._most
            for group in placement_group_table().values()
        )

    def _wait_for_room(self, waited: float) -> None:
        import ray

        if waited < _NOTE_AFTER:
            return
        has, (asked, free) = ray.cluster_resources(), _asked_and_free(self._needs)
        asked = f"resources for {self._workers} workers with {asked} each"
        # on a cluster, nodes may be added and other jobs may end
        never = any(n * self._workers > has.get(name, 0.0) for name, n in self._needs.items())
        limit = _NO_ROOM if never and self._cluster.local else self._timeout
        if waited >= limit:
            raise TrainingError(
                f"Ray has no {asked}: {free} are free, after {waited:.0f} s",
                remedy="lower cluster.workers or the resources of each worker, add nodes, or start "
                "when other jobs have ended",
            )
        if not self._told:
            self._show.note(f"waiting up to {limit:.0f} s for {asked}: {free} are free")
            self._told = True

    def _wait_for_processes(self, waited: float) -> None:
        logs = self._cluster.logs
        died = _stillborn(logs) if logs else 0
        if waited < _PROCESSES and died < self._workers:
            return
        lines = _last_lines(logs / "raylet.err") if logs else []
        lines = [line.strip() for line in lines if line.strip()]
        causes = [line for line in lines if _CAUSE.match(line)]
        reason = (causes or lines or ["Ray's logs give no reason"])[-1]
        what = "the workers' processes die as soon as they start"
        if died < self._workers:
            what = f"the workers' processes have not started within {waited:.0f} s"
        if not logs:
            reason = "Ray's logs on their nodes have the reason"
        raise TrainingError(
            f"{what}: {reason}",
            remedy="check comm.env, and read raylet.err and raylet.out in "
            f"{'/tmp/ray/session_latest/logs' if not logs else 'the logs of Ray (-v)'}",
            trace="\n".join(lines[-_LINES:]) or None,
        )


def _asked_and_free(needs: Mapping[str, float]) -> tuple[str, str]:
    import ray

    has, free = ray.cluster_resources(), ray.available_resources()
    asked = " and ".join(f"{n:g} {name}s" for name, n in needs.items())
    totals = [f"{free.get(name, 0.0):g} of {has.get(name, 0.0):g} {name}s" for name in needs]
    return asked, " and ".join(totals)


def _stillborn(logs: Path) -> int:
    """Count the worker processes that ended before they opened their logs."""
    started = _STARTED.findall("\n".join(_last_lines(logs / "raylet.out")))
    return sum(
        not any(logs.glob(f"worker-{worker}-*")) and not _runs(pid) for pid, worker in started
    )


def _runs(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _last_lines(path: Path) -> list[str]:
    return [line.decode(errors="replace") for line in last_lines(path, _LONGEST)]


def startup_progress(snapshot: Snapshot) -> str:
    """Return the earliest phase of any rank and how many ranks are in it, such as ``staging parts,
    1 of 2 workers``; empty without ranks."""
    phases = [progress.phase for progress in snapshot.progress.values()]
    if not phases:
        return ""
    order = list(_PHASES)
    counts = Counter(phase if phase in _PHASES else "batch" for phase in phases)
    first = min(counts, key=order.index)
    return f"{_PHASES[first]}, {counts[first]} of {len(phases)} workers"
