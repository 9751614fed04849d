"""When seeds are: their times as the data have them, and which split that puts them in."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

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
from raygnn.sampling.seeds import as_labels, known
from raygnn.worker.job import SPLITS, Job


@dataclass(frozen=True)
class Clock:
    """What ``sampling.time`` and a request mean in the data's times. Collective.

    Attributes:
        warnings: about times that were compared so far.
    """

    job: Job
    shard: Shard
    control: Exchange
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def at(self) -> int | None:
        """The time that predictions are asked for at; None = at the seeds' own."""
        return self.asked("at")

    def asked(self, name: Literal["at", "since"]) -> int | None:
        """Return a time of the request in the data's units; None if it has none.

        Raises:
            DataError: it is a date, and the data's times are no points in time.
        """
        value = None if self.job.request is None else getattr(self.job.request, name)
        try:
            return None if value is None else moment(value, self._typical)
        except DataError as error:
            error.where = f"--{name} {value}"
            raise

    @cached_property
    def timing(self) -> Timing | None:
        """How edges are drawn that have times; None where they have none."""
        time = self.job.config.sampling.time
        if time is None:
            return None
        window = time.window
        if isinstance(window, Duration):
            window = max(1, round(window.seconds * per_second(self._typical)))
        return Timing(self.latest, window)

    @property
    def latest(self) -> bool:
        """Whether the latest edges are drawn."""
        time = self.job.config.sampling.time
        return time is not None and time.strategy == "latest"

    def check(self, times: np.ndarray, kind: str, name: str) -> None:
        """Refuse times of seeds, or of edge types, in different units: seeds would see later edges,
        or none. Collective.

        Args:
            times: of this rank's seeds, int64 ``[n]``; kind: node or edge type; name: of the array.

        Raises:
            DataError: the units differ.
        """
        seeds = self._range(name, kind, times, " (the seeds)")
        ranges = [*self._ranges, seeds]
        check_units(ranges)
        request = self.job.request
        known = None if request is None or request.sizes is None else request.weights.latest
        if request and known and known.get(request.task, 0) + 1 == request.since:
            trained = TimeRange("the latest edge of the training", np.array([request.since - 1]))
            check_units([trained, seeds], "it is not clear which edges are new", "--since")
        for each in ranges:
            if len(each.far):
                text = f"{each.of}: some times are after the year 2200, such as {each.far[-1]}"
                self.warnings.append(text)

    @cached_property
    def _ranges(self) -> list[TimeRange]:
        """Ranges of the times of each edge type, in the order of the types."""
        time, found = self.job.config.sampling.time, []
        for etype, rows in self.shard.topology.items():
            if rows.times is not None and time is not None:
                first, last = int(rows.indptr[0]), int(rows.indptr[-1])
                found.append(self._range(time.edges, etype_str(etype), rows.times[first:last]))
        return found

    def _range(self, name: str, kind: str, times: np.ndarray, note: str = "") -> TimeRange:
        everyones = self.control.gather_rows(torch.from_numpy(sample(times))).numpy()
        of = f"{name!r} of {'edge' if ':' in kind else 'node'} type {kind!r}{note}"
        return TimeRange(of, np.sort(everyones), name == "time" and kind in self._explicit)

    @cached_property
    def _explicit(self) -> list[str]:
        manifest = self.job.meta.manifest
        return [] if manifest is None else manifest.microseconds

    @cached_property
    def _typical(self) -> int:
        """A time of an edge, which tells the unit of all."""
        check_units(self._ranges)
        times = [each.times for each in self._ranges if each.is_informative]
        if self._ranges and all(each.is_explicit for each in self._ranges):
            return SOME_MICROSECONDS
        return typical(np.concatenate(times or [np.zeros(0, np.int64)]))


def times_of(values: Any, kind: str, name: str) -> np.ndarray:
    """When nodes or edges are, int64 ``[n]``.

    Args:
        values: as they are stored; None = there are none.
        kind: what they are of; name: of the array.

    Raises:
        DataError: there are none, or they are not whole numbers, one for each.
    """
    times = None if values is None else np.asarray(values)
    if times is None or times.dtype.kind not in "iu" or times.ndim != 1:
        stored = "there is none" if times is None else f"it is {times.dtype} {list(times.shape)}"
        raise DataError(
            f"array {name!r} of {kind} is to say when they are predicted, and {stored}",
            where="sampling.time",
            remedy="name an array of one whole number for each (sampling.time.seeds, "
            "task.split.time)",
        )
    return times.astype(np.int64)


def split_by_time(job: Job, shard: Shard, exchange: Exchange) -> None:
    """Give nodes to predict their masks, where they are split by time. Collective.

    With shares 8 bytes for each node with a target, on every rank, until they are split.
    """
    for one in [job.for_task(name) for name in job.goals] or [job]:
        name, ntype, task = one.config.split_time, one.ntype, one.config.task
        if name is None or ntype is None or not isinstance(task, NodeTaskConfig):
            continue
        arrays = shard.node_data[ntype]
        times = times_of(arrays.get(name), f"node type {ntype!r}", name)
        assert task.split is not None
        labels = arrays.get(task.target)
        if labels is not None and task.several_labels:
            labels = as_labels(labels, f"array {task.target!r}")
        given, times_of_seeds = (task.split.val, task.split.test), times
        if any(isinstance(share, float) for share in given):
            if labels is not None:
                times_of_seeds = times[known(labels).numpy()]
            everyones = exchange.gather_rows(torch.from_numpy(times_of_seeds)).numpy()
        else:  # a sample tells what dates are
            everyones = exchange.gather_rows(torch.from_numpy(sample(times))).numpy()
        codes = codes_since(times, since(everyones, *given))
        for code, split in enumerate(SPLITS):
            arrays[f"{split}_mask"] = torch.from_numpy(codes == code)
