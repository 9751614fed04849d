"""Resume logic: which checkpoint a run resumes from, and whether this job may do so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from raygnn.checkpoint import store as checkpoint
from raygnn.checkpoint import weights
from raygnn.checkpoint.remote_checkpoints import RemoteCheckpoints
from raygnn.checkpoint.store import Checkpoint
from raygnn.config.execution import PRECISIONS
from raygnn.config.places import Uri
from raygnn.config.rules import changes, fixed
from raygnn.config.schema import Config
from raygnn.driver.job_plan import Plan
from raygnn.errors import ConfigError, InputError, RaygnnError
from raygnn.runs.display import Display
from raygnn.runs.run import Run, open_run
from raygnn.runs.run_directory import CHECKPOINTS, CONFIG, PARTITION, SEARCH, TRIALS, RunDir
from raygnn.storage.remote import any_path
from raygnn.util.files import is_vacant, read_json, storage_errors
from raygnn.worker.job import InitialWeights


@dataclass(frozen=True)
class StartPoint:
    """State from which a run starts."""

    checkpoint: Checkpoint | None  # None = from the beginning
    global_batch: int  # seeds per batch, over all ranks
    rejected: tuple[str, ...] = ()  # newer checkpoints, each with what is wrong with it
    resumed: bool = False  # True with ``--resume``

    def notes(self, workers: int, batch_size: int) -> Iterator[str]:
        for what in self.rejected:
            yield f"resume: skipped {what}"
        if not self.resumed:
            return
        if self.checkpoint is None:
            yield "resume: there is no checkpoint yet, so the run starts from the beginning"
            return
        yield f"resume: from step {self.checkpoint.step:,} ({self.checkpoint.name})"
        if self.global_batch != workers * batch_size:
            yield (
                f"resume: a batch still has {self.global_batch:,} seeds, about "
                f"{-(-self.global_batch // workers):,} for each of {workers} workers"
            )


def find_start(
    config: Config, run: RunDir, workers: int, show: Display, *, resume: bool
) -> StartPoint:
    """Find the checkpoint to resume from.

    The number of workers may differ from the checkpoint's: the global batch stays the same, and is
    divided among them. Raises InputError if a key that must not change has changed, or if a run
    that wrote checkpoints, or is done, has no usable one.
    """
    global_batch = config.sampling.batch_size * workers
    if not resume:
        return StartPoint(None, global_batch)
    if (run.path / SEARCH).exists():
        best = read_json(run.path / SEARCH).get("best") or "ID"
        trial = run.path / TRIALS / best / CONFIG
        remedy = f"resume it with raygnn tune, or a trial with raygnn train {trial} --resume"
        raise InputError("this is a search, not a run", where=str(run.path), remedy=remedy)
    found, rejected = _newest(config, run, show)
    before = fixed(_recorded(run))
    changed = changes(before, config) if found or rejected else []
    if found is not None:
        began = found.manifest.global_batch
        if global_batch != began and config.sampling.batch_size != found.manifest.batch_size:
            changed.append(f"sampling.batch_size × workers was {began:,} and is {global_batch:,}")
        global_batch = began
    if changed:
        keys = [key for line in changed if (key := line.split()[0]) in before]
        again = [f"--set {shlex.quote(f'{key}={json.dumps(before[key])}')}" for key in keys]
        raise InputError(
            f"the run began with another configuration: {'; '.join(changed)}",
            where=str(run.path),
            remedy=f"resume with {' '.join(again) or 'the original values'}, or start over with "
            "another name or --overwrite",
        )
    if found is None and rejected:
        raise checkpoint.unusable(run.checkpoints, rejected)
    if found is None and run.summary.get("status") == "done":
        message = "this run is done, and has no checkpoint to resume from"
        remedy = "start over with --overwrite, or choose another name"
        raise InputError(message, where=str(run.path), remedy=remedy)
    return StartPoint(found, global_batch, tuple(rejected), resumed=True)


def initial_weights(config: Config, start: StartPoint | None = None) -> InitialWeights | None:
    """Find the weights of the run that ``train.init`` names; None without it, or if the run resumes
    from a checkpoint, which has them. Raises InputError if the run, its weights or its precision do
    not fit."""
    init = config.train.init
    if init is None or (start is not None and start.checkpoint is not None):
        return None
    source = open_run(init.run, str(config.storage))
    where = config.where("train.init.run")
    if source.path.resolve() == config.run_dir.resolve():
        remedy = "name another run, or give this job another name"
        raise ConfigError("a run cannot start from its own weights", where=where, remedy=remedy)
    precision = source.config["precision"]
    if (used := PRECISIONS[precision]).weights != config.arithmetic.weights:
        raise ConfigError(
            f"{source.shown} has {used.weights} weights (precision {precision}), and precision is "
            f"{config.precision} here",
            where=where,
            remedy=f"set precision to {precision}, or name another run",
        )
    found = weights.find(source.checkpoints(weights.FILE, weights.ABOUT, weights.ROWS))
    tables = {f"rows.{file.ntype}" for file in found.rows.files} if found.rows else set()
    init.check("exclude", [*weights.read(found), *sorted(tables)])
    wanted = [name for name in tables if not init.matches("exclude", name)]
    partition = None
    if wanted and config.model.embedding is not None:
        if (place := trained_partition(source)) is None or is_vacant(any_path(place)):
            raise InputError(
                f"the partition of {source.shown}, with the ids of its embedding rows, is gone",
                where=where,
                remedy="restore it, or exclude the tables: train.init.exclude: ['rows.*']",
            )
        partition = any_path(place)
    kept = None if source.replica is None else source.replica.place / CHECKPOINTS
    return InitialWeights(source.shown, found, partition, kept)


def trained_partition(run: Run) -> str | None:
    """Return the path or URI of the partition that a run was trained on; None if the run did not
    record it."""
    made = read_json(run.files / PARTITION).get("directory")
    if not isinstance(made, str):
        place: str | None = (run.config.get("partition") or {}).get("path")
        return place
    if isinstance(run.storage, Uri):
        mine = run.storage / "partitions" / Uri(made).name
        return mine.text if mine.shared == made else made
    return made


def _newest(config: Config, run: RunDir, show: Display) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest usable checkpoint, and what is wrong with each newer one.

    A checkpoint in an object store is downloaded; a local one that an earlier command could not
    upload is uploaded.
    """
    remote = RemoteCheckpoints.from_config(config)
    with storage_errors(run.checkpoints, InputError):
        found, rejected = checkpoint.find(run.checkpoints, config)
        if remote is None:
            return found, rejected
        with show.stage(f"checkpoints in {remote}"):  # which may take long to answer
            judge = partial(checkpoint.judge, config=config)
            above = found.name if found else ""
            newer, rejected_there = remote.fetch_newest(run.checkpoints, judge, above)
            if newer is None and found is not None:
                remote.send(found.state.parent, config.fault.keep)
    return newer or found, [f"{name} in {remote}: {why}" for name, why in rejected_there.items()]


