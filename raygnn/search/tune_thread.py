"""Ray Tune in a background thread, and the actor of a trial, an ordinary training."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from raygnn.config.schema import Config
from raygnn.config.search import SearchConfig
from raygnn.driver.train import train
from raygnn.errors import Interrupted, RaygnnError
from raygnn.runs.run_directory import TRIALS, is_run, read_status
from raygnn.search.record import SearchRecord, trial_id
from raygnn.search.search_page import write_page
from raygnn.search.space import SPEED, search_of, trial_config

_STATE = ".tune"  # Ray Tune's state, in the directory of the search
_STOP_FILE = ".stop"  # in the directory of the trials: stops all of them
_STOP = 60.0  # seconds for Ray Tune to end
_POLL = 0.1  # seconds
_TRIAL_STOP = 120.0  # seconds for a trial's workers to end, besides its last checkpoint
_RUNGS = 3  # the best third of the trials continues at a rung
_GRACE = 10  # no trial is stopped before a tenth of its epochs
_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # otherwise Tune prints tables of its own
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "5",
}


class TuneThread(threading.Thread):
    """Trials of a search on Ray Tune, resumed if its state exists.

    Args:
        partition: directory of the partition or collection that all trials share.
        metric: name of the metric, and ``max`` or ``min``.
        concurrent: number of concurrent trials.

    Attributes:
        trials: directory of the trials.
        lines: notes for the user.
        error: error of Ray Tune itself, once the thread has ended.
        stopped: set to end Tune's loop.
    """

    current: ClassVar[TuneThread]  # the search of this process

    def __init__(
        self,
        record: SearchRecord,
        config: Config,
        partition: Path | None,
        metric: tuple[str, str],
        concurrent: int,
    ):
        super().__init__(name="raygnn-tune", daemon=True)
        self.lines: SimpleQueue[str] = SimpleQueue()
        self.error: BaseException | None = None
        self.record = record
        self._config = config
        self._partition = partition
        self.trials = config.run_dir / TRIALS
        self.metric, self._mode = metric
        self._concurrent = concurrent
        self.stopped = threading.Event()

    def run(self) -> None:
        """Run all trials."""
        TuneThread.current = self
        (self.trials / _STOP_FILE).unlink(missing_ok=True)  # of an earlier command
        try:
            self._tuner().fit()
        except BaseException as error:
            if not self.stopped.is_set():
                self.error = error

    def stop(self) -> None:
        """Stop the trials, each with a last checkpoint, and then Ray Tune, which waits only seconds
        for its trials."""
        (self.trials / _STOP_FILE).touch()
        running = [one for one in self.record.trials if one["status"] == "running"]
        deadline = time.monotonic() + _TRIAL_STOP + self._config.fault.save_timeout.seconds
        while self.is_alive() and time.monotonic() < deadline:
            if all(read_status(self.trials / one["id"]) != "running" for one in running):
                break
            time.sleep(_POLL)
        self.stopped.set()
        self.join(_STOP)
        for number, one in enumerate(self.record.trials):
            if one["status"] == "running":
                self.record.update(number, status="interrupted")

    def _tuner(self) -> tune.Tuner:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        actor = tune.with_parameters(
            TrialActor,
            config=self._config,
            partition=self._partition,
            metric=(self.metric, self._mode),
            path=list(sys.path),
        )
        # The actor only waits: its workers use the CPUs, in another placement group. Ray requires
        # some resource, here one byte.
        trainable = tune.with_resources(actor, tune.PlacementGroupFactory([{"memory": 1}]))
        place = self._config.run_dir / _STATE
        if tune.Tuner.can_restore(str(place)):
            return tune.Tuner.restore(str(place), trainable, restart_errored=True)
        search = search_of(self._config)
        algorithm, space = None, {}
        if search.algorithm == "optuna":
            algorithm, space = _Optuna(seed=self._config.train.seed), _domains(search)
        else:
            trials = [
                {"number": number, "settings": one["settings"]}
                for number, one in enumerate(self.record.trials)
            ]
            space = {"trial": tune.grid_search(trials)}
        return tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                search_alg=algorithm,
                num_samples=search.count if algorithm else 1,
                metric=self.metric,
                mode=self._mode,
                max_concurrent_trials=self._concurrent,
                reuse_actors=True,  # imports take 10 s in a new process
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
        if kind == "median":  # the time slice prevents pausing a trial in favour of another one
            return MedianStoppingRule("epoch", grace_period=grace, min_time_slice=math.inf)
        return None

    def note(self, trial: Mapping[str, Any], text: str) -> None:
        """Write the page, and note the end of a trial."""
        with suppress(Exception):  # it must not fail the trial
            write_page(self._config.run_dir)
        ended = sum(one["status"] in ("done", "stopped", "failed") for one in self.record.trials)
        settings = " ".join(f"{key}={value}" for key, value in trial["settings"].items())
        count = search_of(self._config).count
        self.lines.put(f"{trial['id']} ({ended}/{count}) {text}  {settings}")


class _Observer(tune.Callback):
    """Updates the record of the process's search. It has no state, since Ray Tune pickles it, and
    would restore an old one."""

    def on_step_begin(self, **_: Any) -> None:
        if TuneThread.current.stopped.is_set():
            raise Interrupted("the search was stopped")  # ends Tune's loop

    def on_trial_start(self, trial: Any, **_: Any) -> None:
        TuneThread.current.record.update(_number(trial), status="running", error=None)

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        search = TuneThread.current
        facts = {"value": float(result[search.metric]), "epochs": result["epoch"]}
        if "metrics" in result:  # the trial is completed
            facts["metrics"] = result["metrics"]
        search.record.update(_number(trial), **facts)

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        search, number = TuneThread.current, _number(trial)
        done = bool(search.record.trials[number]["metrics"])
        status, how = ("done", "completed") if done else ("stopped", "stopped early")
        found = search.record.update(number, status=status, ended=time.time())
        text = f"{how} after {found['epochs']} epochs, {search.metric} {found['value']:.4f}"
        search.note(found, text)

    def on_trial_error(self, trial: Any, **_: Any) -> None:
        search, number = TuneThread.current, _number(trial)
        text = "its process ended; see its logs"
        with suppress(OSError):
            text = cause_file(search.trials / trial_id(number)).read_text()
        search.note(search.record.update(number, status="failed", error=text), f"failed: {text}")


def _number(trial: Any) -> int:
    number: int = trial.config["trial"]["number"]
    return number


class _Optuna(OptunaSearch):
    """Numbers the trials that Optuna suggests; Ray Tune stores its attributes."""

    count = 0

    def suggest(self, trial_id: str) -> dict[str, Any]:
        settings = super().suggest(trial_id)
        number, self.count = self.count, self.count + 1
        TuneThread.current.record.add(number, settings)
        return {"trial": {"number": number, "settings": settings}}


def _domains(search: SearchConfig) -> dict[str, Any]:
    """Return the space as Ray Tune's domains, whose functions are called like our keys."""
    kinds = {key: values.kind for key, values in search.space.items()}
    return {
        key: tune.choice(list(given)) if kind == "choice" else getattr(tune, kind)(*given)
        for key, (kind, given) in kinds.items()
    }


