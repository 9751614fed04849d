"""Times of seeds, splits by time, and edges that were before a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raygnn.config.task import NodeTaskConfig
from raygnn.config.values import Duration
from raygnn.errors import DataError
from raygnn.graph.data import etype_str
from raygnn.graph.staging.shard import Shard
from raygnn.graph.times import (
    SOME_MICROSECONDS,
    TimeRange,
    check_units,
    codes_since,
    moment,
    per_second,
    sample,
    since,
    typical,
)
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.sampler import Timing
from raygnn.sampling.seeds import OwnedEdges, as_labels, known
from raygnn.worker.job import SPLITS, Job

_REMEMBERED = 1 << 26  # edges of a history


@dataclass(frozen=True)
class Clock:
    """``sampling.time`` and a request's times in the data's units. Collective. ``warnings``: about
    the times that were checked so far."""

    job: Job
    shard: Shard
    control: Exchange
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def at(self) -> int | None:
        """Time of the requested predictions; None = the seeds' own times."""
        return self.asked("at")

    def asked(self, name: Literal["at", "since"]) -> int | None:
        """Return a time of the request in the data's units; None if it has none. Raises DataError
        if it is a date, but times are no points in time, or if its unit differs."""
        value = None if self.job.request is None else getattr(self.job.request, name)
        return None if value is None else self.moment(value, f"--{name} {value}")

    def moment(self, value: int | str, where: str) -> int:
        """Return a time in the data's units; see `asked`."""
        try:
            return moment(value, self._typical, self._ranges, where)
        except DataError as error:
            error.where = where
            raise

    @cached_property
    def timing(self) -> Timing | None:
        """Options of temporal sampling; None if edges have no times."""
        time, model = self.job.config.sampling.time, self.job.config.model
        if time is None:
            return None
        window = time.window
        if isinstance(window, Duration):
            window = max(1, round(window.seconds * per_second(self._typical)))
        tables = [one.table for one in self.job.config.by_task.values()]
        if window is not None and any(tables) and not time.strict:
            window += 1  # rows of training tables see edges before the time after their own
        return Timing(self.latest, window, ages=bool(model.ages))

    @property
    def latest(self) -> bool:
        """True if the latest edges are sampled."""
        time = self.job.config.sampling.time
        return time is not None and time.strategy == "latest"

    def check(
        self,
        times: np.ndarray,
        kind: str,
        name: str,
        *,
        explicit: bool | None = None,
        note: str = " (the seeds)",
    ) -> None:
        """Check that times of seeds and of all edge types have one unit: else seeds would see later
        edges, or none. Collective.

        Args:
            times: of this rank's seeds, int64 ``[n]``.
            kind: node or edge type of the seeds.
            name: of their array.
            note: follows these in messages.
            explicit: whether they are known to be microseconds; None = as of the type's times.

        Raises:
            DataError: the units differ.
        """
        of_seeds = self._range(name, kind, times, note)
        if explicit is not None:
            of_seeds = replace(of_seeds, is_explicit=explicit)
        ranges = [*self._ranges, of_seeds]
        check_units(ranges)
        for each in ranges:
            if len(each.far):
                text = f"{each.of}: some times are after the year 2200, such as {each.far[-1]}"
                self.warnings.append(text)

    @cached_property
    def _ranges(self) -> list[TimeRange]:
        """Ranges of the times of each edge type."""
        time, found = self.job.config.sampling.time, []
        for etype, rows in self.shard.topology.items():
            if rows.times is not None and time is not None:
                first, last = int(rows.indptr[0]), int(rows.indptr[-1])
                found.append(self._range(time.edges, etype_str(etype), rows.times[first:last]))
        return found

    def _range(self, name: str, kind: str, times: np.ndarray, note: str = "") -> TimeRange:
        gathered = self.control.gather_rows(torch.from_numpy(np.array(sample(times)))).numpy()
        of = f"{name!r} of {'edge' if ':' in kind else 'node'} type {kind!r}{note}"
        return TimeRange(of, np.sort(gathered), name == "time" and kind in self._explicit)

    @cached_property
    def _explicit(self) -> set[str]:
        """Types of nodes and edges whose tables name the unit of their times."""
        manifest = self.job.meta.manifest
        named = set() if manifest is None else set(manifest.microseconds)
        back = self.job.meta.reverses.items()
        return named | {etype_str(other) for one, other in back if etype_str(one) in named}

    @cached_property
    def _typical(self) -> int:
        check_units(self._ranges)
        times = [each.times for each in self._ranges if each.is_informative]
        if self._ranges and all(each.is_explicit for each in self._ranges):
            return SOME_MICROSECONDS
        return typical(np.concatenate(times or [np.zeros(0, np.int64)]))


def times_of(values: Any, kind: str, name: str) -> np.ndarray:
    """Return the times of nodes or edges, int64 ``[n]``.

    Args:
        values: stored array; None = there is none.
        kind: node or edge type, for messages.
        name: of the array.

    Raises:
        DataError: there is none, or it does not hold one integer each.
    """
    times = None if values is None else np.asarray(values)
    if times is None or times.dtype.kind not in "iu" or times.ndim != 1:
        stored = "there is none" if times is None else f"it is {times.dtype} {list(times.shape)}"
        message = f"array {name!r} of {kind} must hold their times, but {stored}"
        remedy = "name an array with one whole number each (sampling.time.seeds, task.split.time)"
        raise DataError(message, where="sampling.time", remedy=remedy)
    return times.astype(np.int64)


