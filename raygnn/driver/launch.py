"""Starting Ray Train on a job, and saying why it failed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
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
from raygnn.worker.blackbox.recorder import oom_kills
from raygnn.worker.control import ControlHandle, SaveRequest, Snapshot, read_result
from raygnn.worker.job import Job, attempts
from raygnn.worker.main import train_loop
from raygnn.worker.node_files import FileServer, collect

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_LONGEST_STOP = 60.0  # seconds
_OWN_STOP = 3.0  # seconds
_POLL = 0.05  # seconds

# classes of Ray Train's actors: what starts and watches the ranks, and a rank
CONTROLLER, WORKER = "TrainController", "RayTrainWorker"

_CONTROLLER = "Ray Train's controller, the process that starts and watches the ranks, died"
_CONTROL = "the process through which the ranks are controlled, raygnn's Control actor, died"

# Memory that is freed is kept for the next step, which asks for the same large tensors again: by
# default glibc gives such blocks back to the system, and every step pays for them with page faults,
# which on a CPU cost more than the arithmetic.
# Read by glibc when a process starts: later is too late, since threads keep their arenas
ALLOCATOR = {
    # glibc takes no threshold above 32 MiB on 64-bit systems
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(32 << 20),
    # other threads' arenas are of small pieces, which come and go with the blocks in them
    "MALLOC_ARENA_MAX": "1",
}

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# what the text of a cause says of how to mend it
_REMEDIES = (
    (
        "Unable to find address for",
        "let GLOO_SOCKET_IFNAME name an interface that is up and has an address on every node",
    ),
    (
        "worker group startup timed out",
        "see what else runs on the cluster, lower cluster.workers, or raise comm.timeout",
    ),
)


class Launch:
    """A job under way: Ray Train in a thread of its own, so that the caller's can do other things.

    Args:
        cluster: it need not be ready yet.

    Attributes:
        cluster: the Ray that the ranks run on.
        snapshot: what the ranks have said, as of the last call of `running`.
        began: whether a record of a step was seen, which may come before a rank's word of it.
    """

    def __init__(self, job: Job, workers: int, comm: CommPlan, cluster: RayCluster):
        self._job = job
        self._workers = workers
        self._comm = comm
        self.cluster = cluster
        self._error: BaseException | None = None
        self._oom_kills = oom_kills()
        self._control: ControlHandle | None = None
        self.snapshot = Snapshot()
        self.began = False
        self._thread = threading.Thread(target=self._run, name="raygnn-fit", daemon=True)
        self._ended = threading.Event()  # see that of `RayCluster`
        self._stopped = False
        cluster.start()
        cluster.host(self._thread)

    def stop(self) -> None:
        """End the job: ranks leave behind what they were doing, and go."""
        self._stopped = True
        if self._control is not None and self.cluster.death() is None:
            self._control.stop()
        # where Ray goes with us, too, nobody has to wait for its last word
        wait = _OWN_STOP if self.cluster.local else _LONGEST_STOP
        self._ended.wait(wait if self.cluster.ready else 0.0)
        self._end_fit()

    def _end_fit(self) -> None:
        """Kill Ray Train's controller, where it has not ended, or the ranks, where it is in this
        process: Ray's end under the thread that waits for them would be ours, too."""
        deadline = time.monotonic() + _OWN_STOP
        while not self._ended.is_set() and time.monotonic() < deadline:
            if not self.cluster.ready or self.cluster.death() is not None:
                return
            with contextlib.suppress(Exception):  # Ray is going, and the controller with it
                compat.kill_actors(WORKER if self.cluster.local else CONTROLLER)
            self._ended.wait(_OWN_STOP / 4)

    @property
    def trains(self) -> bool:
        """Whether the ranks are between their first step and their last."""
        running, first = self.running(), self.snapshot.progress.get(0)
        began = self.began or (first is not None and first.step is not None)
        ends = first is not None and first.phase in (blackbox.TEST, blackbox.DONE)
        return running and began and not ends

    def ask_save(self, *, last: bool = False) -> SaveRequest:
        """Ask the ranks for a checkpoint, ``last`` if for no step after it; they must have been
        started."""
        assert self._control is not None
        return SaveRequest(self._control, last=last)

    def save(self) -> None:
        """Have the ranks write a last checkpoint; waits for it no longer than the configuration
        says."""
        deadline = time.monotonic() + self._job.config.fault.save_timeout.seconds
        request = self.ask_save(last=True)
        while self.running() and time.monotonic() < deadline:
            if request.answer(self.snapshot) is not None and not self.snapshot.sending:
                break
            time.sleep(_POLL)

    @property
    def starts(self) -> int:
        """How often this command has started the ranks."""
        return self.snapshot.starts

    def running(self) -> bool:
        """Whether there is something to wait for; looks what the ranks say."""
        if self._ended.is_set() or self.cluster.death() is not None:
            return False
        if self._control is not None and not self._stopped:
            try:
                self.snapshot = self._control.newest()
            except Exception as error:
                # where Ray itself is about to be found dead, that is what is said
                if self._error is None and self.cluster.answers():
                    self._error = self._ray_died(_CONTROL, error)
                return self._error is None
        return True

    def result(self) -> dict[str, Any]:
        """What rank 0 left for the summary; waits for the end.

        Raises:
            PreflightError: Ray did not start.
            TrainingError: with the first cause, as far as a rank could still say it.
        """
        while self.running():
            self._ended.wait(_POLL)
        self._stopped = True  # a thread that is still there must ask Ray for nothing more
        self._end_fit()
        if not self._ended.is_set() or self._error is not None:
            death = self.cluster.death()
            if death is not None:
                raise self._ray_died(death, None)
        if isinstance(self._error, RaygnnError):
            raise self._error
        failures = faults.recorded(self._job.run_dir)
        result = None
        if self._error is None:
            self._look_once_more()
            result = read_result(self.snapshot)
        # without an error and without a result, the ranks found a failure recorded: see train_loop
        if result is None:
            gone = self._lost()
            error = explain(self._error, failures, gone)
            direct = error.final or isinstance(_root(self._error), TrainingError)
            error.direct = direct or (bool(failures) and not failures[0].is_consequence)
            killed = oom_kills() - self._oom_kills
            faults.record_driver(self._job.run_dir, error, self._error, killed, gone)
            raise error from self._error
        blackbox.tidy(self._job.run_dir / "logs")
        return result

    def _look_once_more(self) -> None:
        """What the ranks said last."""
        if self._control is not None:
            with contextlib.suppress(TrainingError):
                self.snapshot = self._control.snapshot()

    def _lost(self) -> list[ray_nodes.Lost]:
        """The ranks whose nodes are gone; none where Ray itself is."""
        if not self.cluster.local:
            with contextlib.suppress(Exception):  # which must not hide the error
                return ray_nodes.lost(self.snapshot.workers)
        return []

    def _ray_died(self, what: str, cause: BaseException | None) -> TrainingError:
        """The error for a process of Ray's that died, with its record for `raygnn diagnose`."""
        trace = plain(cause) if cause is not None else ""
        if MemoryKill.of(trace) is not None:
            error = explain(cause, [])
            faults.record_driver(self._job.run_dir, error, cause, 0)
            return error
        error = TrainingError(what, remedy=REMEDIES["ray_died"], trace=trace or None)
        faults.record_driver(self._job.run_dir, error, cause, 0, ray_died=True)
        return error

    def _run(self) -> None:
        try:
            import ray

            self.cluster.wait()
            if self._stopped:
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
        """Run Ray Train; the death of its controller, on a cluster, counts as that of a rank."""
        from ray.exceptions import ActorDiedError

        local, failures = self.cluster.local, self._job.config.fault.max_failures
        while not self._stopped:
            trainer = make_trainer(
                self._job,
                control,
                self._workers,
                self._comm,
                failures,
                local=local,
                stopped=lambda: self._stopped,
                died=lambda: self.cluster.death() is not None,
            )
            try:
                trainer.fit()
                return
            except ActorDiedError as error:
                if local or self._stopped or self.cluster.death() is not None:
                    raise
                starts = control.snapshot().starts
                failures = min(failures - 1, self._job.config.fault.max_failures - starts)
                if failures < 0:
                    raise self._ray_died(_CONTROLLER, error) from error


def make_trainer(
    job: Job,
    control: ControlHandle,
    workers: int,
    comm: CommPlan,
    failures: int,
    *,
    local: bool,
    stopped: Callable[[], bool],
    died: Callable[[], bool],
) -> TorchTrainer:
    """The TorchTrainer of a job; nothing starts yet.

    Args:
        failures: after which the ranks are started again.
        local: on a Ray that was started for this job.
        stopped: whether nobody wants it any more.
        died: whether Ray has.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from raygnn.worker.comm.backend import CommBackendConfig

    config = job.config
    cluster = config.cluster
    known = {field.name for field in fields(FailureConfig)}
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

        policy = Scaling(scaling_config, fewest, job.run_dir, control, patience(config))
        failure_policy = partial(Failures, stopped=stopped if local else None)
        trainer_class = compat.lean_trainer(
            policy, failure_policy, local=local, stopped=stopped, died=died
        )
    return trainer_class(
        train_loop,
        train_loop_config=job,  # passed on as it is
        torch_config=CommBackendConfig.of(comm, job.run_dir / "logs", control),
        scaling_config=scaling_config,
        run_config=RunConfig(
            # our checkpoints lie in the run directory; Ray's bookkeeping stays out of the way,
            # under a name that it has never seen, since it would continue a run of that name
            name=f"start-{time.time_ns()}",
            storage_path=str(job.run_dir / ".ray"),
            failure_config=FailureConfig(
                max_failures=failures,
                # a node that goes while the ranks start is what [min, max] is there for
                controller_failure_limit=failures if cluster.elastic else 0,
                # of newer versions, whose default is to begin anew without end
                **{name: failures for name in ("max_preemption_failures",) if name in known},
            ),
            # from their first moment what is the same on all nodes; the backend sees to the rest
            worker_runtime_env={
                "env_vars": {
                    **ALLOCATOR,
                    **{n: os.environ[n] for n in (compat.PLAIN,) if n in os.environ},
                    **comm.everywhere(),
                }
            },
        ),
    )


def explain(
    error: BaseException | None,
    failures: list[faults.Failure],
    lost: Sequence[ray_nodes.Lost] = (),
) -> TrainingError:
    """What to tell the user: what a rank recorded, else what Ray Train says of it.

    Args:
        lost: ranks whose nodes are gone.
    """
    root = _root(error)
    if isinstance(root, TrainingError):  # ours, of Ray Train's controller: it ended the run
        return root
    if failures and not failures[0].is_consequence:
        return failures[0].as_error()
    if lost:
        return TrainingError(
            str(lost[0]), where=lost[0].host, remedy=REMEDIES["node_lost"], rank=lost[0].rank
        )
    # those that could not say anything: killed, and the cause of what the others met
    said = {failure.rank for failure in failures}
    dead = [(r, e) for r, e in getattr(error, "worker_failures", {}).items() if r not in said]
    if dead:
        rank, cause = min(dead, key=lambda one: not getattr(one[1], "final", False))
        if isinstance(cause, TrainingError):  # there was no room to record it
            return cause
        text = plain(cause)
        kill = MemoryKill.of(text)
        return TrainingError(
            f"it was killed by Ray for memory: {kill.why}"
            if kill
            else f"a worker died: {_cause_line(text)}",
            where=f"rank {rank}",
            remedy=REMEDIES["memory" if kill else "died"],
            rank=rank,
            trace=text,
        )
    if failures:
        return failures[0].as_error()
    text = plain(root)
    if (kill := MemoryKill.of(text)) is not None:
        what = f"{kill.process or 'a process'} was killed by Ray for memory: {kill.why}"
        return TrainingError(what, where=kill.host, remedy=REMEDIES["memory"], trace=text)
    remedies = [remedy for phrase, remedy in _REMEDIES if phrase in text]
    return TrainingError(
        f"Ray Train failed: {type(root).__name__}: {_cause_line(text)}",
        remedy=(remedies or ["run again with -v to see Ray's own messages"])[0],
        trace=plain(error),
    )


def plain(error: BaseException | None) -> str:
    """The text of an error of Ray's, without what colours it in a terminal."""
    text = plain_text(str(error), LONGEST_TRACE)
    return _ESCAPES.sub("", text).strip() or type(error).__name__


def _root(error: BaseException | None) -> BaseException | None:
    """What an error of Ray's was made of."""
    for _ in range(10):
        inner = getattr(error, "controller_failure", None) or getattr(error, "cause", None)
        inner = inner or getattr(error, "__cause__", None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _cause_line(text: str) -> str:
    """The line that says it: the first, or the last one that is not indented of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not any(line.startswith(("Traceback", "ray::")) for line in lines):
        return lines[0]
    flush = [line for line in lines if not line[0].isspace()]
    return flush[-1] if flush else lines[-1].strip()
