"""``raygnn predict``, ``recommend``, ``embed`` and ``evaluate``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from raygnn.config.schema import Config
from raygnn.config.values import LARGEST
from raygnn.driver.job_plan import Plan
from raygnn.errors import InputError
from raygnn.graph.data import etype_str
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.read import read_ids
from raygnn.prediction.merge import check_names, free_file, merge_rows, rows_file
from raygnn.prediction.request import Asked, ask, check_fanout, moment_of
from raygnn.runs.metrics_files import number
from raygnn.runs.run import Run
from raygnn.worker.job import RELATIONS, ROWS, SPLITS, TopLists
from raygnn.worker.planes.prediction_rows import (
    check_array,
    numbers_of,
    pick_ntype,
    read_wanted,
    relation_of,
)
from raygnn.worker.planes.vocabulary import target_key

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True)
class Predicted:
    """Parquet file of predictions: its path, number of rows, split, and number of workers."""

    path: Path
    rows: int
    split: str
    workers: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
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
    rows: str | PathLike[str] | None = None,
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
    """Predict with a run's tested weights, and write a row for each node, edge or graph.

    Blocks. Inference is exact, over the data of the training, as at its end. The run directory does
    not change.

    Args:
        run: path of the run, or its name within ``storage``.
        out: Parquet file, written in one step.
        split: ``train``, ``val``, ``test`` or ``all``; None = all, but see ``since``.
        task: name of one of several tasks.
        scores: also write the probabilities of all classes.
        calibrated: use the scale and biases fitted to the validation split at the end of training
            (``calibration`` in ``summary.json``) for probabilities and predictions.
        ids: file with the nodes or graphs to predict for: text with an id in each line, or
            Parquet with a column ``node`` or ``graph``.
        rows: CSV or Parquet with the entity and time of rows in place of the training table's; the
            file then has its columns, in its order, and the prediction beside them.
        fanout: number of neighbours per layer to sample for the nodes of ``ids``, from them
            outward; -1 and None = all.
        at: time, such as ``2026-01-31``, or a number in the units of the data's times: every seed
            is predicted from edges before it; None = from those before its own time. For runs with
            ``sampling.time``.
        since: time as ``at``; earlier edges get no row. None = all edges, but with ``new_data``,
            and neither ``split`` nor ``at``, those later than all edges of the training. For tasks
            on edges in runs with ``sampling.time``.
        new_data: predict for data that the model was not trained on (inductive inference), of the
            same node and edge types and features, named in ``overrides``; nodes and graphs need no
            labels and no splits.
        trust: import the classes that the run names, though another user or machine trained it.
        overrides: keys that do not change the model, such as ``cluster.workers=1``; with
            ``new_data`` also those of ``graph``.
        overwrite: replace ``out`` if it exists.
        verbose, display, started: see `raygnn.train`.

    Returns:
        The file, with rows in order of the number. Columns: ``node`` (its id in the graph or
        tables), ``edge`` (its number) with ``source``, ``target``, ``relation`` and ``time``, or
        ``graph``; ``prediction`` (a class or its name, a number or a list of numbers),
        ``probability`` (of the class), ``split``, ``label`` (null if unknown), and ``scores`` of
        the classes in the order of their numbers; for links ``score`` instead.

    Raises:
        InputError: ``out`` cannot be written, or the run lacks its weights or data.
        PreflightError: it cannot run here; nothing was started.
        TrainingError: it failed on a rank.
        Interrupted: Ctrl-C.
    """
    options = _common(locals())
    file = free_file(out, overwrite)
    given = "--ids" if ids is not None else "--split" if split not in (None, "all") else ""
    beside = rows_file(rows, given)
    if beside is not None:
        check_names(beside)
    asked = ask(splits=(*SPLITS, "all"), split=split or "all", rows=beside, one=True, **options)
    begin = _since(asked, split, since)
    request = {"scores": scores, "since": begin, **_few(asked.one, ids, fanout)}
    if calibrated:
        request["calibration"] = _calibration(asked)
    of = f"{asked.task}, " if asked.task else ""
    of += "" if begin is None else f"edges since {begin}, "
    purpose = f"{of}split {asked.split} → {file}"
    return _write(asked, file, overwrite, purpose, beside=beside, **request)


def recommend(
    run: str | Path | Run,
    *,
    out: str | PathLike[str],
    k: int = 10,
    ids: str | PathLike[str] | None = None,
    candidates: str | PathLike[str] | None = None,
    known: Literal["exclude", "keep"] = "exclude",
    relation: str | int | None = None,
    task: str | None = None,
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
    """Write the ``k`` best targets of each source by a run of link prediction.

    All candidates are scored, exactly. A node is never recommended to itself.

    Args:
        k: length of the lists; a list is shorter if there are fewer candidates.
        ids: file with the sources, see `predict`; None = all nodes of the source type.
        candidates: file with the targets to choose from, as ``ids``; or ``array:NAME``, the nodes
            for which this array of the target type is not 0; None = all nodes of the target type.
        known: ``exclude`` targets that a source has an edge to, of any split, or ``keep`` them.
        relation: name or number of the relation, if the edges have several.
        at: a time as in `predict`: embeddings and known edges are of what was before it.
        run, out, task, new_data, trust, storage, overrides, overwrite, verbose, display, started:
            see `predict`; runs with ``sampling.time`` need ``at``.

    Returns:
        The file, sorted by the number of the source and by ``rank``. Columns: ``source``, ``rank``
        from 1, ``target`` and ``score``. Targets with equal scores are in order of their numbers.

    Raises:
        InputError: the run is not of link prediction, or its scores need more than embeddings
            (``model.pair_history``, ``model.decoder_features``); for others see `predict`.
    """
    options = _common(locals())
    file = free_file(out, overwrite)
    asked = ask(one=True, tables=False, **options)
    model, what, where, remedy = asked.one.model, None, "recommend", "use a run of link_prediction"
    if not asked.one.task.of_links:
        what = f"{asked.one.task.kind} has no scores of pairs of nodes"
    elif model.pair_history or model.decoder_feature_names:
        key = "pair_history" if model.pair_history else "decoder_features"
        what = f"model.{key} reads features of each pair, which embeddings do not have"
        remedy = f"train without model.{key}"
    elif asked.at is None and asked.config.sampling.time is not None:
        what = "in a run with sampling.time, lists depend on the time"
        remedy = "set it, such as --at 2026-01-31"
    elif k % 1 != 0 or not 1 <= k <= LARGEST:
        what, where = f"lists need a length from 1 to {LARGEST}", f"--k {k}"
        remedy = "pass an integer in this range"
    elif known not in ("exclude", "keep"):
        what, where, remedy = "known is exclude or keep", f"known={known!r}", "pass one of these"
    if what is not None:
        raise InputError(what, where=where, remedy=remedy)
    wanted = None if ids is None else read_wanted(Path(ids).expanduser().absolute(), "node")
    among: Any = None
    if candidates is not None:
        array = re.fullmatch("array:(.+)", str(candidates))
        among = array[1] if array else read_wanted(Path(candidates).expanduser().absolute(), "node")
    purpose = f"{k} best targets of each source → {file}"
    of = None if relation is None else str(relation)
    lists = TopLists(k, known == "exclude", among, of)
    return _write(asked, file, overwrite, purpose, lists=lists, wanted=wanted)


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
    """Write the embeddings of nodes or graphs by a run's tested model.

    For tasks on nodes these are the inputs of the last layer; for tasks on edges the inputs of the
    decoder; for tasks on graphs all pooled layers, concatenated; for several tasks the shared
    inputs of their heads.

    Args:
        ntype: node type; None = the task's.
        run, out, split, at, new_data, trust, storage, overrides, overwrite, verbose, display,
            started: see `predict`; runs with ``sampling.time`` need ``at``.

    Returns:
        The file. Columns: ``node`` or ``graph``, see `predict`, ``split``, and ``embedding``, a
        list of float32.

    Raises:
        InputError: the model has no embeddings of this type; for others see `predict`.
    """
    options = _common(locals())
    file = free_file(out, overwrite)
    asked = ask(splits=(*SPLITS, "all"), split=split, tables=False, **options)
    task, what, where, remedy = asked.config.task, None, "embeddings", "leave it out"
    if asked.at is None and asked.config.sampling.time is not None:
        what = "in a run with sampling.time, embeddings of nodes depend on the time"
        remedy = "set it, such as --at 2026-01-31"
    elif task.of_edges and split != "all":
        what = f"the splits of {task.kind} are of edges, and embeddings are of nodes"
        where, remedy = f"--split {split}", "leave it out, and select nodes from the file"
    elif task.of_graphs and ntype is not None:
        what, where = "the embeddings of this run are of graphs", f"--ntype {ntype}"
    if what is not None:
        raise InputError(what, where=where, remedy=remedy)
    purpose = f"embeddings, split {split} → {file}"
    return _write(asked, file, overwrite, purpose, embeddings=True, ntype=ntype)


def evaluate(
    run: str | Path | Run,
    *,
    split: str | None = None,
    task: str | None = None,
    rows: str | PathLike[str] | None = None,
    at: int | str | date | None = None,
    new_data: bool = False,
    trust: bool = False,
    storage: str = "runs",
    overrides: Sequence[str] = (),
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> dict[str, float]:
    """Return the metrics of a run's tested weights, computed as at the end of training.

    Args:
        split: ``train``, ``val`` or ``test``; for new graphs also ``all``, which is all graphs with
            a target. None = ``all`` for new graphs, else ``test``.
        task: name of one of several tasks; None = all.
        rows: CSV or Parquet with the entity, time and target of rows in place of the training
            table's; they count as the split ``test``.
        run, at, new_data, trust, storage, overrides, verbose, display, started: see `predict`.

    Returns:
        The metrics, named as in ``summary.json``: ``test/accuracy``, …; with several tasks
        ``test/<task>/accuracy``.

    Raises:
        InputError, PreflightError, TrainingError, Interrupted: see `predict`.
    """
    options = _common(locals())
    file = rows_file(rows, "--split" if split else "")
    asked = ask(splits=SPLITS, split=split, rows=file, one=file is not None, **options)
    with asked.answered(f"metrics of split {asked.split}", rows=False) as (found, _, _):
        # a metric of a split with a single class is NaN, which is null here
        metrics = {name: number(value) for name, value in found["metrics"].items()}
    asked.show.header({name: f"{value:.4f}" for name, value in metrics.items()})
    return metrics


def _common(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function of this module that `ask` has, too."""
    names = ["run", "task", "at", "new_data", "trust", "storage", "overrides"]
    names += ["verbose", "display", "started"]
    return {name: given[name] for name in names if name in given}


