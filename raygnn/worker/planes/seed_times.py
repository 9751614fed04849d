"""When seeds are: their times as the data have them, and which split that puts them in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from raygnn.config.task import NodeTaskConfig
from raygnn.config.values import Duration
from raygnn.errors import DataError
from raygnn.graph.staging.shard import Shard
from raygnn.graph.times import codes_since, moment, per_second, since, unit_of
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.sampler import Timing
from raygnn.sampling.seeds import as_labels, known
from raygnn.worker.job import SPLITS, Job

_NAMES = {1: "seconds", 10**3: "milliseconds", 10**6: "microseconds", 10**9: "nanoseconds"}


@dataclass(frozen=True)
class Clock:
    """What ``sampling.time`` and a request mean in the data's times. Collective."""

    job: Job
    shard: Shard
    control: Exchange

    @cached_property
    def at(self) -> int | None:
        """The time that predictions are asked for at; None = at the seeds' own."""
        asked = None if self.job.request is None else self.job.request.at
        try:
            return None if asked is None else moment(asked, self._last)
        except DataError as error:
            error.where = f"--at {asked}"
            raise

    @cached_property
    def timing(self) -> Timing | None:
        """How edges are drawn that have times; None where they have none."""
        time = self.job.config.sampling.time
        if time is None:
            return None
        window = time.window
        if isinstance(window, Duration):
            window = max(1, round(window.seconds * per_second(self._last)))
        return Timing(self.latest, window)

    @property
    def latest(self) -> bool:
        """Whether the latest edges are drawn."""
        time = self.job.config.sampling.time
        return time is not None and time.strategy == "latest"

    def check(self, times: np.ndarray, name: str) -> None:
        """Refuse times of seeds that are in other units than those of edges: seeds would see all
        edges, later ones included, or none. Collective.

        Args:
            times: of this rank's seeds, int64 ``[n]``; name: of their array.
        """
        latest = self.control.max(int(times.max(initial=0)))
        units = unit_of(latest), unit_of(self._last)
        if None not in units and units[0] != units[1]:
            ours, theirs = (_NAMES[unit] for unit in units if unit is not None)
            time = self.job.config.sampling.time
            assert time is not None
            raise DataError(
                f"array {name!r}, which says when seeds are predicted, is in {ours} since 1970 "
                f"(up to {latest}), and {time.edges!r} of edges in {theirs} (up to {self._last})",
                where="sampling.time",
                remedy="give both in the same units",
            )

    @cached_property
    def _last(self) -> int:
        """The latest time of any edge."""
        lists = self.shard.topology.values()
        times = [rows.times for rows in lists if rows.times is not None]
        return self.control.max(max((int(some.max(initial=0)) for some in times), default=0))


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
    for one in [job.of(name) for name in job.goals] or [job]:
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
        else:  # of dates the latest time says what they are
            everyones = np.array([exchange.max(int(times.max(initial=0)))])
        codes = codes_since(times, since(everyones, *given))
        for code, split in enumerate(SPLITS):
            arrays[f"{split}_mask"] = torch.from_numpy(codes == code)
