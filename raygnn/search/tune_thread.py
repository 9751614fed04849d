"""Ray Tune in a background thread, and the actor of a trial, an ordinary training."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler

from raygnn.config.schema import Config
from raygnn.driver.train import train
from raygnn.errors import RaygnnError
from raygnn.runs.run_directory import is_run
from raygnn.search.record import SearchRecord
from raygnn.search.space import search_of

_STATE = ".tune"  # directory of Ray Tune's state in that of the search
_STOP = 60.0  # seconds for Ray Tune to end
_TRIAL_STOP = 120.0  # seconds for a trial's workers to end, besides its last checkpoint
_RUNGS = 3  # the best third of the trials goes on at a rung
_GRACE = 10  # share of the epochs, as a divisor, before a trial may be stopped
_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # otherwise Tune prints tables of its own
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "5",
}


class TuneThread(threading.Thread):
    """Trials of a search on Ray Tune, resumed if its state exists.

    Args:
        jobs: configuration of each trial.
        metric: its name, and ``max`` or ``min``.
        concurrent: number of trials at the same time.

    Attributes:
        lines: notes for the user.
        error: error of Ray Tune itself, once the thread has ended.
    """

    current: ClassVar[TuneThread]  # the search of this process

    def __init__(
        self,
        record: SearchRecord,
        config: Config,
        jobs: Sequence[Config],
        metric: tuple[str, str],
        concurrent: int,
    ):
        super().__init__(name="raygnn-tune", daemon=True)
        self.lines: SimpleQueue[str] = SimpleQueue()
        self.error: BaseException | None = None
        self._record = record
        self._config = config
        self._jobs = jobs
        self._metric, self._mode = metric
        self._concurrent = concurrent
        self._stopped = threading.Event()

    def run(self) -> None:
        """Run all trials."""
        TuneThread.current = self
        try:
            self._tuner().fit()
        except BaseException as error:
            if not self._stopped.is_set():
                self.error = error

    def stop(self) -> None:
        """Stop the trials, which can be resumed from their newest checkpoints: Ray Tune waits
        5 s for them."""
        self._stopped.set()
        self.join(_STOP)

    def _tuner(self) -> tune.Tuner:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        actor = tune.with_parameters(
            TrialActor, jobs=self._jobs, metric=(self._metric, self._mode), path=list(sys.path)
        )
        # The actor only waits: the workers take the CPUs, in a placement group of their own. A
        # request must name a resource, so it names a byte.
        trainable = tune.with_resources(actor, tune.PlacementGroupFactory([{"memory": 1}]))
        place = self._config.run_dir / _STATE
        if tune.Tuner.can_restore(str(place)):
            return tune.Tuner.restore(str(place), trainable, restart_errored=True)
        return tune.Tuner(
            trainable,
            param_space={"trial": tune.grid_search(list(range(len(self._jobs))))},
            tune_config=tune.TuneConfig(
                metric=self._metric,
                mode=self._mode,
                max_concurrent_trials=self._concurrent,
                scheduler=self._scheduler(),
            ),
            run_config=tune.RunConfig(
                name=_STATE,
                storage_path=str(self._config.run_dir),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[_Observer()],
                verbose=0,
            ),
        )

    def _scheduler(self) -> TrialScheduler | None:
        epochs, kind = self._config.train.epochs, search_of(self._config).scheduler
        grace = max(1, self._config.train.eval_every, epochs // _GRACE)
        if kind == "asha":
            return AsyncHyperBandScheduler(  # a trial that reaches max_t is stopped, too
                "epoch", max_t=epochs + 1, grace_period=grace, reduction_factor=_RUNGS
            )
        return MedianStoppingRule("epoch", grace_period=grace) if kind == "median" else None

    # ── what Tune reports, in this thread ─────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise an exception once the search is stopped, which ends Tune's loop."""
        if self._stopped.is_set():
            raise _Stopped

    def started(self, number: int) -> None:
        self._record.update(number, status="running", error=None)

    def reported(self, number: int, result: dict[str, Any]) -> None:
        value, trial = float(result[self._metric]), self._record.trials[number]
        facts = {"value": self._record.better(trial["value"], value), "epochs": result["epoch"]}
        if "metrics" in result:  # of the selected weights: the trial is completed
            facts = {**facts, "value": value, "metrics": result["metrics"]}
        self._record.update(number, **facts)

    def ended(self, number: int) -> None:
        trial = self._record.trials[number]
        done = bool(trial["metrics"])
        trial = self._record.update(number, status="done" if done else "stopped")
        how = "completed" if done else "stopped early"
        self._note(
            trial, f"{how} after {trial['epochs']} epochs, {self._metric} {trial['value']:.4f}"
        )

    def failed(self, number: int) -> None:
        text = "its process ended; see its logs"
        with suppress(OSError):
            text = cause_file(self._jobs[number].run_dir).read_text()
        self._note(self._record.update(number, status="failed", error=text), f"failed: {text}")

    def _note(self, trial: dict[str, Any], text: str) -> None:
        ended = sum(one["status"] in ("done", "stopped", "failed") for one in self._record.trials)
        settings = " ".join(f"{key}={value}" for key, value in trial["settings"].items())
        self.lines.put(f"{trial['id']} ({ended}/{len(self._record.trials)}) {text}  {settings}")


