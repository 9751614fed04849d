"""Starting Ray Train on a job, and saying why it failed."""

from __future__ import annotations

import threading
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError

from raygnn.errors import TrainingError
from raygnn.runs.files import read_json
from raygnn.training import faults
from raygnn.training.backend import CommConfig
from raygnn.training.warmup import WORKER_ENV
from raygnn.training.worker import RESULT, Job, train_loop


class _Trainer(TorchTrainer):
    """A TorchTrainer without the processes that have nothing to do here.

    One serves Ray Data's datasets, of which there are none; the other removes the placement
    group if the controller dies, which a Ray that goes with the job does not need.
    """

    local = False

    def _create_default_callbacks(self) -> list[Any]:
        idle = {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if self.local else set())
        callbacks: list[Any] = super()._create_default_callbacks()
        return [c for c in callbacks if type(c).__name__ not in idle]


def make_trainer(job: Job, workers: int, *, local: bool) -> TorchTrainer:
    """The TorchTrainer of a job; nothing starts yet.

    Args:
        local: on a Ray that was started for this job.
    """
    config = job.config
    cluster, comm = config.cluster, config.comm
    resources = {"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker}
    trainer = _Trainer(
        train_loop,
        train_loop_config=job,  # type: ignore[arg-type]  # passed on as it is
        torch_config=CommConfig(
            backend=None if comm.backend == "auto" else comm.backend,
            timeout_s=max(1, int(comm.timeout.seconds)),
            env=comm.env,
        ),
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
            worker_runtime_env={"env_vars": WORKER_ENV},
            failure_config=FailureConfig(
                max_failures=config.fault.max_failures, controller_failure_limit=0
            ),
        ),
    )
    trainer.local = local
    return trainer


class Launch:
    """A job under way: Ray Train in a thread of its own, so that the caller's can watch."""

    def __init__(self, job: Job, workers: int, *, local: bool):
        self._job = job
        self._trainer = make_trainer(job, workers, local=local)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="raygnn-fit", daemon=True)
        self._thread.start()

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """What rank 0 left for the summary; waits for the end.

        Raises:
            TrainingError: with the first cause, as far as a rank could still say it.
        """
        self._thread.join()
        failures = faults.recorded(self._job.run_dir)
        if self._error is not None:
            raise _explain(self._error, failures) from self._error
        file = self._job.run_dir / RESULT
        if not file.exists():  # a rank stopped without raising: see train_loop
            raise _explain(None, failures)
        result = read_json(file)
        file.unlink()
        return result

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001 - explained by result()
            self._error = error


def _explain(error: BaseException | None, failures: list[faults.Failure]) -> TrainingError:
    if failures:
        return failures[0].as_error()
    dead = list(error.worker_failures.items()) if isinstance(error, WorkerGroupError) else []
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
    return TrainingError(
        f"Ray Train failed: {type(error).__name__}: {error}",
        remedy="run again with -v to see Ray's own messages",
    )
