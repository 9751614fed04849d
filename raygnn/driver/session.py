"""Jobs beside a run, which leave its directory alone: the sweep of `tune`, and predictions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raygnn.config.schema import Config
from raygnn.driver.plan import count_workers
from raygnn.driver.ray.connection import RayCluster
from raygnn.driver.train import begin, fit, plan_job
from raygnn.driver.watch import Watching
from raygnn.errors import InputError, Interrupted, TrainingError
from raygnn.runs.display import Display
from raygnn.runs.run_directory import RunDir
from raygnn.worker.job import ROWS, clean_up


@contextmanager
def run_aside(
    config: Config,
    place: str,
    show: Display,
    watching: Watching,
    interrupted: Callable[[RunDir], str],
    *,
    verbose: bool,
    started: float,
    purpose: str | None = None,
    keep: bool = True,
    **extra: Any,
) -> Iterator[tuple[dict[str, Any], Path]]:
    """Run a job in ``<storage>/<place>/<name>``, a directory of its own.

    Yields what rank 0 left and the directory, while that is still this command's.

    Args:
        place: a name that no run can have.
        watching: see `fit`.
        interrupted: what to say after Ctrl-C.
        purpose: see `plan_job`.
        keep: the directory, also when all went well.
        extra: of the `Job`.

    Raises:
        InputError, PreflightError, TrainingError, Interrupted: see `raygnn.train`.
    """
    storage = Path(config.storage) / place
    with (
        RunDir.create(str(storage), config.name, mode="overwrite") as run,
        _cleared(run, keep),
        RayCluster(config, verbose=verbose) as cluster,
        _interruptible(run, interrupted),
    ):
        workers = count_workers(config, cluster)
        batch = workers * config.sampling.batch_size
        shown = run.path if keep else None  # what will be there afterwards
        plan = plan_job(config, workers, cluster, show, batch, shown, purpose)
        begin(config, plan, run, cluster, show)
        try:
            found = fit(config, plan, run, cluster, show, started, watching, **extra)
        except Interrupted:
            raise
        except Exception as error:
            run.update_summary(status="failed", error=str(error))
            if isinstance(error, TrainingError) and error.exit_code != InputError.exit_code:
                error.run = str(run.path)  # there is more to be told
            raise
        finally:
            clean_up(run, local=cluster.local)
        run.update_summary(status="done")
        yield found, run.path


@contextmanager
def _cleared(run: RunDir, keep: bool) -> Iterator[None]:
    """Remove what is of no use when the ranks are gone. What they failed of is looked into."""
    try:
        yield
    except TrainingError:
        keep = True
        raise
    finally:
        mine = run.begun and run.lost is None
        if mine:
            shutil.rmtree(run.path / ROWS, ignore_errors=True)
        if mine and not keep:
            shutil.rmtree(run.path, ignore_errors=True)
            with suppress(OSError):
                run.path.parent.rmdir()  # if nothing else lies there


@contextmanager
def _interruptible(run: RunDir, interrupted: Callable[[RunDir], str]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if run.begun:
            run.update_summary(status="interrupted")
        raise Interrupted(interrupted(run)) from None