class _Stopped(Exception):
    """The search was stopped."""


class _Observer(tune.Callback):
    """Reports to the process's search what happens to its trials. It has no state, since Ray Tune
    pickles it, and would restore an old one."""

    def on_step_begin(self, **_: Any) -> None:
        TuneThread.current.check()

    def on_trial_start(self, trial: Any, **_: Any) -> None:
        TuneThread.current.started(trial.config["trial"])

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        TuneThread.current.reported(trial.config["trial"], result)

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        TuneThread.current.ended(trial.config["trial"])

    def on_trial_error(self, trial: Any, **_: Any) -> None:
        TuneThread.current.failed(trial.config["trial"])


class TrialActor(tune.Trainable):
    """Training of one trial; each step of Tune's is the next evaluation.

    The training runs in a thread of its own, since Ray Tune cannot wait for a function to end its
    workers when a scheduler stops it, while it waits for `cleanup`.
    """

    def setup(
        self,
        config: dict[str, Any],
        jobs: Sequence[Config],
        metric: tuple[str, str],
        path: Sequence[str],
    ) -> None:
        """Start the training.

        Args:
            config: ``trial``, its number.
            jobs: configuration of each trial.
            metric: metric of the search, as records name it, and ``max`` or ``min``.
            path: ``sys.path`` of the command, with the user's modules.
        """
        sys.path += [entry for entry in path if entry not in sys.path]
        self._job = jobs[config["trial"]]
        self._metric, mode = metric
        self._better = max if mode == "max" else min
        self._best: list[float] = []
        self._results: SimpleQueue[dict[str, Any] | RaygnnError] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._train, name="raygnn-trial", daemon=True)
        self._thread.start()

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation, or the end. Raises the training's error."""
        result = self._results.get()
        if isinstance(result, RaygnnError):
            raise result
        return result

    def cleanup(self) -> None:
        """Stop the training as Ctrl-C does, with a checkpoint, and wait for its workers' end."""
        self._stopped.set()
        self._thread.join(_TRIAL_STOP + self._job.fault.save_timeout.seconds)

    def _train(self) -> None:
        job = self._job
        try:
            resume = is_run(job.run_dir)
            run = train(job, resume=resume, display=False, on_records=self._take).summary
            metrics = run["metrics"]  # of the selected weights
            result = {"epoch": run["epochs"], self._metric: metrics[self._metric], "done": True}
            self._results.put({**result, "metrics": metrics})
        except Exception as error:
            if self._stopped.is_set():
                return
            if not isinstance(error, RaygnnError):
                error = RaygnnError(f"{type(error).__name__}: {error}")
            cause_file(job.run_dir).write_text(str(error))
            self._results.put(error)

    def _take(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Queue the evaluations among new records. Raises KeyboardInterrupt if the trial is
        stopped.

        The scheduler compares the best value so far, which is that of the weights that a run
        selects: a trial that was best before its last evaluations goes on.
        """
        if self._stopped.is_set():
            raise KeyboardInterrupt
        for record in records:
            value = record.get(self._metric)
            if value is not None and not math.isnan(value):
                self._best = [self._better([*self._best, value])]
                self._results.put({"epoch": record["epoch"] + 1, self._metric: self._best[0]})


def cause_file(run_dir: Path) -> Path:
    """Return the file with the error of a failed trial, which may have no run directory."""
    return run_dir.with_name(f"{run_dir.name}.error")