def split_by_time(job: Job, shard: Shard, exchange: Exchange) -> None:
    """Set the masks of nodes that are split by time. Collective.

    For shares, every rank temporarily stores 8 bytes per node with a target.
    """
    for one in job.by_task.values():
        name, ntype, task = one.config.split_time, one.goal.ntype, one.config.task
        if name is None or ntype is None or not isinstance(task, NodeTaskConfig):
            continue
        arrays = shard.node_data[ntype]
        times = times_of(arrays.get(name), f"node type {ntype!r}", name)
        assert task.split is not None
        labels = arrays.get(task.target)
        if labels is not None and task.several_labels:
            labels = as_labels(labels, f"array {task.target!r}")
        given, own = (task.split.val, task.split.test), times
        if not any(isinstance(share, float) for share in given):
            own = np.array(sample(times))  # which shows the unit for dates
        elif labels is not None:
            own = times[known(labels).numpy()]
        gathered = exchange.gather_rows(torch.from_numpy(own)).numpy()
        codes = codes_since(times, since(gathered, *given))
        for code, split in enumerate(SPLITS):
            arrays[f"{split}_mask"] = torch.from_numpy(codes == code)


class EdgeHistory:
    """Edges of one type and their times, of all ranks. The constructor is collective.

    Every rank stores up to 64 bytes for each edge, and temporarily twice as many.

    Args:
        edges: owned edges.
        time, relation: names of their arrays; None = no relations.
        relations: number of relations, at least 1.

    Attributes:
        targets: int64 ``[K]``, ascending: global ids of the nodes at which an edge ends.
    """

    width = 8  # of `features`

    def __init__(self, edges: OwnedEdges, time: str, relation: str | None, relations: int):
        if edges.bounds[-1] > _REMEMBERED:
            raise DataError(
                f"the type has {edges.bounds[-1]:,} edges, and every worker would store their "
                f"history, of at most {_REMEMBERED:,}",
                where=f"edge type {etype_str(edges.etype)!r}",
                remedy="set model.pair_history to false and task.ranking.candidates to a number",
            )
        kind = np.zeros(len(edges.src)) if relation is None else edges.column(relation)
        src, dst, when, kind = (
            edges.exchange.gather_rows(torch.from_numpy(np.array(column, np.int64))).numpy()
            for column in (edges.src, edges.dst, edges.column(time), kind)
        )
        self.targets = np.unique(dst)
        self._nodes, self._relations = 1 + int(np.max([src, dst], initial=0)), relations
        self._pairs = _TimedKeys(self._pair(src, dst, kind), when)
        self._sources, self._targets = _TimedKeys(src, when), _TimedKeys(dst, when)

    def _pair(self, src: np.ndarray, dst: np.ndarray, kind: np.ndarray) -> np.ndarray:
        return (src * self._nodes + dst) * self._relations + kind

    def exist(
        self, src: np.ndarray, dst: np.ndarray, kind: np.ndarray, when: np.ndarray
    ) -> np.ndarray:
        """Return whether there are edges of these ends, relations and times, bool ``[…]``."""
        pairs = self._pair(src, dst, kind)
        return self._pairs.before(pairs, when + 1)[0] > self._pairs.before(pairs, when)[0]

    def features(
        self, src: np.ndarray, dst: np.ndarray, kind: np.ndarray, when: np.ndarray
    ) -> Tensor:
        """Describe the edges between two nodes, and at each, *before* a time: float32 ``[…, 8]``.

        The first column is 1 if the pair has had an edge with this relation. The other columns are
        logarithms of 1 + each of: edges of the pair, and time since the last one; edges of the
        source since then; edges of the source, and time since the last one; edges of the target,
        and time since the last one. Times are 0 if there was no edge.
        """
        src, dst, kind, when = np.broadcast_arrays(src, dst, kind, when)
        met, last = self._pairs.before(self._pair(src, dst, kind), when)
        sent, last_sent = self._sources.before(src, when)
        came, last_came = self._targets.before(dst, when)
        since = sent - np.where(met > 0, self._sources.before(src, last + 1)[0], 0)
        columns = met, when - last, since, sent, when - last_sent, came, when - last_came
        found = np.stack([met > 0, *(np.log1p(column) for column in columns)], axis=-1)
        return torch.from_numpy(found.astype(np.float32))


class _TimedKeys:
    """Events by key and time, int64 ``[n]`` each; keys are at least 0."""

    def __init__(self, keys: np.ndarray, times: np.ndarray):
        self._keys, self._times = np.unique(keys), np.unique(times)
        self._size = len(self._times) + 1
        self._codes = np.searchsorted(self._keys, keys) * self._size
        self._codes += np.searchsorted(self._times, times)
        self._codes.sort()

    def before(self, keys: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of a key's events before a time, and the time of the last of them, or
        that time without any: int64 ``[…]``."""
        place = np.searchsorted(self._keys, keys)
        first = place * self._size
        low = np.searchsorted(self._codes, first)
        high = np.searchsorted(self._codes, first + np.searchsorted(self._times, times))
        there = self._keys.take(place, mode="clip") == keys
        count = np.where(there, high - low, 0)
        last = self._times.take(self._codes.take(high - 1, mode="clip") % self._size, mode="clip")
        return count, np.where(count > 0, last, times)
