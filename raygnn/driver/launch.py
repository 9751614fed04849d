"""Launch of a job on Ray Train, and the explanation of its failure."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raygnn import compat
from raygnn.config.comm_plan import CommPlan
from raygnn.driver.ray_cluster import RayCluster, patience
from raygnn.errors import LONGEST_TRACE, RaygnnError, TrainingError, plain_text
from raygnn.runs.diagnose.causes import REMEDIES, MemoryKill
from raygnn.worker import blackbox, ray_nodes
from raygnn.worker import failures as faults
from raygnn.worker.blackbox import oom_kills
from raygnn.worker.control import ControlHandle, Snapshot, read_result
from raygnn.worker.job import Job, attempts
from raygnn.worker.main import train_loop
from raygnn.worker.node_files import FileServer, collect

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_LONGEST_STOP = 60.0  # seconds for the ranks to stop on a cluster
_OWN_STOP = 3.0  # seconds to stop on an embedded Ray
_POLL = 0.05  # seconds

# class names of Ray Train's actors
CONTROLLER, WORKER = "TrainController", "RayTrainWorker"

_CONTROLLER = "Ray Train's controller, the process that starts and watches the ranks, died"
_CONTROL = "the process through which the ranks are controlled, raygnn's Control actor, died"

# These have glibc keep freed memory for the next step, which needs the same large tensors again. By
# default it returns such blocks to the system, and the page faults of the next step cost more than
# the arithmetic on a CPU. glibc reads the variables when a process starts.
ALLOCATOR = {
    # glibc takes no threshold above 32 MiB on 64-bit systems
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(32 << 20),
    # arenas of further threads consist of small heaps, which are returned with their blocks
    "MALLOC_ARENA_MAX": "1",
}

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# phrase in the text of a cause → remedy
_REMEDIES = {
    "Unable to find address for": "set GLOO_SOCKET_IFNAME to an interface that is up and has an "
    "address on every node",
    "worker group startup timed out": "check what else runs on the cluster, lower cluster.workers, "
    "or raise comm.timeout",
}


class Launch:
    """Running job: Ray Train in a background thread. ``cluster``: the ranks' Ray, which need not be
    ready yet."""

    def __init__(self, job: Job, workers: int, comm: CommPlan, cluster: RayCluster):
        self._job = job
        self._workers = workers
        self._comm = comm
        self.cluster = cluster
        self._error: BaseException | None = None
        self._oom_kills = oom_kills()
        self._control: ControlHandle | None = None
        self.snapshot = Snapshot()  # state of the ranks at the last call of `running`
        # True once a record of a step exists, possibly before the rank reports the step
        self.began = False
        self._thread = threading.Thread(target=self._run, name="raygnn-fit", daemon=True)
        self._ended = threading.Event()  # as in `RayCluster`
        self._stopped = threading.Event()
        cluster.start()
        cluster.host(self._thread)

    def stop(self) -> None:
        """Stop the job; the ranks write crash dumps and exit."""
        self._stopped.set()
        if self._control is not None and self.cluster.death() is None:
            self._control.stop()
        # an embedded Ray ends with this process, so there is no need to wait for it
        wait = _OWN_STOP if self.cluster.local else _LONGEST_STOP
        self._ended.wait(wait if self.cluster.ready else 0.0)
        self._end_fit()

    def _controls(self) -> bool:
        """Return True if Ray Train's controller runs in this process: on an embedded Ray, and in an
        actor, with which Ray ends all that it started."""
        import ray

        return self.cluster.local or ray.get_runtime_context().get_actor_id() is not None

    def _end_fit(self) -> None:
        """Kill Ray Train's controller, or the ranks if it is in this process: a Ray that ends under
        the thread that waits for them would end this process, too."""
        deadline = time.monotonic() + _OWN_STOP
        while not self._ended.is_set() and time.monotonic() < deadline:
            if not self.cluster.ready or self.cluster.death() is not None:
                return
            with contextlib.suppress(Exception):  # Ray ends, and the controller with it
                compat.kill_actors(WORKER if self._controls() else CONTROLLER)
            self._ended.wait(_OWN_STOP / 4)

    @property
    def trains(self) -> bool:
        """True while the ranks are between their first and last step."""
        running, first = self.running(), self.snapshot.progress.get(0)
        began = self.began or (first is not None and first.step is not None)
        ends = first is not None and first.phase in (blackbox.TEST, blackbox.DONE)
        return running and began and not ends

    @property
    def control(self) -> ControlHandle:
        """State of the started ranks."""
        assert self._control is not None
        return self._control

    def save(self) -> None:
        """Request a last checkpoint, and wait for it up to ``fault.save_timeout``."""
        deadline = time.monotonic() + self._job.config.fault.save_timeout.seconds
        request = self.control.ask_save(last=True)
        while self.running() and time.monotonic() < deadline:
            saved = self.snapshot.saved_last or request in self.snapshot.answers
            if saved and not self.snapshot.sending:
                break
            time.sleep(_POLL)

    def running(self) -> bool:
        """Fetch a snapshot, and return True while the job runs."""
        if self._ended.is_set() or self.cluster.death() is not None:
            return False
        if self._control is not None and not self._stopped.is_set():
            try:
                self.snapshot = self._control.newest()
            except Exception as error:
                # if Ray itself is about to be found dead, that is the error
                if self._error is None and self.cluster.answers():
                    self._error = self._ray_died(_CONTROL, error)
                return self._error is None
        return True

    def result(self) -> dict[str, Any]:
        """Wait for the end, and return rank 0's result for the summary. Raises PreflightError if
        Ray did not start, else TrainingError with the first cause, as far as a rank could record
        it."""
        while self.running():
            self._ended.wait(_POLL)
        self._stopped.set()  # a thread that still runs must not call Ray any more
        self._end_fit()
        failed = not self._ended.is_set() or self._error is not None
        if failed and (death := self.cluster.death()) is not None:
            raise self._ray_died(death, None)
        if isinstance(self._error, RaygnnError):
            raise self._error
        failures = faults.recorded(self._job.run_dir)
        result = None
        if self._error is None:
            with contextlib.suppress(Exception):  # the actor is gone
                if self._control is not None:
                    self.snapshot = self._control.snapshot()
            result = read_result(self.snapshot)
        # without an error and a result, the ranks found a recorded failure: see train_loop
        if result is None:
            gone: list[ray_nodes.Lost] = []
            with contextlib.suppress(Exception):  # it must not hide the error
                gone += [] if self.cluster.local else ray_nodes.lost(self.snapshot.workers)
            error = explain(self._error, failures, gone)
            direct = error.final or isinstance(_root(self._error), TrainingError)
            error.direct = direct or (bool(failures) and not failures[0].is_consequence)
            killed = oom_kills() - self._oom_kills
            faults.record_driver(self._job.run_dir, error, self._error, killed, gone)
            raise error from self._error
        blackbox.tidy(self._job.run_dir / "logs")
        return result

    def _ray_died(self, what: str, cause: BaseException | None) -> TrainingError:
        trace = None if cause is None else plain(cause)
        killed = None if trace is None else _kill(trace)
        error = killed or TrainingError(what, remedy=REMEDIES["ray_died"], trace=trace)
        faults.record_driver(self._job.run_dir, error, cause, 0, ray_died=killed is None)
        return error

    def _run(self) -> None:
        try:
            import ray

            self.cluster.wait()
            if self._stopped.is_set():
                return
            control = ControlHandle.create(
                attempts(self._job.run_dir), FileServer(self._job.run_dir)
            )
            lists = ray.put(self._job.lists) if self._job.lists else {}
            self._job = replace(self._job, control=control, lists=lists)
            self._control = control
            try:
                self._fit(control)
            finally:
                if self._job.config.store is not None and not self.cluster.local:
                    ray_nodes.on_each(
                        {worker.node for worker in control.snapshot().workers}, collect, self._job
                    )
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._ended.set()

    def _fit(self, control: ControlHandle) -> None:
        """Run Ray Train; on a cluster the death of its controller counts as a rank's failure."""
        from ray.exceptions import ActorDiedError

        failures = self._job.config.fault.max_failures
        while not self._stopped.is_set():
            try:
                self._trainer(control, failures).fit()
                return
            except ActorDiedError as error:
                if self._controls() or self._stopped.is_set() or self.cluster.death() is not None:
                    raise
                starts = control.snapshot().starts
                failures = min(failures - 1, self._job.config.fault.max_failures - starts)
                if failures < 0:
                    raise self._ray_died(_CONTROLLER, error) from error

    def _trainer(self, control: ControlHandle, failures: int) -> TorchTrainer:
        """Build the job's TorchTrainer with this number of restarts; nothing starts yet."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from raygnn.worker.comm.backend import CommBackendConfig

        job, comm, workers, inside = self._job, self._comm, self._workers, self._controls()
        cluster = job.config.cluster
        known = {field.name for field in fields(FailureConfig)}
        plain_names = {n: os.environ[n] for n in (compat.PLAIN,) if n in os.environ}
        fewest = cluster.limits[0] if cluster.elastic and cluster.limits else workers
        ours = compat.scales_itself()
        scaling_config = ScalingConfig(
            num_workers=workers if ours or fewest == workers else (fewest, workers),
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker=cluster.worker_needs,
        )
        trainer_class = TorchTrainer
        if ours:
            from raygnn.driver.scaling import Failures, Scaling

            policy = Scaling(scaling_config, fewest, job.run_dir, control, patience(job.config))
            trainer_class = compat.lean_trainer(
                policy,
                partial(Failures, stopped=self._stopped.is_set if inside else None),
                local=self.cluster.local,
                inside=inside,
                stopped=self._stopped.is_set,
                died=lambda: self.cluster.death() is not None,
            )
        return trainer_class(
            train_loop,
            train_loop_config=job,
            torch_config=CommBackendConfig(
                backend=comm.backend,
                timeout_s=comm.timeout,
                plan=comm,
                logs=job.run_dir / "logs",
                control=control,
            ),
            scaling_config=scaling_config,
            run_config=RunConfig(
                # checkpoints are in the run directory; Ray's bookkeeping needs a name that it has
                # never seen, since it would resume a run of that name
                name=f"start-{time.time_ns()}",
                storage_path=str(job.run_dir / ".ray"),
                failure_config=FailureConfig(
                    max_failures=failures,
                    # with [min, max] a node may be lost while the ranks start
                    controller_failure_limit=failures if cluster.elastic else 0,
                    # newer versions restart without limit by default
                    **dict.fromkeys(known & {"max_preemption_failures"}, failures),
                ),
                # variables that are equal on all nodes; the backend sets the others
                worker_runtime_env={"env_vars": {**ALLOCATOR, **plain_names, **comm.everywhere()}},
            ),
        )


def _kill(text: str) -> TrainingError | None:
    if (kill := MemoryKill.from_text(text)) is None:
        return None
    what = f"{kill.process or 'a process'} was killed by Ray for memory: {kill.why}"
    return TrainingError(what, where=kill.host, remedy=REMEDIES["memory"], trace=text)


def explain(
    error: BaseException | None, failures: list[faults.Failure], lost: Sequence[ray_nodes.Lost] = ()
) -> TrainingError:
    """Return the error to report: a rank's recorded failure, else Ray Train's error. ``lost``:
    ranks whose nodes are gone."""
    root = _root(error)
    if isinstance(root, TrainingError):  # raised by our policies in Ray Train's controller
        return root
    if failures and not failures[0].is_consequence:
        # the rank may have called a process that was killed
        return _kill(failures[0].trace) or failures[0].as_error()
    if lost:
        return TrainingError(
            str(lost[0]), where=lost[0].host, remedy=REMEDIES["node_lost"], rank=lost[0].rank
        )
    # ranks without a record were killed, and caused the other ranks' failures
    known = {failure.rank for failure in failures}
    dead = [(r, e) for r, e in getattr(error, "worker_failures", {}).items() if r not in known]
    if dead:
        rank, cause = min(dead, key=lambda one: not getattr(one[1], "final", False))
        if isinstance(cause, TrainingError):  # a full disk prevented its record
            return cause
        what = f"a worker died: {_cause_line(text := plain(cause))}"
        found = _kill(text) or TrainingError(what, remedy=REMEDIES["died"], trace=text)
        found.where, found.rank = f"rank {rank}", rank
        return found
    if failures:
        return failures[0].as_error()
    text = plain(root)
    message = f"Ray Train failed: {type(root).__name__}: {_cause_line(text)}"
    remedies = (remedy for phrase, remedy in _REMEDIES.items() if phrase in text)
    remedy = next(remedies, "run again with -v to see Ray's messages")
    return _kill(text) or TrainingError(message, remedy=remedy, trace=plain(error))


def plain(error: BaseException | None) -> str:
    """Return the text of Ray's error without terminal escapes."""
    text = plain_text(str(error), LONGEST_TRACE)
    return _ESCAPES.sub("", text).strip() or type(error).__name__


def _root(error: BaseException | None) -> BaseException | None:
    for _ in range(10):
        inner = getattr(error, "controller_failure", None) or getattr(error, "cause", None)
        inner = inner or getattr(error, "__cause__", None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _cause_line(text: str) -> str:
    """Return the line with the cause: the first, or a traceback's last unindented line."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not any(line.startswith(("Traceback", "ray::")) for line in lines):
        return lines[0]
    flush = [line for line in lines if not line[0].isspace()]
    return flush[-1] if flush else lines[-1].strip()