def on_interrupt(run: RunDir) -> tuple[str, str]:
    """Return the message after Ctrl-C, and its remedy."""
    if not run.begun:
        return "interrupted before training began; nothing was written", "start it again"
    newest = checkpoint.newest(run.checkpoints)
    if run.uri is not None:
        with suppress(RaygnnError):  # without the store, the local checkpoints count
            there = RemoteCheckpoints(run.uri).names()
            newest = max([newest, *there])
    reached = f"step {int(newest.removeprefix('step-')):,}" if newest else "the start"
    what = f"interrupted; {run.shown} can resume from {reached}"
    return what, "continue with --resume and the same --set, or start over with --overwrite"


def finished(config: Config, run: RunDir, start: StartPoint, plan: Plan | None = None) -> str:
    """Return a note if the run has made all its steps; else an empty string, also if only the ranks
    will know. Without a plan, the steps of an epoch are counted in the summary of the run. Raises
    InputError if the newest checkpoint is beyond the configured number of steps."""
    if not start.resumed:  # files of a run that is overwritten may be damaged
        return ""
    per_epoch = _steps_per_epoch(run) if plan is None else plan.steps_per_epoch(config)
    limits = [config.train.max_steps, per_epoch and config.train.epochs * per_epoch]
    steps = min((limit for limit in limits if limit), default=None)
    if steps is None:
        return ""
    done = run.summary.get("steps", 0) if run.summary.get("status") == "done" else 0
    if done and done >= steps:
        return (
            f"this run is done: it made {done:,} steps, and train.epochs and train.max_steps allow "
            f"{steps:,}; raise them to continue training, or start over with --overwrite"
        )
    if start.checkpoint is not None and start.checkpoint.step > steps:
        raise InputError(
            f"the newest checkpoint is at step {start.checkpoint.step:,}, and train.epochs and "
            f"train.max_steps allow {steps:,} steps",
            where=str(start.checkpoint.state.parent),
            remedy="repeat the --set options of the first command, or start over with --overwrite",
        )
    return ""


def _steps_per_epoch(run: RunDir) -> int | None:
    """Return the number of optimizer steps that a finished run made in each epoch; None if it has
    not finished, or ``train.max_steps`` ended it. It is rounded up, since a callback may have ended
    the last epoch early."""
    summary, train = run.summary, _recorded(run).get("train")
    steps, epochs = summary.get("steps"), summary.get("epochs")
    if summary.get("status") != "done" or not (train and steps and epochs):
        return None
    return None if steps == train.get("max_steps") else -(-int(steps) // int(epochs))


def _recorded(run: RunDir) -> dict[str, Any]:
    try:
        return Run(run.path).config
    except RaygnnError:
        return {}
