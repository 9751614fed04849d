"""``raygnn predict`` and ``raygnn evaluate``: what a trained model says of the data of its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raygnn.config.places import unwritable
from raygnn.config.schema import Config
from raygnn.config.values import LARGEST
from raygnn.driver.job_plan import Plan
from raygnn.errors import InputError, TrainingError
from raygnn.graph.data import etype_str
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.read import read_ids
from raygnn.prediction.request import Asked, ask, moment_of
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import number
from raygnn.runs.run import Run
from raygnn.util.files import replacing, storage_errors
from raygnn.worker.job import ROWS, SPLITS
from raygnn.worker.planes.prediction_rows import numbers_of, pick_ntype, read_wanted

if TYPE_CHECKING:
    from os import PathLike

_SUFFIX = ".parquet"


@dataclass(frozen=True)
class Predicted:
    """A file of predictions.

    Attributes:
        path: of the Parquet file.
        rows: how many it has.
        split: what was predicted.
        workers: how many took part.
        left_out: graphs that could not be had and have no row (``guard.bad_samples``).
    """

    path: Path
    rows: int
    split: str
    workers: int
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "path": str(self.path)}


def predict(
    run: str | Path | Run,
    *,
    out: str | PathLike[str],
    split: str | None = None,
    task: str | None = None,
    scores: bool = False,
    calibrated: bool = False,
    ids: str | PathLike[str] | None = None,
    fanout: Sequence[int] | None = None,
    at: int | str | date | None = None,
    since: int | str | date | None = None,
    new_data: bool = False,
    trust: bool = False,
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
        split: ``train``, ``val``, ``test`` or ``all``; None = all, but see ``since``.
        task: which one, of a run with several.
        scores: also a probability for each class.
        calibrated: probabilities as they come true: with the scale and biases fitted to the
            validation split when training ended, ``calibration`` in ``summary.json``. The
            prediction is the class that they make likeliest.
        ids: a file of nodes or graphs, to predict for those alone: text with an id in each line,
            or Parquet with a column of them, ``node`` or ``graph``.
        fanout: neighbours that are drawn for each of these nodes, from it outward, -1 = all, in
            place of all of them.
        at: a time, such as ``2026-01-31``, or a number in the units of the data's times: all are
            predicted from what was before it, whenever they are; None = each from what was before
            it. Of runs with ``sampling.time``.
        since: a time as ``at``: only edges at this time or later get a row. None = all edges, but
            with ``new_data``, and neither ``split`` nor ``at``, those later than all edges of the
            training. Of tasks on edges in runs with ``sampling.time``.
        new_data: for data that the model was not trained on, of the same node and edge types and
            features, which ``overrides`` name; nodes and graphs need no labels and no splits.
        trust: import the classes that the run names, though another user or machine trained it;
            not needed for a run that this user trained on this machine.
        overrides: such as ``cluster.workers=1``: keys that do not change what was trained; with
            ``new_data`` also those of ``graph``.
        overwrite: replace ``out`` if it is there.
        verbose, display, started: see `raygnn.train`.

    Returns:
        The file. Columns: ``node`` (its id in the user's graph: a number, or of
        tables what they call it), ``edge`` (its number) with ``source``, ``target``,
        ``relation`` and ``time``, or ``graph``; ``prediction`` (a class, of tables its word; a
        number or a list of them), ``probability`` (of the class), ``split``, ``label`` (as
        ``prediction``, null where unknown), and ``scores``, of the classes in the order of their
        numbers; of links ``score`` instead; rows in order of the number.

    Raises:
        InputError: ``out`` cannot be written, or the run has no weights or not its data.
        PreflightError: it cannot be done here. Nothing was started.
        TrainingError: it failed on a rank.
        Interrupted: Ctrl-C.
    """
    file = _free_file(Path(out).expanduser().absolute(), overwrite)
    splits = (*SPLITS, "all")
    asked = ask(
        run,
        splits,
        split or "all",
        storage,
        overrides,
        verbose,
        display,
        started,
        new_data,
        task,
        True,
        at,
        trust,
    )
    begin = _since(asked, split, since)
    request = {"scores": scores, "since": begin, **_few(asked.one, ids, fanout)}
    if calibrated:
        request["calibration"] = _calibration(asked)
    of = f"{asked.task}, " if asked.task else ""
    of += "" if begin is None else f"edges since {begin}, "
    return _write(asked, file, overwrite, f"{of}split {asked.split} → {file}", **request)


