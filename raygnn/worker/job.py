"""What the driver hands to every rank; light, so that the driver need not import what ranks do."""

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
from raygnn.graph.data import EdgeSplit, EdgeTarget, NegativeLists
from raygnn.runs.run_directory import lost
from raygnn.util.files import AWAY, retry
from raygnn.worker.control import Control, ControlHandle

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import PartitionMeta
    from raygnn.preflight.facts import PartitionFacts
    from raygnn.storage.remote import AnyPath, RemotePath

TRIALS = "trials.jsonl"  # in the run directory of a sweep: what was measured
OUTCOME = "outcome.json"  # in the directory of a dry run: what came of it
ROWS = "rows"  # in the run directory of a prediction: a Parquet file of each rank

SPLITS = ("train", "val", "test")

T = TypeVar("T")


def attempts(run_dir: Path) -> int:
    """How often the ranks of a run have been started: before each, the backend leaves rank 0 a
    line."""
    try:
        with open(run_dir / "logs" / "comm-rank-0.jsonl", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@dataclass(frozen=True)
class Request:
    """What is asked of a trained model.

    Attributes:
        weights: to predict with.
        split: ``train``, ``val``, ``test`` or ``all``.
        rows: write a row for each node, edge or graph; else only measure.
        scores: also a score for each class.
        calibration: scale and bias of a `Calibration`; None = probabilities are the model's own.
        wanted: only these, see `raygnn.worker.planes.prediction_rows.read_wanted`; None = all
            of the split.
        fanout: neighbours of the wanted nodes, from them outward; None = all.
        at: the time, before which all must be that they are predicted from (see
            `raygnn.graph.times.moment`); None = their own, where they have times.
        since: edges before this time are skipped; None = none are.
        embeddings: what the rows have: the last hidden layer's output in place of predictions.
        ntype: of the nodes that embeddings are for; None = the one that the task is about.
        task: which of several tasks; "" = the only one, and of metrics all.
        sizes: what the data of the training had of what data are counted for, if these are others:
            see `Sizes`; None = they are the same.
        kept: where nodes fetch the weights that do not see the command's directory.
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
    task: str = ""
    sizes: Mapping[str, int] | None = None
    kept: RemotePath | None = None


@dataclass(frozen=True)
class DryRunRequest:
    """What the process of a dry run is told: see `raygnn.driver.dry_run`.

    Attributes:
        goals: what each task predicts for, by name.
        classes: of each task that classifies, by name.
        collection: directory of the graphs, for a task on whole graphs; None for a dataset of the
            user's own.
        path: ``sys.path``.
        lifetime: seconds after which the process ends, if the command that started it is gone.
    """

    config: Config
    facts: PartitionFacts
    goals: Mapping[str, TaskTarget]
    classes: Mapping[str, int]
    collection: AnyPath | None
    path: tuple[str, ...]
    lifetime: int


class Sizes:
    """What a model must know of the data and only counting tells: classes, categories, relations.

    Args:
        trained: what was counted when the model was trained, by name; other data may have less.

    Attributes:
        found: name → what the model is made for.
        like: what many graphs have in common, see `raygnn.graph.graph_sample.Sample.described`;
            None of one graph.
        latest: see `raygnn.checkpoint.weights.About`.
    """

    def __init__(
        self, trained: Mapping[str, int] | None = None, like: Mapping[str, Any] | None = None
    ):
        self._trained = trained
        self.like = like
        self.found: dict[str, int] = {}
        self.latest: dict[str, int] = {}

    def settle(self, name: str, counted: int) -> int:
        """How many of something the model is made for.

        Raises:
            DataError: the data have more than the model knows.
        """
        known = counted if self._trained is None else self._trained.get(name, 0)
        if counted > known:
            raise DataError(
                f"the data have {counted:,} {name}, and the model was trained for {known:,}",
                remedy="predict for data that have what it was trained on, or train on them, too",
            )
        self.found[name] = known
        return known


@dataclass(frozen=True)
class TaskTarget:
    """What one task predicts for.

    Attributes:
        ntype: nodes of this type; None where the seeds are edges or graphs.
        edges: what edges; None where the seeds are others.
    """

    ntype: str | None = None
    edges: EdgeTarget | None = None


@dataclass(frozen=True)
class Job:
    """One run, as every rank sees it.

    Attributes:
        config: of the run.
        partition: directory of the partition, or of a collection of graphs; it may appear after
            the ranks have started. None for a dataset of the user's own.
        run_dir: of the run, visible on every node.
        ntype: see `TaskTarget`, of the only task.
        replicated: whether every rank holds the whole structure.
        started: when the command began, seconds since the epoch.
        global_batch: seeds of a batch, over all ranks; as the run began, whatever its number of
            workers was then.
        tune: seconds that a trial of a sweep takes; None to train.
        profile: steps to record with torch's profiler.
        request: what to predict; None to train.
        edges: see `TaskTarget`, of the only task.
        goals: of several tasks, by name; empty where there is but one.
        task: name of the task that this job is about, of several; "" = of all, or the only one.
        lists: name of each task on links that has some → use → what
            `raygnn.graph.negative_lists.lists_of` gives; or where Ray has them.
        token: see `raygnn.runs.run_directory.RunDir`; "" = none is looked for.
        control: what the driver asks of the ranks, and they tell it.
        program: ``module:Class`` of what a rank runs: called with the job and the runtime, and
            its ``run`` returns the result.
    """

    config: Config
    partition: AnyPath | None
    run_dir: Path
    ntype: str | None
    replicated: bool
    started: float
    global_batch: int
    tune: float | None = None
    profile: int = 0
    request: Request | None = None
    edges: EdgeTarget | None = None
    goals: Mapping[str, TaskTarget] = field(default_factory=dict)
    task: str = ""
    lists: Any = field(default_factory=dict)
    token: str = ""
    control: Control | ControlHandle = field(default_factory=Control)
    program: str = "raygnn.worker.rank:Rank"

    @property
    def lost(self) -> str | None:
        """What has become of the run directory: see `raygnn.runs.run_directory.lost`."""
        return lost(self.run_dir, self.token)

    @property
    def patience(self) -> float:
        """Seconds for which storage may be away; the other ranks may wait in a collective."""
        config = self.config
        return min(config.fault.storage_timeout.seconds, config.comm.timeout.seconds / 2)

    @cached_property
    def meta(self) -> PartitionMeta:
        """The partition's description; raises as `read` does."""
        from raygnn.graph.partition.layout import read_meta

        assert self.partition is not None
        place = self.partition
        return self.read(lambda: read_meta(place))

    def read(self, act: Callable[[], T]) -> T:
        """Call what reads the partition, again and again while the place is away.

        Raises:
            DataError: what is there is bad.
            TrainingError: the place was away for longer than `patience`.
        """
        try:
            return retry(act, self.patience, self._is_away)
        except (DataError, OSError) as error:
            if not self._is_away(error):
                raise
            raise TrainingError(
                f"the partition could not be read for {self.patience:.0f} s: "
                f"{getattr(error, 'what', error)}",
                where=str(self.partition),
                remedy="see to the place, then go on with --resume",
            ) from error

    def _is_away(self, error: Exception) -> bool:
        """Whether what preflight found to be good cannot be read now."""
        if self.partition is None or not isinstance(error, (DataError, OSError)):
            return False
        cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
        if isinstance(self.partition, Path) and not os.path.exists(self.partition):
            return True
        if not isinstance(cause, OSError):
            return False
        # pyarrow's errors of an object store's service have no number; of files they mean damage
        unnumbered = cause.errno is None and not isinstance(self.partition, Path)
        return unnumbered or cause.errno in AWAY

    def for_task(self, name: str) -> Job:
        """Return the job of one of several tasks alone."""
        goal, tasks = self.goals[name], self.config.tasks
        assert tasks is not None
        return replace(
            self,
            config=self.config.of(name),
            ntype=goal.ntype,
            edges=goal.edges,
            goals={},
            task=name,
            global_batch=max(1, round(self.global_batch * tasks[name].batch_factor)),
        )

    @property
    def negatives(self) -> Mapping[str, NegativeLists]:
        """The lists of this task."""
        found: Mapping[str, NegativeLists] = self.lists.get(self.task, {})
        return found

    @property
    def digests(self) -> str:
        """Of all files of lists, "" where there are none: a run goes on with those that it had."""
        lists = [one for by_use in self.lists.values() for one in by_use.values()]
        return "".join(sorted({one.digest for one in lists}))

    @property
    def hidden(self) -> list[EdgeSplit]:
        """Splits whose edges for validation and test no message may pass along: where seeds see
        what was before them, later edges need not be hidden."""
        goals = self.goals.values() or [TaskTarget(edges=self.edges)]
        splits = dict.fromkeys(goal.edges.split for goal in goals if goal.edges)
        timed = self.config.ordered
        return [split for split in splits if not (timed and split.time is not None)]

    @property
    def others(self) -> Weights | None:
        """What is asked about data that it was not trained on; None where none is."""
        request = self.request
        return None if request is None or request.sizes is None else request.weights

    @property
    def trains(self) -> bool:
        """Whether a trained model is what comes of it."""
        return self.tune is None and self.request is None

    @property
    def planned(self) -> float:
        """How many ranks the global batch is made for; a run that goes on takes its learning rate
        from the checkpoint."""
        return self.global_batch / self.config.sampling.batch_size
