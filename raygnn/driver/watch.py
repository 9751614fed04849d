"""Watching a job: its progress for the user, its records for loggers, its ranks' health."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from raygnn import compat
from raygnn.checkpoint import store
from raygnn.config.schema import Config
from raygnn.driver.health import Heartbeat, Preemption
from raygnn.driver.job_plan import Plan
from raygnn.driver.launch import CONTROLLER, Launch
from raygnn.driver.loggers import Loggers
from raygnn.driver.prometheus import Prometheus
from raygnn.driver.ray_cluster import RayCluster, patience
from raygnn.errors import TrainingError
from raygnn.preflight.findings import some
from raygnn.runs import interrupts
from raygnn.runs.diagnose.causes import FROZEN
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import MetricsTail, Record
from raygnn.runs.report.page import write_report
from raygnn.runs.run_directory import EVENTS, LOGGERS, LOGS, SCALING, TOLD, Events, RunDir
from raygnn.worker import failures
from raygnn.worker.control import SaveRequest, Snapshot

SAVE = ".save"  # in the run directory: a user, or a batch system, wants a checkpoint

_POLL = 0.2  # seconds between looks at the records
_APART = 5.0  # seconds between looks at the storage
_LITTLE = 4096  # bytes
_SAVES = 1.0  # seconds between looks for requests of others
_FORWARD = 2.0  # seconds between looks at the ranks for Prometheus, which asks less often

# of Ray, while its workers come
_LOOK = 1.0  # seconds between looks at Ray
_TELL = 10.0  # seconds of waiting for room until the user is told
_NO_ROOM = 15.0  # seconds to wait for what a Ray of our own will never have
_PROCESSES = 300.0  # seconds for processes to import Ray and register, on the slowest disk
_LONGEST = 64 * 2**10  # bytes of a log's end
_LINES = 40  # of it that are shown
# Ray Train's actors of the ranks
_WORKER = "RayTrainWorker"

Phase: TypeAlias = Literal["controller", "room", "processes", "done"]

_STARTED = re.compile(r"Started worker process with pid (\d+) worker_id=(\w+)")
_CAUSE = re.compile(r"\w*(Error|Exception|Fatal)\b.*|.*: (error|cannot|not found|No such)\b.*")

# phase of a rank before its first step → how it is told
_PHASES = {
    "": "starting",
    "imports": "importing libraries",
    "partition": "waiting for the partition",
    "staging": "staging parts",
    "setup": "setting up",
    "batch": "preparing the first batch",
    "predict": "predicting",
}


class Watched(Protocol):
    """What a watch needs of the job's session."""

    @property
    def config(self) -> Config: ...
    @property
    def run(self) -> RunDir: ...
    @property
    def show(self) -> Display: ...
    @property
    def plan(self) -> Plan: ...


class Watch:
    """What is looked at for any job while it runs; `look` is to be called often."""

    def __init__(self, job: Watched, launch: Launch):
        self._launch = launch
        heartbeat = job.config.fault.heartbeat.seconds
        self._heartbeat = Heartbeat(job.run.path, heartbeat, job.show, launch)
        self._startup = Startup(job.config, job.plan.workers, launch.cluster, job.show)
        self._notices = [MetricsTail(job.run.path / LOGS / n) for n in (EVENTS, SCALING, LOGGERS)]
        self._show = job.show

    def start_up(self, detail: Callable[[str], object], arrived: Callable[[], bool]) -> None:
        """Wait until what is waited for has arrived, or the job has ended without.

        Args:
            detail: takes what Ray, or the ranks, do meanwhile.

        Raises:
            TrainingError: the workers do not start.
        """
        while self._launch.running() and not arrived():
            self._startup.look()
            if text := startup_progress(self._launch.snapshot) or self._startup.detail:
                detail(text)
            self.look()
            interrupts.sleep(_POLL)

    def look(self) -> None:
        """See to frozen ranks, and show what ranks and Ray Train's controller leave word of."""
        self._heartbeat.look()
        self.show_notices()

    def show_notices(self) -> None:
        for notice in (notice for tail in self._notices for notice in tail.poll()):
            self._show.note(str(notice.get("text")))


