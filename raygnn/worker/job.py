"""Job that the driver passes to every rank; light, since the driver imports it, too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raygnn.checkpoint.weights import Weights
from raygnn.config.schema import Config
from raygnn.errors import DataError, TrainingError
from raygnn.graph.data import TABLE, EdgeSplit, EdgeTarget, NegativeLists, TrainingRows, etype_str
from raygnn.runs.run_directory import lost
from raygnn.util.files import AWAY, retry
from raygnn.worker.control import Control, ControlHandle

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import PartitionMeta
    from raygnn.preflight.facts import PartitionFacts
    from raygnn.storage.remote import AnyPath, RemotePath

OUTCOME = "outcome.json"  # in the directory of a dry run: its result
ROWS = "rows"  # in the run directory of a prediction: a Parquet file of each rank

SPLITS = ("train", "val", "test")

T = TypeVar("T")


def attempts(run_dir: Path) -> int:
    """Return how often the ranks of a run were started: the backend writes a line for each."""
    try:
        with open(run_dir / "logs" / "comm-rank-0.jsonl", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@dataclass(frozen=True)
class TopLists:
    """Lists of the best targets of each source that a request is for.

    Attributes:
        k: length.
        known: skip targets that the source has an edge to, of any split.
        candidates: targets to choose from, as `Request.wanted`, or the name of an array of their
            node type that is not 0 for them; None = all.
        relation: name or number of the relation; None = there is only one.
    """

    k: int
    known: bool = True
    candidates: Any = None
    relation: str | None = None


@dataclass(frozen=True)
class Request:
    """Request for predictions or metrics of a trained model.

    Attributes:
        weights: weights to predict with.
        split: ``train``, ``val``, ``test`` or ``all``.
        rows: write a row for each node, edge or graph; else only compute metrics.
        scores: also write a score for each class.
        calibration: scale and bias of a `Calibration`; None = the model's own probabilities.
        wanted: requested rows, see `raygnn.worker.planes.prediction_rows.read_wanted`; None = all
            of the split.
        fanout: sampled neighbours of the wanted nodes, from them outward; None = all.
        at: predict from what was before this time (see `raygnn.graph.times.moment`); None = before
            each seed's own time, if it has one.
        since: skip edges before this time; None = none.
        embeddings: rows hold the last hidden layer's output in place of predictions.
        ntype: node type of the embeddings; None = the task's.
        lists: rows hold targets to recommend in place of predictions; None = predictions.
        task: name of one of several tasks; "" = the only one, or all for metrics.
        sizes: `Sizes` of the training data, if the request is for other data; else None.
        kept: location of the weights for nodes that do not see the command's directory.
    """

    weights: Weights
    split: str
    rows: bool
    scores: bool = False
    calibration: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    wanted: Any = None
    fanout: tuple[int, ...] | None = None
    at: int | str | None = None
    since: int | str | None = None
    embeddings: bool = False
    ntype: str | None = None
    lists: TopLists | None = None
    task: str = ""
    sizes: Mapping[str, int] | None = None
    kept: RemotePath | None = None


@dataclass(frozen=True)
class DryRunRequest:
    """Request to the process of a dry run: see `raygnn.driver.dry_run`.

    Attributes:
        goals: target of each task, by name.
        classes: number of classes of each classification task, by name.
        rows: some rows of each task's training table, by name.
        collection: directory of the graphs, for a task on whole graphs.
        path: ``sys.path``.
        lifetime: seconds after which the process ends, in case the command is gone.
    """

    config: Config
    facts: PartitionFacts
    goals: Mapping[str, TaskTarget]
    classes: Mapping[str, int]
    rows: Mapping[str, TrainingRows]
    collection: AnyPath | None
    path: tuple[str, ...]
    lifetime: int


@dataclass(frozen=True)
class InitialWeights:
    """Selected weights of the run that ``train.init`` names.

    Attributes:
        run: shown name of the run.
        partition: directory with its nodes' ids; None if no embedding rows are used.
        kept: location of the weights for nodes that do not see the command's directory.
    """

    run: str
    weights: Weights
    partition: AnyPath | None = None
    kept: RemotePath | None = None


RELATIONS = "relations of the edges to predict"  # name of their number among `Sizes`


class Sizes:
    """Sizes of a model that are counted in the data: classes, categories, relations.

    Args:
        trained: name → size of the trained model; other data may have less.

    Attributes:
        found: name → size of the model.
        like: schema of many graphs, see `Sample.describe`; None of one graph.
        latest: see `raygnn.checkpoint.weights.Weights`.
    """

    def __init__(
        self, trained: Mapping[str, int] | None = None, like: Mapping[str, Any] | None = None
    ):
        self._trained = trained
        self.like = like
        self.found: dict[str, int] = {}
        self.latest: dict[str, int] = {}

    def resolve(self, name: str, counted: int) -> int:
        """Return and record a size of the model. Raises DataError if the data have more than the
        model was trained for."""
        known = counted if self._trained is None else self._trained.get(name, 0)
        if counted > known:
            message = f"the data have {counted:,} {name}, but the model was trained for {known:,}"
            remedy = "predict for data with the sizes of the training data, or train on these, too"
            raise DataError(message, remedy=remedy)
        self.found[name] = known
        return known


@dataclass(frozen=True)
class TaskTarget:
    """Nodes or edges that one task predicts for. ``ntype``: node type; None if the seeds are edges
    or graphs. ``edges``: target edges; None if the seeds are nodes or graphs."""

    ntype: str | None = None
    edges: EdgeTarget | None = None

    @property
    def kind(self) -> str | None:
        """Node type, or edge type as text; None for graphs."""
        return self.ntype if self.edges is None else etype_str(self.edges.etype)


@dataclass(frozen=True)
class Job:
    """One run, as every rank sees it.

    Attributes:
        partition: directory of the partition, or of a collection of graphs; it may appear after
            the ranks have started.
        run_dir: run directory.
        goals: target of each task, by name; "" = the only task.
        replicated: every rank holds the whole structure.
        started: when the command began, seconds since the epoch.
        global_batch: seeds of a batch over all ranks, as at the run's first start, whatever the
            number of workers is now.
        request: requested predictions; None = train.
        task: name of this job's task among several; "" = all, or the only one.
        lists: name of each task with lists of negatives → use → result of
            `raygnn.graph.negative_lists.lists_of`, or `TABLE` → rows of its training table; or
            Ray's reference to that.
        initial: weights to start from, if there is no checkpoint.
        token: see `raygnn.runs.run_directory.RunDir`; "" = do not check.
        control: requests of the driver, and the ranks' reports.
        program: ``module:Class`` that a rank constructs with the job and the runtime; its ``run``
            returns the result.
    """

    config: Config
    partition: AnyPath
    run_dir: Path
    goals: Mapping[str, TaskTarget]
    replicated: bool
    started: float
    global_batch: int
    request: Request | None = None
    task: str = ""
    lists: Any = field(default_factory=dict)
    initial: InitialWeights | None = None
    token: str = ""
    control: Control | ControlHandle = field(default_factory=Control)
    program: str = "raygnn.worker.rank:Rank"

    @property
    def lost(self) -> str | None:
        """State of the run directory: see `raygnn.runs.run_directory.lost`."""
        return lost(self.run_dir, self.token)

    @property
    def patience(self) -> float:
        """Seconds for which storage may be away while the other ranks wait in a collective."""
        config = self.config
        return min(config.fault.storage_timeout.seconds, config.comm.timeout.seconds / 2)

    @cached_property
    def meta(self) -> PartitionMeta:
        """Description of the partition; raises as `read` does."""
        from raygnn.graph.partition.layout import read_meta

        place = self.partition
        return self.read(lambda: read_meta(place))

    def read(self, act: Callable[[], T]) -> T:
        """Call a function that reads the partition, again while its storage is away. Raises
        DataError if the partition is bad, and TrainingError if the storage was away for longer than
        `patience`."""
        try:
            return retry(act, self.patience, self._is_away)
        except (DataError, OSError) as error:
            if not self._is_away(error):
                raise
            raise TrainingError(
                f"the partition could not be read for {self.patience:.0f} s: "
                f"{getattr(error, 'what', error)}",
                where=str(self.partition),
                remedy="check that storage, then train with --resume",
            ) from error

    def _is_away(self, error: Exception) -> bool:
        if not isinstance(error, (DataError, OSError)):
            return False
        cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
        if isinstance(self.partition, Path) and not os.path.exists(self.partition):
            return True
        if not isinstance(cause, OSError):
            return False
        # pyarrow's errors of an object store have no number; file errors without one mean damage
        unnumbered = cause.errno is None and not isinstance(self.partition, Path)
        return unnumbered or cause.errno in AWAY

    @property
    def goal(self) -> TaskTarget:
        """Target of the job's only task."""
        return self.goals[self.task]

    @property
    def by_task(self) -> dict[str, Job]:
        """Job of each task alone, by the task's name."""
        config = self.config
        if config.tasks is None:
            return {self.task: self}
        return {
            name: replace(
                self,
                config=config.of(name),
                task=name,
                global_batch=max(1, round(self.global_batch * task.batch_factor)),
            )
            for name, task in config.tasks.items()
        }

    @property
    def negatives(self) -> Mapping[str, NegativeLists]:
        """Lists of negatives of this task, by use."""
        return dict(self.lists.get(self.task, {}))

    @property
    def rows(self) -> TrainingRows | None:
        """Rows of this task's training table."""
        found: TrainingRows | None = self.lists.get(self.task, {}).get(TABLE)
        return found

    @property
    def digests(self) -> str:
        """Digests of all files of lists of negatives, and of training tables; a run resumes only
        with the same ones."""
        lists = [one for by_use in self.lists.values() for one in by_use.values()]
        return "".join(sorted({one.digest for one in lists}))

    @property
    def hidden(self) -> list[EdgeSplit]:
        """Splits whose held-out edges carry no messages. With temporal sampling by the split's time
        none need be hidden, since seeds see earlier edges only."""
        splits = dict.fromkeys(goal.edges.split for goal in self.goals.values() if goal.edges)
        timed = self.config.ordered
        return [split for split in splits if not (timed and split.time is not None)]

    @property
    def others(self) -> Weights | None:
        """Weights of a request for data other than the training's; else None."""
        request = self.request
        return None if request is None or request.sizes is None else request.weights

    @property
    def trains(self) -> bool:
        return self.request is None

    @property
    def planned(self) -> float:
        """Number of ranks that the global batch was chosen for; a resumed run takes its learning
        rate from the checkpoint."""
        return self.global_batch / self.config.sampling.batch_size
