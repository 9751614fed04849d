"""The job of a prediction with a trained model, beside its run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from raygnn.checkpoint import weights
from raygnn.config.schema import Config
from raygnn.config.values import find_user_modules, parse_moment
from raygnn.driver.job_plan import Plan, display_of
from raygnn.driver.launch import Launch
from raygnn.driver.session import Session, session_beside
from raygnn.driver.watch import Watch
from raygnn.errors import InputError
from raygnn.prediction.asked_config import config_for_others, config_of
from raygnn.runs.display import Display
from raygnn.runs.run import Run, open_run
from raygnn.runs.run_directory import CHECKPOINTS
from raygnn.runs.trust import classes
from raygnn.storage.remote import RemotePath
from raygnn.worker.job import SPLITS, Request

_PLACE = ".predicting"  # in the storage; no run can have this name


@dataclass(frozen=True)
class Asked:
    """Planned prediction, before it starts.

    Attributes:
        others: the data are new data.
        task: name of one of several tasks; "" = the only one, or all.
        kept: path of the weights, if they are in an object store.
        at: see `Request`.
        summary: of the run.
    """

    config: Config
    weights: weights.Weights
    split: str
    show: Display
    verbose: bool
    started: float
    others: bool
    task: str = ""
    kept: RemotePath | None = None
    at: int | str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def one(self) -> Config:
        """Configuration for that task alone."""
        return self.config.of(self.task) if self.task else self.config

    @contextmanager
    def answered(
        self, purpose: str, check: Callable[[Plan], object] | None = None, **request: Any
    ) -> Iterator[tuple[dict[str, Any], Path, Plan]]:
        """Run the job; yields rank 0's result, the directory with the ranks' rows, which is removed
        afterwards, and the job's plan.

        Args:
            check: raises to refuse a plan before workers start.
            request: attributes of the `Request`.

        Raises:
            InputError, PreflightError, TrainingError, Interrupted: see `raygnn.train`.
        """
        if self.others:
            request["sizes"] = self.weights.sizes
        elif self.weights.data is None:
            self.show.note("the run has no record of its data: they are not compared")
        with session_beside(
            self.config,
            _PLACE,
            self.show,
            self.started,
            interrupted=lambda run: "interrupted; nothing was written",
            verbose=self.verbose,
            purpose=purpose,
        ) as session:
            if check is not None:
                check(session.plan)
            answer = session.launch(
                _watch,
                request=Request(
                    self.weights, self.split, at=self.at, task=self.task, kept=self.kept, **request
                ),
                program="raygnn.prediction.worker_side:Predicting",
            )
            session.run.update_summary(status="done")
            if not answer.get("rows") and (since := request.get("since")) is not None:
                raise InputError(
                    f"no edge of the split {self.split!r} is at {since} or later",
                    where="--since",
                    remedy="name an earlier time with --since, or all edges with --split all",
                )
            if not answer.get("rows") and (lists := request.get("lists")) is not None:
                what, where = "the sources have edges to all targets already", "--known exclude"
                remedy = "pass --known keep, or name other sources with --ids"
                if lists.candidates is not None:
                    what, where = "no source has a candidate", "--candidates"
                    remedy = "name others, or pass --known keep"
                raise InputError(what, where=where, remedy=remedy)
            if not answer.get("rows") and not answer.get("metrics"):
                unlabelled = not request["rows"] and not self.one.task.of_links
                what = "these data have no labels" if unlabelled else "the data have nothing"
                raise InputError(
                    f"{what} in the split {self.split!r}",
                    where=f"--split {self.split}",
                    remedy="choose another split" + ", or give them labels" * unlabelled,
                )
            yield answer, session.run.path, session.plan


def ask(
    run: str | Path | Run,
    splits: Sequence[str],
    split: str | None,
    storage: str,
    overrides: Sequence[str],
    verbose: bool,
    display: bool,
    started: float | None,
    others: bool = False,
    task: str | None = None,
    one: bool = False,
    at: Any = None,
    trust: bool = False,
    rows: Path | None = None,
    tables: bool = True,
) -> Asked:
    """Plan a prediction.

    Args:
        split: one of ``splits``, for new graphs also ``all``; None = ``all`` for new graphs, else
            ``test``.
        others: for new data.
        task: name of one of several tasks.
        one: True if one of several tasks must be chosen.
        at: time up to which data are seen, a number, text or date; None = each seed sees what was
            before its own time.
        trust: see `raygnn.runs.trust.usable`.
        rows: file with rows in place of those of the training table.
        tables: False if no training table is needed.

    Raises:
        InputError: there is no such run, split or task; it has no weights, or does not support new
            data or times; or it names classes and is not trusted.
    """
    there = run if isinstance(run, Run) else open_run(run, storage)
    found = weights.find(there.checkpoints(weights.FILE, weights.ABOUT, weights.ROWS))
    if others:
        config = config_for_others(there, found, overrides, trust)
    else:
        config = config_of(there, overrides, trust)
    chosen = _split(split, splits, config if others and config.task.of_graphs else None)
    name, moment = _task(config, task, one), None if at is None else moment_of(config, at)
    started = time.time() if started is None else started
    show = display_of(display, verbose)
    if any(classes(config.to_dict())):
        find_user_modules()
    env = (there.config.get("comm") or {}).get("env")
    env = env if isinstance(env, dict) else {}
    if unused := sorted(map(str, env.keys() - config.comm.env.keys())):
        show.note(
            f"environment variables of the run are not used: {', '.join(unused)}; give those that "
            "are needed with --set comm.env.NAME=VALUE"
        )
    kept = None if there.replica is None else there.replica.place / CHECKPOINTS
    if rows is not None:
        config = of_rows(config, rows, name, chosen)
    needed = () if not tables else (name,) if name else None
    config = config.asking(found.words, at_once=moment is not None, rows_of=needed)
    return Asked(
        config, found, chosen, show, verbose, started, others, name, kept, moment, there.summary
    )


def _split(split: str | None, splits: Sequence[str], new_graphs: Config | None) -> str:
    """Return the split; raises InputError if there is no such split.

    Args:
        new_graphs: the configuration, if it names graphs that the model was not trained on.
    """
    if new_graphs is None:
        found = split or "test"
    else:
        found, splits = split or "all", list(dict.fromkeys([*splits, "all"]))
        graph = new_graphs.graph
        if found in SPLITS and getattr(graph, "dataset", None) is None:
            raise InputError(
                f"files of new graphs have no split {found!r}: shares and folds are of the graphs "
                "that it was trained on",
                where=f"--split {found}",
                remedy="leave it out: all graphs are asked about",
            )
    if found not in splits:
        raise InputError(
            f"there is no split {found!r}",
            where=f"--split {found}",
            remedy=f"choose one of {', '.join(splits)}",
        )
    return found


def of_rows(config: Config, rows: Path, name: str, split: str) -> Config:
    """Return the configuration with other rows for the task ``name``, "" for the only one: of this
    split, or with ``all`` of none. Raises InputError if it has no training table."""
    task, table = config.of(name).task, config.of(name).table
    if table is None:
        what = f"{task.kind} of this run has no training table (task.table)"
        raise InputError(what, where=f"--rows {rows}", remedy="leave it out")
    files = rows if split == "all" else {split: rows}
    table = table.model_copy(update={"files": files, "sql": None, "url": None, "split": None})
    task = task.model_copy(update={"table": table, "split": None})
    changed = {"tasks": {**config.tasks, name: task}} if config.tasks else {"task": task}
    return config.model_copy(update=changed)


def _task(config: Config, task: str | None, one: bool) -> str:
    names = list(config.tasks or ())
    if task is None and (not names or not one):
        return ""
    if task is None and len(names) == 1:
        return names[0]
    if task in names:
        return task
    what = f"there is no task {task!r}" if names else "this run has one task, which has no name"
    raise InputError(
        "the run has several tasks" if task is None else what,
        where="--task" if task is None else f"--task {task}",
        remedy=f"choose one of {', '.join(names)}" if names else "leave it out",
    )


def moment_of(config: Config, at: Any, option: str = "--at") -> int | str:
    """Return the time of ``--at`` or ``--since``; see `Request`.

    Raises:
        InputError: it is not a time, or the run has no times.
    """
    where = f"{option} {at}"
    if config.sampling.time is None:
        what, remedy = "the run was trained without times (sampling.time)", "leave it out"
        raise InputError(what, where=where, remedy=remedy)
    is_number = isinstance(at, str) and re.fullmatch(r"\s*-?\d+\s*", at)
    try:
        return parse_moment(int(at) if is_number else at)
    except PydanticCustomError as error:
        remedy = "give one, or leave it out"
        raise InputError(error.message(), where=where, remedy=remedy) from None


def _watch(session: Session, launch: Launch) -> None:
    watch = Watch(session, launch)
    with session.show.stage("prediction") as detail:
        watch.start_up(detail, arrived=lambda: False)
    watch.show_notices()