class Startup:
    """Looks at how far Ray has come with a job's workers, until they are all there.

    Ray waits in silence for ever: for room on nodes that are too small, and for a worker whose
    process dies before it can say why, again and again.

    Args:
        workers: that were asked for; where it may be fewer, the most.

    Attributes:
        detail: what Ray does now; empty when the workers are there.
    """

    def __init__(self, config: Config, workers: int, cluster: RayCluster, show: Display):
        cluster_config = config.cluster
        needs = {"CPU": cluster_config.cpus_per_worker, "GPU": cluster_config.gpus_per_worker}
        self._needs: dict[str, float] = {name: n for name, n in needs.items() if n}
        limits = cluster_config.limits
        self._workers = limits[0] if cluster_config.elastic and limits else workers
        self._most = workers
        self._timeout = patience(config)
        self._cluster = cluster
        self._show = show
        self.detail = "starting Ray" if cluster.local else f"connecting to {cluster.address}"
        self._phase: Phase | None = None
        self._since = self._next = 0.0
        self._told = False

    def look(self) -> None:
        """Say what Ray waits for, if that takes long.

        Raises:
            TrainingError: it waits for what will not come, or has waited long enough.
        """
        now = time.monotonic()
        if self._phase == "done" or now < self._next or not self._cluster.ready:
            return
        self._next = now + _LOOK
        phase = self._find_phase()
        if phase != self._phase:
            self._phase, self._since = phase, now
        waited = now - self._since
        if phase == "room":
            self._wait_for_room(waited)
        elif phase != "done":
            self._wait_for_processes(waited)

    def _find_phase(self) -> Phase:
        import ray

        actors = compat.actors_of(ray.get_runtime_context().get_job_id())
        workers = [a["State"] for a in actors if a["ActorClassName"] == _WORKER]
        alive = workers.count("ALIVE")
        coming = len(workers) - alive - workers.count("DEAD")
        if alive >= self._workers and not coming:
            self.detail = ""
            return "done"
        if alive or coming:
            self.detail = f"starting processes, {alive} of {alive + coming} workers"
            return "processes"
        controllers = [a["State"] for a in actors if a["ActorClassName"] == CONTROLLER]
        waits = self._workers < self._most or self._pending()  # our policy asks for what there is
        room = "ALIVE" in controllers and waits
        self.detail = (
            f"waiting for room for {self._workers} workers" if room else "starting Ray Train"
        )
        return "room" if room else "controller"

    def _pending(self) -> bool:
        """Whether Ray has not yet found room for workers like ours."""
        from ray.util import placement_group_table

        return any(
            group["state"] in ("PENDING", "RESCHEDULING") and len(group["bundles"]) == self._workers
            for group in placement_group_table().values()
        )

    def _wait_for_room(self, waited: float) -> None:
        import ray

        if waited < _TELL:
            return
        has, free = ray.cluster_resources(), ray.available_resources()
        asked = " and ".join(f"{n:g} {name}s" for name, n in self._needs.items())
        asked = f"room for {self._workers} workers with {asked} each"
        there = " and ".join(
            f"{free.get(name, 0.0):g} of {has.get(name, 0.0):g} {name}s" for name in self._needs
        )
        # where Ray is not ours, nodes may come and other jobs end
        never = any(n * self._workers > has.get(name, 0.0) for name, n in self._needs.items())
        limit = _NO_ROOM if never and self._cluster.local else self._timeout
        if waited >= limit:
            raise TrainingError(
                f"Ray has no {asked}: {there} are free, after {waited:.0f} s",
                remedy="lower cluster.workers or what each of them asks for, add nodes, or start "
                "when other jobs have ended",
            )
        if not self._told:
            self._show.note(f"waiting up to {limit:.0f} s for {asked}: {there} are free")
            self._told = True

    def _wait_for_processes(self, waited: float) -> None:
        logs = self._cluster.logs
        died = _stillborn(logs) if logs else 0
        if waited < _PROCESSES and died < self._workers:
            return
        said = _end_of(logs / "raylet.err") if logs else ""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        causes = [line for line in lines if _CAUSE.match(line)]
        reason = (causes or lines or ["Ray's logs give no reason"])[-1]
        what = "the workers' processes die as soon as they start"
        if died < self._workers:
            what = f"the workers' processes have not started within {waited:.0f} s"
        if not logs:
            reason = "the reason is in the logs of Ray on their nodes"
        raise TrainingError(
            f"{what}: {reason}",
            remedy="look at comm.env, and at raylet.err and raylet.out in "
            f"{'/tmp/ray/session_latest/logs' if not logs else 'the logs of Ray (-v)'}",
            trace="\n".join(lines[-_LINES:]) or None,
        )