def embed(
    run: str | Path | Run,
    *,
    out: str | PathLike[str],
    ntype: str | None = None,
    split: str = "all",
    at: int | str | date | None = None,
    new_data: bool = False,
    trust: bool = False,
    storage: str = "runs",
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> Predicted:
    """Write what a run's tested model makes of each node or graph before its last step.

    Of tasks on nodes that is what goes into the last layer; of tasks on edges what goes into the
    decoder; of tasks on graphs all pooled layers side by side; of several tasks what their heads
    have in common.

    Args:
        ntype: which nodes; None = those that the task is about.
        run, out, split, at, new_data, trust, storage, overrides, overwrite, verbose, display,
            started: see `predict`; runs with ``sampling.time`` need ``at``.

    Returns:
        The file. Columns: ``node`` or ``graph``, as of `predict`, ``split``, and ``embedding``,
        a list of float32.

    Raises:
        InputError: the model has no such rows, or none for this type; and see `predict`.
        PreflightError, TrainingError, Interrupted: see `predict`.
    """
    file = _free_file(Path(out).expanduser().absolute(), overwrite)
    splits = (*SPLITS, "all")
    asked = ask(
        run,
        splits,
        split,
        storage,
        overrides,
        verbose,
        display,
        started,
        new_data,
        at=at,
        trust=trust,
    )
    if asked.at is None and asked.config.sampling.time is not None:
        raise InputError(
            "in a run with sampling.time a node is another at any time",
            where="embeddings",
            remedy="say before when, such as --at 2026-01-31",
        )
    if asked.config.task.of_edges and split != "all":
        raise InputError(
            f"the splits of {asked.config.task.kind} are of edges, and embeddings are of nodes",
            where=f"--split {split}",
            remedy="leave it out, and choose nodes from the file that is written",
        )
    if ntype is not None and asked.config.task.of_graphs:
        raise InputError(
            "the embeddings of this run are of graphs",
            where=f"--ntype {ntype}",
            remedy="leave it out",
        )
    purpose = f"embeddings, split {split} → {file}"
    return _write(asked, file, overwrite, purpose, embeddings=True, ntype=ntype)


def evaluate(
    run: str | Path | Run,
    *,
    split: str | None = None,
    task: str | None = None,
    at: int | str | date | None = None,
    new_data: bool = False,
    trust: bool = False,
    storage: str = "runs",
    overrides: Sequence[str] = (),
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> dict[str, float]:
    """Measure the weights that a run was tested with, as it was done when training ended.

    Args:
        split: ``train``, ``val`` or ``test``; of new graphs also ``all``, those that have a target.
            None = all of new graphs, else ``test``.
        task: which one, of a run with several; None = all.
        run, at, new_data, trust, storage, overrides, verbose, display, started: see `predict`.

    Returns:
        The metrics, named as in ``summary.json``: ``test/accuracy``, …; of several tasks
        ``test/<task>/accuracy``.

    Raises:
        InputError, PreflightError, TrainingError, Interrupted: see `predict`.
    """
    asked = ask(
        run,
        SPLITS,
        split,
        storage,
        overrides,
        verbose,
        display,
        started,
        new_data,
        task,
        at=at,
        trust=trust,
    )
    with asked.answered(f"metrics of split {asked.split}", rows=False) as (found, _, _):
        # null, where a split has one class alone, as the NaN that it was
        metrics = {name: number(value) for name, value in found["metrics"].items()}
    asked.show.header({name: f"{value:.4f}" for name, value in metrics.items()})
    return metrics


def _calibration(asked: Asked) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the scale and bias that were fitted to the validation split when training ended.

    Raises:
        InputError: nothing was.
    """
    task = asked.one.task
    if not task.classifies and not task.several_labels:
        what, remedy = f"{task.kind} has no probabilities of classes", "leave it out"
        raise InputError(what, where="--calibrated", remedy=remedy)
    try:
        about = asked.summary["calibration"][asked.task]
        return tuple(map(float, about["scale"])), tuple(map(float, about["bias"]))
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "the run has no calibration, which training fits to the validation split at its end",
            where="--calibrated",
            remedy="leave it out, or train again with a validation split",
        ) from None


def _since(asked: Asked, split: str | None, since: Any) -> int | str | None:
    """Return the time from which on edges are predicted: see `predict`.

    Raises:
        InputError: it is no time, or the task is not on edges with times.
    """
    if since is not None and not asked.one.task.of_edges:
        what = f"{asked.one.task.kind} predicts for {asked.one.task.seeds}, which have one row each"
        raise InputError(what, where=f"--since {since}", remedy="leave it out")
    if since is not None:
        return moment_of(asked.config, since, "--since")
    latest = (asked.weights.latest or {}).get(asked.task)
    if latest is None or not asked.others or split is not None or asked.at is not None:
        return None
    return latest + 1


def _few(
    config: Config, ids: str | PathLike[str] | None, fanout: Sequence[int] | None
) -> dict[str, Any]:
    """What a `Request` says of a list of nodes or graphs.

    Raises:
        InputError: it cannot be read, or asks for what there is not.
    """
    task = config.task
    if ids is None:
        if fanout is not None:
            raise InputError(
                "neighbours are drawn for a list of nodes; without one all of them are used",
                where="--fanout",
                remedy="name a file with --ids, or leave --fanout out",
            )
        return {}
    if task.of_edges:
        raise InputError(
            f"{task.kind} predicts for edges, which have no ids",
            where=f"--ids {ids}",
            remedy="leave it out and choose from the file that is written",
        )
    depth = config.model.depth
    wrong = [each for each in fanout or () if not -1 <= each <= LARGEST]
    differ = config.model.draws_once and len(set(fanout or ())) > 1
    if fanout is not None and (task.of_graphs or len(fanout) != depth or wrong or differ):
        what = f"the model has {depth} layers"
        if task.of_graphs:
            what = "graphs have all their edges"
        elif differ:
            what = "with model.interface pyg all layers see one graph, and these numbers differ"
        elif len(fanout) == depth:
            what = f"{wrong[0]} is no number of neighbours"
        raise InputError(
            what,
            where=f"--fanout {','.join(map(str, fanout))}",
            remedy="leave it out"
            if task.of_graphs or not depth
            else f"give a number up to {LARGEST} for each, from the nodes outward; -1 = all",
        )
    file = Path(ids).expanduser().absolute()
    return {
        "wanted": read_wanted(file, task.unit),
        "fanout": None if fanout is None else tuple(fanout),
    }


def _write(asked: Asked, file: Path, overwrite: bool, purpose: str, **request: Any) -> Predicted:
    """Run the job, and put the ranks' rows into one file."""
    check = partial(_check_nodes, asked, request)
    with asked.answered(purpose, check, rows=True, **request) as (found, place, plan):
        key = asked.one.task.unit
        if request.get("embeddings"):
            key = "graph" if asked.config.task.of_graphs else "node"
        names = _names(plan, asked, request.get("ntype"), key)
        merge_rows(place / ROWS, found, key, file, overwrite, asked.show, names)
    left_out = found.get("left_out", 0)
    made = Predicted(file, found["rows"], asked.split, found["workers"], left_out)
    if left_out:
        asked.show.note(f"{left_out:,} graphs could not be had, and have no row")
    asked.show.note(f"{made.rows:,} rows in {file}")
    return made


def _check_nodes(asked: Asked, request: Mapping[str, Any], plan: Plan) -> None:
    """Look for what the ranks would look for before they start.

    Raises:
        InputError: embeddings are of several node types and none is named, or a node or graph is
            not there.
    """
    goals, ntype = plan.goals.values(), request.get("ntype")
    if request.get("embeddings") and any(goal.edges for goal in goals):
        of_edges = [goal.edges.etype for goal in goals if goal.edges]
        there = [end for etype in of_edges for end in (etype[0], etype[2])]
        pick_ntype(ntype, [*dict.fromkeys([*there, *(g.ntype for g in goals if g.ntype)])])
    if (wanted := request.get("wanted")) is not None:
        known = plan.input.ids(plan.goals[asked.task].ntype)
        if known is not None:
            numbers_of(wanted, *known)


def _free_file(file: Path, overwrite: bool) -> Path:
    """The file of ``--out``, if it can be written.

    Raises:
        InputError: it cannot.
    """
    other = "choose another --out"
    what, remedy = None, other
    if file.suffix not in ("", _SUFFIX):
        what, remedy = f"a {_SUFFIX} file is written", f"name it {file.stem}{_SUFFIX}"
        raise InputError(what, where=str(file), remedy=remedy)
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


def _names(plan: Plan, asked: Asked, ntype: str | None, key: str) -> dict[str, Any]:
    """Column → what the user calls the nodes, relations or classes in it; none where that is their
    number.

    Args:
        ntype: of the nodes, if it is not the one that the task is about.
        key: the first column.

    Raises:
        DataError: the partition's file of them is damaged.
    """
    goal = plan.goals.get(asked.task) or next(iter(plan.goals.values()))
    if plan.input.place is None or (goal.ntype is None and goal.edges is None):
        return {}
    meta = read_meta(plan.input.place)
    words = {**meta.names, **(asked.weights.words or {})}
    if goal.edges is None or key == "node":
        if ntype is None:
            ntype = goal.ntype if goal.edges is None else goal.edges.etype[0]
        assert ntype is not None
        found = {"node": read_ids(meta, ntype)}
    else:
        etype, relation = goal.edges.etype, goal.edges.relation
        found = {"source": read_ids(meta, etype[0]), "target": read_ids(meta, etype[2])}
        names = words.get(f"{etype_str(etype)}/{relation}")
        if names is not None:
            found["relation"] = pa.array(names)
    kind = goal.ntype if goal.edges is None else etype_str(goal.edges.etype)
    classes = words.get(f"{kind}/{asked.one.task.target}")
    if classes is not None and asked.one.task.classifies:
        spare = [None] * (2 - len(classes))  # a model has two classes at least
        found |= dict.fromkeys(("prediction", "label"), pa.array([*classes, *spare]))
    return {column: names for column, names in found.items() if names is not None}


def merge_rows(
    place: Path,
    found: dict[str, Any],
    key: str,
    file: Path,
    overwrite: bool,
    show: Display,
    names: Mapping[str, Any] | None = None,
) -> None:
    """Put the ranks' rows into one file, sorted, with what the user calls the numbers in them."""
    files = [place / f"rank-{rank}.parquet" for rank in range(found["workers"])]
    files = [each for each in files if each.exists()]
    with (
        show.stage("merge"),
        storage_errors(file, InputError, "choose another --out"),
        replacing(file) as out,
    ):
        rows = merge_files(files, out, key, names)
        if rows != found["rows"]:
            raise TrainingError(
                f"the workers wrote {found['rows']:,} rows, and {rows:,} are there",
                where=str(place),
                remedy="see that all nodes mount the same storage",
            )
        _free_file(file, overwrite)  # which may have changed meanwhile


# ── files that are sorted by an id, merged into one that is, with little of them in memory ────

# of the files that are merged
_ROWS = 2**17  # in memory, of all together
_VALUES = 2**24  # likewise: fewer rows where each has many, as of the scores of many classes
_FEWEST = 2**6  # rows of each
_BUFFER = 2**20  # bytes that a column of a file is read in


def merge_files(
    files: Sequence[Path], out: BinaryIO, key: str, names: Mapping[str, Any] | None = None
) -> int:
    """Merge Parquet files with one schema, each ascending by the column ``key``.

    Args:
        out: takes the Parquet file.
        names: column of numbers → pyarrow array, what to write in place of each; columns that the
            files do not have are passed over.

    Returns:
        The number of rows. Of no files there are none, and nothing is written.

    Raises:
        OSError: a file cannot be read or written.
    """
    with ExitStack() as opened:
        sources = [
            opened.enter_context(pq.ParquetFile(file, buffer_size=_BUFFER)) for file in files
        ]
        most = min(_ROWS, _VALUES // max(1, max(map(_width, sources), default=1)))
        batch = max(_FEWEST, most // max(1, len(files)))
        inputs = [_SortedFile(source.iter_batches(batch_size=batch), key) for source in sources]
        if not sources:
            return 0
        schema = sources[0].schema_arrow
        named = {
            schema.get_field_index(column): values
            for column, values in (names or {}).items()
            if column in schema.names
        }
        for place, values in named.items():
            schema = schema.set(place, pa.field(schema.field(place).name, values.type))
        writer = opened.enter_context(pq.ParquetWriter(out, schema))
        rows = 0
        while pending := [source for source in inputs if source.fill()]:
            # whatever a file still has is above the last id that it has in memory
            bound = min(source.last for source in pending)
            table = pa.concat_tables(source.up_to(bound) for source in pending)
            table = table.take(pc.sort_indices(table[key]))
            for place, values in named.items():
                called = values.take(table.column(place))
                table = table.set_column(place, schema.field(place), called)
            writer.write_table(table)
            rows += table.num_rows
        return rows


def _width(source: pq.ParquetFile) -> int:
    """Numbers and texts in a row of a file, those of its lists included."""
    if not source.metadata.num_row_groups:
        return 0
    group = source.metadata.row_group(0)
    values = sum(group.column(i).num_values for i in range(group.num_columns))
    return int(values) // max(1, group.num_rows)


class _SortedFile:
    """One file, of which a batch is in memory."""

    def __init__(self, batches: Iterator[pa.RecordBatch], key: str):
        self._batches = batches
        self._key = key
        self._held: pa.Table | None = None

    def fill(self) -> bool:
        """See that there are rows in memory; False at the end of the file."""
        while self._held is None or not self._held.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self._held = pa.Table.from_batches([batch])
        return True

    @property
    def last(self) -> int:
        """The highest id in memory."""
        assert self._held is not None
        return int(self._held[self._key][-1].as_py())

    def up_to(self, bound: int) -> pa.Table:
        """Take the rows with ids up to this one out of memory."""
        assert self._held is not None
        count = int(pc.sum(pc.less_equal(self._held[self._key], bound)).as_py())
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken
