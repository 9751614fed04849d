"""The job of a prediction with a trained model, beside its run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from raygnn.checkpoint import weights
from raygnn.config.schema import Config
from raygnn.config.values import LARGEST, find_user_modules, parse_moment
from raygnn.driver.job_plan import Plan, display_of
from raygnn.driver.launch import Launch
from raygnn.driver.session import Session, session_beside
from raygnn.driver.watch import Watch
from raygnn.errors import InputError
from raygnn.prediction.run_config import config_for_others, config_of
from raygnn.runs.display import Display
from raygnn.runs.run import Run, open_run
from raygnn.runs.run_directory import CHECKPOINTS
from raygnn.runs.trust import classes
from raygnn.worker.job import SPLITS, Request


@dataclass(frozen=True)
class Asked:
    """Planned prediction, before it starts.

    Attributes:
        new_data: the model was not trained on these data.
        task: name of one of several tasks; "" = the only one, or all.
        at: see `Request`.
    """

    run: Run
    config: Config
    weights: weights.Weights
    split: str
    show: Display
    verbose: bool
    started: float
    new_data: bool
    task: str
    at: int | str | None

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
        if self.new_data:
            request["sizes"] = self.weights.sizes
        with session_beside(
            self.config, self.show, self.started, verbose=self.verbose, purpose=purpose
        ) as session:
            if check is not None:
                check(session.plan)
            replica = self.run.replica
            kept = None if replica is None else replica.place / CHECKPOINTS
            known: dict[str, Any] = {"at": self.at, "task": self.task, "kept": kept}
            answer = session.launch(
                _watch,
                request=Request(self.weights, self.split, **known, **request),
                program="raygnn.prediction.worker_side:Predicting",
            )
            session.run.update_summary(status="done")
            if not answer.get("rows") and not answer.get("metrics"):
                raise self._nothing(request)
            yield answer, session.run.path, session.plan

    def _nothing(self, request: Mapping[str, Any]) -> InputError:
        """Return the error of a prediction without rows and metrics."""
        where = f"--split {self.split}"
        if request.get("since") is not None:
            where = "--since"
            what = f"no edge of the split {self.split!r} is at {request['since']} or later"
            remedy = "name an earlier time with --since, or all edges with --split all"
        elif (lists := request.get("lists")) is None:
            unlabelled = not request["rows"] and not self.one.task.of_links
            what = "these data have no labels" if unlabelled else "the data have nothing"
            what += f" in the split {self.split!r}"
            remedy = "choose another split" + ", or give them labels" * unlabelled
        elif lists.candidates is None:
            what, where = "the sources have edges to all targets already", "--known exclude"
            remedy = "pass --known keep, or name other sources with --ids"
        else:
            what, where = "no source has a candidate", "--candidates"
            remedy = "name others, or pass --known keep"
        return InputError(what, where=where, remedy=remedy)


def ask(
    run: str | Path | Run,
    splits: Sequence[str] = ("all",),
    split: str | None = "all",
    *,
    task: str | None = None,
    one: bool = False,
    at: Any = None,
    new_data: bool = False,
    rows: Path | None = None,
    tables: bool = True,
    trust: bool = False,
    storage: str = "runs",
    overrides: Sequence[str] = (),
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> Asked:
    """Plan a prediction.

    Args:
        split: one of ``splits``, for new graphs also ``all``; None = ``all`` for new graphs, else
            ``test``.
        one: one of several tasks must be chosen.
        rows: file with rows in place of those of the training table.
        tables: False if no training table is needed.
        run, task, at, new_data, trust, storage, overrides, verbose, display, started: see
            `raygnn.predict`.

    Raises:
        InputError: there is no such run, split or task; it has no weights, or does not support new
            data or times; or it names classes and is not trusted.
    """
    run = run if isinstance(run, Run) else open_run(run, storage)
    found = weights.find(run.checkpoints(weights.FILE, weights.ABOUT, weights.ROWS))
    if new_data:
        config = config_for_others(run, found, overrides, trust)
    else:
        config = config_of(run, overrides, trust)
    split = _split(split, splits, config if new_data and config.task.of_graphs else None)
    name, moment = _task(config, task, one), None if at is None else moment_of(config, at)
    started = time.time() if started is None else started
    show = display_of(display, verbose)
    if any(classes(config.to_dict())):
        find_user_modules()
    env = (run.config.get("comm") or {}).get("env")
    env = env if isinstance(env, dict) else {}
    if unused := sorted(map(str, env.keys() - config.comm.env.keys())):
        show.note(
            f"environment variables of the run are not used: {', '.join(unused)}; give those that "
            "are needed with --set comm.env.NAME=VALUE"
        )
    if rows is not None:
        config = of_rows(config, rows, name, split)
    needed = () if not tables else (name,) if name else None
    config = config.asking(found.words, at_once=moment is not None, rows_of=needed)
    return Asked(run, config, found, split, show, verbose, started, new_data, name, moment)


def _split(split: str | None, splits: Sequence[str], new_graphs: Config | None) -> str:
    """Return the split; raises InputError if there is no such split.

    Args:
        new_graphs: the configuration, if it names graphs that the model was not trained on.
    """
    found, what, remedy = split or ("test" if new_graphs is None else "all"), None, ""
    if new_graphs is not None:
        splits = list(dict.fromkeys([*splits, "all"]))
        if found in SPLITS and getattr(new_graphs.graph, "dataset", None) is None:
            what = f"files of new graphs have no split {found!r}: fractions and folds divide the "
            what += "training graphs only"
            remedy = "leave it out to predict for all graphs"
    if found not in splits:
        what, remedy = f"there is no split {found!r}", f"choose one of {', '.join(splits)}"
    if what is not None:
        raise InputError(what, where=f"--split {found}", remedy=remedy)
    return found


def of_rows(config: Config, rows: Path, name: str, split: str) -> Config:
    """Return the configuration with other rows for the task ``name`` ("" = the only one): in this
    split, or with ``all`` in none. Raises InputError if the task has no training table."""
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
    if task in names:
        return str(task)
    if task is None and (not one or len(names) < 2):
        return names[0] if one and names else ""
    what, where = "the run has several tasks", "--task"
    if task is not None:
        what, where = f"there is no task {task!r}", f"--task {task}"
    remedy = f"choose one of {', '.join(names)}" if names else "leave it out"
    if not names:
        what = "this run has one task, which has no name"
    raise InputError(what, where=where, remedy=remedy)


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


def check_fanout(config: Config, fanout: Sequence[int]) -> tuple[str, str] | None:
    """Return what is wrong with numbers of neighbours, and a remedy; None if the model can use
    them."""
    depth = config.model.depth
    remedy = "give a number for each layer, from the nodes outward; -1 = all"
    if len(fanout) != depth:
        return f"the model has {depth} layers", remedy if depth else "leave it out"
    if wrong := [each for each in fanout if not -1 <= each <= LARGEST]:
        return f"{wrong[0]} is not between -1 and {LARGEST} neighbours", remedy
    if config.model.draws_once and len(set(fanout)) > 1:
        what = "all layers of this model see one graph (model.interface: pyg), and these numbers "
        return what + "differ", "give equal ones"
    return None


def _watch(session: Session, launch: Launch) -> None:
    watch = Watch(session, launch)
    with session.show.stage("prediction") as detail:
        watch.start_up(detail, arrived=lambda: False)
    watch.show_notices()