def _stillborn(logs: Path) -> int:
    """How many processes of workers ended before they had a log of their own."""
    count = 0
    for pid, worker in _STARTED.findall(_end_of(logs / "raylet.out")):
        has_log = any(logs.glob(f"worker-{worker}-*"))
        count += not has_log and not _runs(pid)
    return count


def _runs(pid: str) -> bool:
    try:
        stat = Path("/proc", pid, "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _end_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def startup_progress(snapshot: Snapshot) -> str:
    """``staging parts, 1 of 2 workers``: what those do that are least far, and how many do it;
    empty where there are none."""
    phases = [progress.place.phase for progress in snapshot.progress.values()]
    if not phases:
        return ""
    order = list(_PHASES)
    counts = Counter(phase if phase in _PHASES else "batch" for phase in phases)
    first = min(counts, key=order.index)
    return f"{_PHASES[first]}, {counts[first]} of {len(phases)} workers"


def watch_training(job: Watched, launch: Launch, loggers: Loggers, tail: MetricsTail) -> None:
    """Show the records of a training until it is over.

    Args:
        tail: reads those that are new.

    Raises:
        TrainingError: the workers do not start, or the run directory is gone.
    """
    config, run, show = job.config, job.run, job.show
    watch = Watch(job, launch)
    forwarding = Forwarding(config, run, launch, loggers)
    records: list[Record] = []

    def arrived() -> bool:
        records.extend(tail.poll())
        return bool(records)

    with show.stage("Ray and workers") as detail:
        watch.start_up(detail, arrived)
    launch.began = bool(records)
    train = config.train
    steps = job.plan.steps_per_epoch(config) or launch.snapshot.steps_per_epoch or 1
    total = train.epochs * steps
    with suppress(TrainingError):  # for who looks at the run meanwhile
        total_steps = min(total, train.max_steps or total)
        run.update_summary(total_steps=total_steps, metric=config.metric)
    told, starts = 0.0, max(1, launch.starts)
    storage = _Storage(run, show, config.fault.storage_timeout.seconds)
    preemption = Preemption(launch.cluster, show, launch)
    saves = SaveFile(run, launch)
    with show.progress(train.epochs, steps, max_steps=train.max_steps) as progress:
        while True:
            running = launch.running()
            records += tail.poll()  # also the last ones, written before it ended
            for record in records:
                progress.update(record)
            forwarding.forward(records)
            saves.look()
            if not running:
                break
            watch.look()
            told = _tell_failures(show, run, told)
            storage.look()
            preemption.look()
            if launch.starts > starts:
                starts = launch.starts
                _tell_start(show, run, launch.snapshot, config)
            interrupts.sleep(_POLL)
            records.clear()
    watch.show_notices()
    run.check()


class SaveFile:
    """Whoever makes the file ``.save`` in the run directory gets a checkpoint; the file goes when
    that is written, or cannot be."""

    def __init__(self, run: RunDir, launch: Launch):
        self._file = run.path / SAVE
        self._launch = launch
        self._request: SaveRequest | None = None
        self._next = 0.0

    def look(self) -> None:
        if self._request is not None:
            if self._request.answer(self._launch.snapshot) is not None:
                self._request.withdraw()
                self._request = None
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAVES
            with suppress(OSError):
                if self._file.exists() and self._launch.running():
                    self._request = self._launch.ask_save()


class _Storage:
    """Says that nothing can be written, which ranks can write nowhere, and sees that the run
    directory is still the run's.

    Args:
        patience: seconds for which it may be gone, as where a mount is made anew.
    """

    def __init__(self, run: RunDir, show: Display, patience: float):
        self._run = run
        self._file = run.path / ".room"
        self._show = show
        self._patience = patience
        self._last_seen = time.monotonic()
        self._next = 0.0
        self._told = False

    def look(self) -> None:
        """To be called often.

        Raises:
            TrainingError: the run directory was replaced, or removed and not put back.
        """
        lost, now = self._run.lost, time.monotonic()
        if lost is None:
            self._last_seen = now
        elif lost == "replaced" or now - self._last_seen >= self._patience:
            self._run.check()
        if now < self._next:
            return
        self._next = time.monotonic() + _APART
        try:
            self._file.write_bytes(bytes(_LITTLE))
            self._file.unlink()
        except OSError as error:
            if not self._told:
                meanwhile = "training goes on, records wait, and checkpoints are left out"
                if lost is not None:
                    meanwhile = f"unless it is back in {self._patience:g} s, the run ends"
                self._show.note(
                    f"{self._file.parent} cannot be written ({error.strerror}): {meanwhile}"
                )
            self._told = True
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            return
        if self._told:
            self._show.note(f"{self._file.parent} can be written again")
        self._told = False


def _tell_failures(show: Display, run: RunDir, since: float) -> float:
    """Say what a rank died of while it happens; returns the time up to which that is told."""
    news = [f for f in failures.recorded(run.path) if f.time > since and not f.is_consequence]
    news = [f for f in news if f.kind != FROZEN]  # which was told when it was found
    if not news:
        return since
    show.note(f"rank {news[0].rank} failed: {news[0].what}")
    return max(failure.time for failure in news)


def _tell_start(show: Display, run: RunDir, snapshot: Snapshot, config: Config) -> None:
    if any(failure.final for failure in failures.recorded(run.path)):
        return  # its ranks will see that, and go
    newest = store.newest(run.checkpoints) or "the beginning"
    told = f"start {snapshot.starts} of at most {config.fault.max_failures + 1}"
    if config.cluster.elastic:  # more workers are a start, but no failure
        told = f"start {snapshot.starts}, with {some(len(snapshot.workers), 'worker')}"
    show.note(f"{told}, from {newest} if that is whole")


class Forwarding:
    """Hands on what a run records: to loggers and to Prometheus."""

    def __init__(self, config: Config, run: RunDir, launch: Launch, loggers: Loggers):
        self._launch = launch
        self._looked = -math.inf
        self._loggers = loggers
        self._prometheus = Prometheus(run, config.name) if config.logging.prometheus else None

    def forward(self, records: Iterable[Record]) -> None:
        """New records of ``metrics.jsonl``, and from time to time those of the ranks."""
        for record in records:
            self._loggers.start(int(record["step"]))
            if self._prometheus is not None:
                self._prometheus.take(record)
        self._loggers.look()
        now = time.monotonic()
        if self._prometheus is not None and now - self._looked >= _FORWARD:
            self._looked = now
            self._prometheus.look(self._launch.starts)


def record_notes(run: RunDir, show: Display) -> None:
    """Keep what is told from now on, for the run's report; commands that go on with it add more."""
    told = Events(run.path / LOGS / TOLD)
    told.tell(f"a command of process {os.getpid()} on {socket.gethostname()} began")
    show.on_note = told.tell


@contextmanager
def reported(run: RunDir, show: Display) -> Iterator[None]:
    """Whatever becomes of what is inside, leave a report, if a run began."""
    try:
        yield
    finally:
        show.on_note = None
        if run.begun and run.lost is None:
            with suppress(Exception):  # it can be written again, and must hide nothing
                write_report(run.path)
