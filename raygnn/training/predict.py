"""``raygnn predict`` and ``raygnn evaluate``: what a trained model says of the data of its run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.config.load import load_config
from raygnn.config.paths import unwritable
from raygnn.config.resume import changes, fixed
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, InputError, TrainingError
from raygnn.graph.atomic import is_vacant
from raygnn.graph.data import etype_str
from raygnn.graph.layout import read_meta
from raygnn.runs.display import Display
from raygnn.runs.files import read_json, replacing, storage_errors
from raygnn.runs.metrics import MetricsTail
from raygnn.runs.run import Run, open_run
from raygnn.runs.store import CHECKPOINTS, PARTITION, RunDir
from raygnn.training import weights
from raygnn.training.aside import run_aside
from raygnn.training.coming import Coming
from raygnn.training.heartbeat import Heartbeat
from raygnn.training.job import ROWS, SPLITS, Request
from raygnn.training.launch import Launch
from raygnn.training.plan import Plan
from raygnn.training.showing import display_of
from raygnn.training.watch import News

if TYPE_CHECKING:
    from os import PathLike

_PLACE = ".predicting"  # in the storage; no run can have this name
_POLL = 0.2  # seconds


@dataclass(frozen=True)
class Predicted:
    """A file of predictions.

    Attributes:
        path: of the Parquet file.
        rows: how many it has.
        split: what was predicted.
        workers: how many took part.
    """

    path: Path
    rows: int
    split: str
    workers: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "path": str(self.path)}


def predict(
    run: str | Path | Run,
    *,
    out: str | PathLike[str],
    split: str = "all",
    scores: bool = False,
    storage: str = "runs",
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> Predicted:
    """Predict with the weights that a run was tested with, and write a row for each node, edge
    or graph.

    Blocks. The model is run as it is when training ends, exactly, over the data that it was
    trained on. The run directory stays as it is.

    Args:
        run: its path, or its name within ``storage``.
        out: the Parquet file to write; whole, or not at all.
        split: ``train``, ``val``, ``test`` or ``all``.
        scores: also a probability for each class.
        overrides: such as ``cluster.workers=1``: keys that do not change what was trained.
        overwrite: replace ``out`` if it is there.
        verbose, display, started: see `raygnn.train`.

    Returns:
        The file. Columns: ``node`` (its id in the user's graph: a number, or of
        tables what they call it), ``edge`` (its number) with ``source``, ``target`` and
        ``relation``, or ``graph``; ``prediction`` (a class, a number or a list of them),
        ``probability`` (of the class), ``split``, ``label`` (null where unknown), and ``scores``;
        of links ``score`` instead; rows in order of the number.

    Raises:
        InputError: ``out`` cannot be written, or the run has no weights or not its data.
        PreflightError: it cannot be done here. Nothing was started.
        TrainingError: it failed on a rank.
        Interrupted: Ctrl-C.
    """
    file = free_file(Path(out).expanduser().absolute(), overwrite)
    asked = _ask(run, (*SPLITS, "all"), split, storage, overrides, verbose, display, started)
    purpose = f"split {split} → {file}"
    with asked.answered(purpose, rows=True, scores=scores) as (found, place, plan):
        ids = _ids(plan)
        _merge(place / ROWS, found, asked.config, file, overwrite, asked.show, ids)
    made = Predicted(file, found["rows"], split, found["workers"])
    asked.show.note(f"{made.rows:,} rows in {file}")
    return made


def evaluate(
    run: str | Path | Run,
    *,
    split: str = "test",
    storage: str = "runs",
    overrides: Sequence[str] = (),
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> dict[str, float]:
    """Measure the weights that a run was tested with, as it was done when training ended.

    Args:
        split: ``train``, ``val`` or ``test``.
        run, storage, overrides, verbose, display, started: see `predict`.

    Returns:
        The metrics, named as in ``summary.json``: ``test/accuracy``, …

    Raises:
        InputError, PreflightError, TrainingError, Interrupted: see `predict`.
    """
    asked = _ask(run, SPLITS, split, storage, overrides, verbose, display, started)
    with asked.answered(f"metrics of split {split}", rows=False) as (found, _, _):
        metrics: dict[str, float] = found["metrics"]
    asked.show.header({name: f"{value:.4f}" for name, value in metrics.items()})
    return metrics


@dataclass(frozen=True)
class _Asked:
    """What is to be predicted, and with what; nothing has started."""

    config: Config
    weights: weights.Weights
    split: str
    show: Display
    verbose: bool
    started: float

    @contextmanager
    def answered(self, purpose: str, **request: Any) -> Iterator[tuple[dict[str, Any], Path, Plan]]:
        """Run the job; see `run_aside`. Yields also what it was planned as."""
        plans: list[Plan] = []

        def watching(config: Config, plan: Plan, *more: Any) -> int:
            plans.append(plan)
            return _watch(config, plan, *more)

        if self.weights.data is None:
            self.show.note("of what data it was trained on there is no record: not compared")
        with run_aside(
            self.config,
            _PLACE,
            self.show,
            watching,
            lambda run: "interrupted; nothing was written",
            verbose=self.verbose,
            started=self.started,
            purpose=purpose,
            keep=False,
            request=Request(self.weights, self.split, **request),
        ) as answer:
            if not answer[0].get("rows") and not answer[0].get("metrics"):
                raise InputError(
                    f"the data have nothing in the split {self.split!r}",
                    where=f"--split {self.split}",
                    remedy="choose another split",
                )
            yield (*answer, plans[-1])


def _ask(
    run: str | Path | Run,
    splits: Sequence[str],
    split: str,
    storage: str,
    overrides: Sequence[str],
    verbose: bool,
    display: bool,
    started: float | None,
) -> _Asked:
    if split not in splits:
        raise InputError(
            f"there is no split {split!r}",
            where=f"--split {split}",
            remedy=f"choose one of {', '.join(splits)}",
        )
    there = run if isinstance(run, Run) else open_run(run, storage)
    found = weights.find(there.path / CHECKPOINTS)
    config = _config(there, overrides)
    started = time.time() if started is None else started
    return _Asked(config, found, split, display_of(display, verbose), verbose, started)


def _config(run: Run, overrides: Sequence[str]) -> Config:
    """The run's configuration, wherever its directory lies by now.

    Raises:
        ConfigError: an override is wrong, or changes what was trained; a value is needed that
            the run does not keep.
    """
    values = {**run.config, "storage": str(run.path.parent), "name": run.path.name}
    if not any(key.startswith(("graph", "partition")) for key in overrides):
        values |= _partition(run)
    config = load_config(values, overrides)
    if changed := changes(fixed(run.config), config):
        raise ConfigError(
            f"a trained model cannot be changed: {'; '.join(changed)}",
            where="--set",
            remedy="change keys of cluster, comm, staging, fault, partition, or graph.path",
        )
    return config


def _partition(run: Run) -> dict[str, Any]:
    """Sections for the partition that the run was trained on: that one, or one like it if it is
    gone, since another number of workers would ask for another.

    The graph's files need not be there, or be read, where the partition is.
    """
    made = read_json(run.path / PARTITION)
    place, parts = made.get("directory"), made.get("parts")
    if not isinstance(place, str) or not isinstance(parts, list):
        return {}  # one that others made, or graphs
    if not is_vacant(Path(place)):
        return {"graph": None, "partition": {"path": place}}
    return {"partition": {**(run.config.get("partition") or {}), "parts": len(parts)}}


def free_file(file: Path, overwrite: bool) -> Path:
    """The file of ``--out``, if it can be written.

    Raises:
        InputError: it cannot.
    """
    other = "choose another --out"
    what, remedy = None, other
    with storage_errors(file, InputError, other):  # of a name that is too long
        if not file.parent.is_dir():
            what, remedy = f"there is no directory {file.parent}", f"make it, or {other}"
        elif file.exists() and not file.is_file():
            what = "this is no file but a directory or a device"
        elif file.exists() and not overwrite:
            what, remedy = "this file is there already", f"{other}, or pass --overwrite"
        elif (why := unwritable(file.parent)) is not None:
            what = f"it cannot be written: {why}"
    if what is not None:
        raise InputError(what, where=str(file), remedy=remedy)
    return file


def _ids(plan: Plan) -> dict[str, Any]:
    """Column → what the user calls the nodes or relations in it; none where that is their number.

    Raises:
        DataError: the partition's file of them is damaged.
    """
    if plan.input.place is None or (plan.ntype is None and plan.edges is None):
        return {}
    import pyarrow as pa

    from raygnn.graph.idfile import read_ids

    meta = read_meta(plan.input.place)
    if plan.edges is None:
        assert plan.ntype is not None
        found = {"node": read_ids(meta, plan.ntype)}
    else:
        etype, relation = plan.edges.etype, plan.edges.relation
        found = {"source": read_ids(meta, etype[0]), "target": read_ids(meta, etype[2])}
        names = (meta.manifest or {}).get("names", {}).get(f"{etype_str(etype)}/{relation}")
        if names is not None:
            found["relation"] = pa.array(names)
    return {column: names for column, names in found.items() if names is not None}


def _merge(
    place: Path,
    found: dict[str, Any],
    config: Config,
    file: Path,
    overwrite: bool,
    show: Display,
    ids: Mapping[str, Any],
) -> None:
    """Put the ranks' rows into one file, sorted, with the user's ids where there are some."""
    from raygnn.training.merge import merge

    files = [place / f"rank-{rank}.parquet" for rank in range(found["workers"])]
    files = [each for each in files if each.exists()]
    key = config.task.unit
    with (
        show.stage("merge"),
        storage_errors(file, InputError, "choose another --out"),
        replacing(file) as out,
    ):
        rows = merge(files, out, key, ids)
        if rows != found["rows"]:
            raise TrainingError(
                f"the workers wrote {found['rows']:,} rows, and {rows:,} are there",
                where=str(place),
                remedy="see that all nodes mount the same storage",
            )
        free_file(file, overwrite)  # which may have changed meanwhile


def _watch(
    config: Config, plan: Plan, run: RunDir, show: Display, launch: Launch, tail: MetricsTail
) -> int:
    """Tell how far the ranks are until they are through; returns the parts."""
    parts = plan.input.made(show).parts
    heartbeat = Heartbeat(run.path, config.fault.heartbeat.seconds, show, launch)
    news = News(run, show)
    with show.stage("prediction") as detail:
        coming = Coming(run.path, launch.started, detail)
        startup = launch.startup(show)
        while launch.running():
            startup.look()
            coming.look()
            heartbeat.look()
            news.look()
            time.sleep(_POLL)
    news.look()
    return parts