def _calibration(asked: Asked) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the fitted scale and biases. Raises InputError if the run has none for these
    weights."""
    task, summary, remedy = asked.one.task, asked.run.summary, "leave it out"
    if not task.classifies and not task.several_labels:
        what = f"{task.kind} has no probabilities of classes"
        raise InputError(what, where="--calibrated", remedy=remedy)
    what = "the run has no calibration, which training fits to the validation split at its end"
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        kept = summary["calibration"][asked.task]
        kept = kept["scale"], kept["bias"]
        what = "scale and bias in summary.json are not as many finite numbers as they must be"
        scale, bias = (tuple(map(float, one)) for one in kept)
        sound = bias and len(scale) == (len(bias) if task.several_labels else 1)
        sound = sound and all(map(math.isfinite, scale + bias))
        if task.classifies:
            sound = sound and len(bias) in asked.weights.sizes.values()
        if sound and summary.get("weights") == asked.weights.sha256:
            return scale, bias
        if sound:
            what = "the run's calibration was fitted to other weights than its selected.pt"
    remedy += ", or train again with a validation split"
    raise InputError(what, where="--calibrated", remedy=remedy)


def _since(asked: Asked, split: str | None, since: Any) -> int | str | None:
    """Return the earliest time of predicted edges, if any: see `predict`."""
    if since is not None and not asked.one.task.of_edges:
        what = f"{asked.one.task.kind} predicts for {asked.one.task.seeds}, which have one row each"
        raise InputError(what, where=f"--since {since}", remedy="leave it out")
    if since is not None:
        return moment_of(asked.config, since, "--since")
    latest = asked.weights.latest.get(asked.task)
    if latest is None or not asked.new_data or split is not None or asked.at is not None:
        return None
    return latest + 1


def _few(
    config: Config, ids: str | PathLike[str] | None, fanout: Sequence[int] | None
) -> dict[str, Any]:
    """Return the attributes of a `Request` for ``ids`` and ``fanout``."""
    task, where = config.task, f"--ids {ids}"
    what, remedy = None, "leave it out"
    if ids is None and fanout is None:
        return {}
    if ids is None:
        what, where = "neighbours are sampled for a list of nodes only", "--fanout"
        remedy = "name a file with --ids, or leave --fanout out"
    elif task.of_edges or config.table is not None:
        rows = "edges" if task.of_edges else "rows of a training table"
        what = f"{task.kind} of this run predicts for {rows}, which have no ids"
        remedy = "leave it out and select rows from the file"
    elif fanout is not None:
        where = f"--fanout {','.join(map(str, fanout))}"
        if task.of_graphs:
            what = "graphs have all their edges"
        elif found := check_fanout(config, fanout):
            what, remedy = found
    if ids is None or what is not None:
        raise InputError(str(what), where=where, remedy=remedy)
    return {
        "wanted": read_wanted(Path(ids).expanduser().absolute(), task.unit),
        "fanout": None if fanout is None else tuple(fanout),
    }


def _write(
    asked: Asked,
    file: Path,
    overwrite: bool,
    purpose: str,
    beside: Path | None = None,
    **request: Any,
) -> Predicted:
    check = partial(_check_nodes, asked, request)
    with asked.answered(purpose, check, rows=True, **request) as (found, place, plan):
        key = "row" if asked.one.table is not None else asked.one.task.unit
        if request.get("lists"):
            key = "source"
        if request.get("embeddings"):
            key = "graph" if asked.config.task.of_graphs else "node"
        names = _names(plan, asked, request.get("ntype"), key)
        merge_rows(place / ROWS, found, key, file, overwrite, asked.show, names, beside)
    made = Predicted(file, found["rows"], asked.split, found["workers"])
    asked.show.note(f"{made.rows:,} rows in {file}")
    return made


def _check_nodes(asked: Asked, request: Mapping[str, Any], plan: Plan) -> None:
    """Check nodes, node types and relations before ranks start."""
    goals, ntype = plan.goals.values(), request.get("ntype")
    if request.get("embeddings") and any(goal.edges for goal in goals):
        of_edges = [goal.edges.etype for goal in goals if goal.edges]
        there = [end for etype in of_edges for end in (etype[0], etype[2])]
        pick_ntype(ntype, [*dict.fromkeys([*there, *(g.ntype for g in goals if g.ntype)])])
    if request.get("wanted") is None and request.get("lists") is None:
        return
    goal, lists = plan.goals[asked.task], request.get("lists")

    def check_ids(ids: Any, kind: str | None, option: str) -> None:
        if ids is not None and (known := plan.input.ids(kind)) is not None:
            numbers_of(ids, *known, option)

    check_ids(request.get("wanted"), goal.edges.etype[0] if goal.edges else goal.ntype, "--ids")
    if lists is None:
        return
    assert goal.edges is not None
    target = goal.edges.etype[2]
    if not isinstance(lists.candidates, str):
        check_ids(lists.candidates, target, "--candidates")
    else:
        arrays = plan.input.facts(asked.config).columns.get(target)
        if arrays is not None:
            shapes = {name: first.shape for name, (first, *_) in arrays.items()}
            check_array(lists.candidates, target, shapes)
    array = goal.edges.relation
    words = asked.weights.words.get(f"{etype_str(goal.edges.etype)}/{array}", ())
    size = f"{RELATIONS} of {asked.task}" if asked.task else RELATIONS
    count = 1 if array is None else asked.weights.sizes.get(size)
    if count is not None:
        relation_of(lists.relation, array, words, count)


def _names(plan: Plan, asked: Asked, ntype: str | None, key: str) -> dict[str, Any]:
    """Return column → names of the nodes, relations or classes in it, if they have names.

    Args:
        ntype: node type, if it is not the task's.
        key: first column.
    """
    goal = plan.goals.get(asked.task) or next(iter(plan.goals.values()))
    if goal.ntype is None and goal.edges is None:
        return {}
    assert plan.input.place is not None
    meta = read_meta(plan.input.place)
    words = {**meta.names, **asked.weights.words}
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
    classes = words.get(target_key(asked.one, asked.task, goal.kind))
    if classes is not None and asked.one.task.classifies:
        spare = [None] * (2 - len(classes))  # a model has two classes at least
        found |= dict.fromkeys(("prediction", "label"), pa.array([*classes, *spare]))
    return {column: names for column, names in found.items() if names is not None}
