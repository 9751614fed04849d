"""Starting Ray Train on a job, and saying why it failed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from raygnn.errors import RaygnnError, TrainingError
from raygnn.preflight.comm_plan import CommPlan
from raygnn.runs.files import read_json
from raygnn.training import faults
from raygnn.training.cluster import RayCluster
from raygnn.training.job import RESULT, STOP, Job
from raygnn.training.worker import train_loop

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_LONGEST_STOP = 60.0  # seconds


class Launch:
    """A job under way: Ray Train in a thread of its own, so that the caller's can do other things.

    Args:
        cluster: it need not be ready yet.
    """

    def __init__(self, job: Job, workers: int, comm: CommPlan, cluster: RayCluster):
        self._job = job
        self._workers = workers
        self._comm = comm
        self._cluster = cluster
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="raygnn-fit", daemon=True)
        cluster.start()
        self._thread.start()

    def stop(self) -> None:
        """End the job where Ray goes on without us: ranks look for this file, and go."""
        (self._job.run_dir / STOP).touch()
        self._thread.join(_LONGEST_STOP)

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """What rank 0 left for the summary; waits for the end.

        Raises:
            PreflightError: Ray did not start.
            TrainingError: with the first cause, as far as a rank could still say it.
        """
        self._thread.join()
        if isinstance(self._error, RaygnnError):
            raise self._error
        failures = faults.recorded(self._job.run_dir)
        file = self._job.run_dir / RESULT
        # without an error and without a result, the ranks found a failure recorded: see train_loop
        if self._error is not None or not file.exists():
            raise explain(self._error, failures) from self._error
        result = read_json(file)
        file.unlink()
        return result

    def _run(self) -> None:
        try:
            self._cluster.wait()
            make_trainer(self._job, self._workers, self._comm, local=self._cluster.local).fit()
        except BaseException as error:
            self._error = error


def make_trainer(job: Job, workers: int, comm: CommPlan, *, local: bool) -> TorchTrainer:
    """The TorchTrainer of a job; nothing starts yet.

    Args:
        local: on a Ray that was started for this job.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from raygnn.training.allocator import ENVIRONMENT
    from raygnn.training.backend import CommConfig
    from raygnn.training.trainer import LeanTrainer

    config = job.config
    cluster = config.cluster
    resources = {"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker}
    trainer = LeanTrainer(
        train_loop,
        train_loop_config=job,  # passed on as it is
        torch_config=CommConfig.of(comm, job.run_dir / "logs"),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker={k: v for k, v in resources.items() if v},
        ),
        run_config=RunConfig(
            # our checkpoints lie in the run directory; Ray's bookkeeping stays out of the way,
            # under a name that it has never seen, since it would continue a run of that name
            name=f"start-{int(job.started * 1000)}",
            storage_path=str(job.run_dir / ".ray"),
            failure_config=FailureConfig(
                max_failures=config.fault.max_failures, controller_failure_limit=0
            ),
            # from their first moment what is the same on all nodes; the backend sees to the rest
            worker_runtime_env={"env_vars": {**ENVIRONMENT, **comm.everywhere()}},
        ),
    )
    trainer.local = local
    return trainer


def explain(error: BaseException | None, failures: list[faults.Failure]) -> TrainingError:
    """What to tell the user: what a rank recorded, else what Ray Train says of it."""
    if failures and not failures[0].is_consequence:
        return failures[0].as_error()
    # those that could not say anything: killed, and the cause of what the others met
    said = {failure.rank for failure in failures}
    dead = [(r, e) for r, e in getattr(error, "worker_failures", {}).items() if r not in said]
    if dead:
        rank, cause = dead[0]
        text = str(cause).strip() or type(cause).__name__
        return TrainingError(
            f"a worker died: {text.splitlines()[0]}",
            where=f"rank {rank}",
            remedy="if it was killed for memory, use more workers or a smaller batch; see logs/",
            rank=rank,
            trace=text,
        )
    if failures:
        return failures[0].as_error()
    return TrainingError(
        f"Ray Train failed: {type(error).__name__}: {error}",
        remedy="run again with -v to see Ray's own messages",
    )