class TrialActor(tune.Trainable):
    """Training of one trial; each of Tune's steps is the next evaluation.

    The training runs in a separate thread: when a scheduler stops a trial, Ray Tune waits for
    `cleanup`, but could not wait until a function has ended its workers.
    """

    def setup(
        self,
        trial: dict[str, Any],
        config: Config,
        partition: Path | None,
        metric: tuple[str, str],
        path: Sequence[str],
    ) -> None:
        """Start the training.

        Args:
            trial: ``trial``, its ``number`` and ``settings``.
            config: configuration of the search.
            partition, metric: see `TuneThread`.
            path: ``sys.path`` of the command, with the user's modules.
        """
        sys.path += [entry for entry in path if entry not in sys.path]
        self._config, self._partition = config, partition
        self._patience = _TRIAL_STOP + config.fault.save_timeout.seconds
        self._metric, mode = metric
        self._better = max if mode == "max" else min
        self._start(**trial["trial"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start the training of another trial, once the previous one has ended."""
        self.cleanup()
        self._start(**new_config["trial"])
        return True

    def _start(self, number: int, settings: Mapping[str, Any]) -> None:
        place = self._config.run_dir / TRIALS, trial_id(number)
        self._run_dir = Path(*place)
        self._configure = partial(trial_config, self._config, settings, place, self._partition)
        self._best: list[float] = []
        self._results: SimpleQueue[dict[str, Any] | RaygnnError] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._train, name="raygnn-trial", daemon=True)
        self._thread.start()

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation or the end. Raises the training's error."""
        result = self._results.get()
        if isinstance(result, RaygnnError):
            raise result
        return result

    def cleanup(self) -> None:
        """Stop the training as Ctrl-C does, with a checkpoint, and wait for its workers' end."""
        self._stopped.set()
        self._thread.join(self._patience)

    def _train(self) -> None:
        try:
            job, resume = self._configure(), is_run(self._run_dir)
            run = train(job, resume=resume, display=False, on_records=self._take).summary
            metrics = {**run["metrics"], SPEED: run[SPEED]}  # metrics of the selected weights
            result = {"epoch": run["epochs"], self._metric: metrics[self._metric], "done": True}
            self._results.put({**result, "metrics": metrics})
        except Interrupted:
            return  # `step` waits until Ray Tune ends this actor
        except Exception as error:
            if not isinstance(error, RaygnnError):
                error = RaygnnError(f"{type(error).__name__}: {error}")
            cause_file(self._run_dir).write_text(str(error))
            self._results.put(error)

    def _take(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Queue the evaluations among new records. Raises KeyboardInterrupt if the trial or the
        search is stopped.

        The scheduler compares the best values so far, since a run selects its best weights: a trial
        that was best before its last evaluations continues.
        """
        if self._stopped.is_set() or self._run_dir.with_name(_STOP_FILE).exists():
            raise KeyboardInterrupt
        for record in records:
            value = record.get(self._metric)
            if value is not None and not math.isnan(value):
                self._best = [self._better([*self._best, value])]
                self._results.put({"epoch": record["epoch"] + 1, self._metric: self._best[0]})


def cause_file(run_dir: Path) -> Path:
    """Return the file with the error of a failed trial, which may have no run directory."""
    return run_dir.with_name(f"{run_dir.name}.error")
