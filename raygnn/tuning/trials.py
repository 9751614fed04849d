"""A sweep on one rank: short trainings of one job with other settings, on the ranks as they are.

Each trial trains a new model on the same first batches, without evaluation and checkpoints. All
ranks measure together and so choose alike.
"""

from __future__ import annotations

import gc
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from raygnn.config.rules import contradictions
from raygnn.config.schema import Config
from raygnn.errors import GuardError
from raygnn.runs.metrics_files import STEP
from raygnn.sampling.batch import Share
from raygnn.sampling.loader import Maker
from raygnn.tuning.search import Settings, Trial, apply, axes, is_exact, search
from raygnn.util.files import Appender, plain
from raygnn.worker.comm.reduction import shard_optimizer
from raygnn.worker.job import TRIALS, Job
from raygnn.worker.planes import open_plane
from raygnn.worker.planes.plane import Plane
from raygnn.worker.rank_setup import RankSetup, Runtime
from raygnn.worker.records import Closing

_FIRST = 8  # steps of the trial that shows how long one takes
_WINDOWS = 4  # that are measured, after one that is not
_FEWEST, _MOST = 2, 100  # steps of a window
_DEEPEST = 4  # batches ahead that are tried, or what is configured if that is more

log = logging.getLogger("raygnn")


class Tuning:
    """The sweep of one job, on one of its ranks.

    Args:
        job: its ``tune`` is the seconds that a trial is to take.
    """

    def __init__(self, job: Job, runtime: Runtime):
        assert job.tune is not None
        self._job = job
        self._seconds = job.tune
        self._runtime = runtime
        deepest = max(_DEEPEST, job.config.sampling.prefetch)
        # what a trial leaves alone; buffers are made for as many batches as may wait in any
        self._base = apply(
            job.config,
            {
                "train.epochs": 2**31 - 1,
                "train.patience": None,
                "sampling.prefetch": deepest,
                "fault.straggler": None,
            },
        )
        rank = RankSetup(replace(job, config=self._base), runtime)
        self._ranks, self._control = rank.ranks, rank.control
        self._plane: tuple[float | str, Plane, Maker[Share]] | None = None
        self._file = Appender(job.run_dir / TRIALS)
        self._window = 0
        self._gradients = 0  # bytes of all

    def run(self) -> dict[str, Any]:
        """Measure; returns the outcome as JSON types. Collective."""
        config = self._job.config
        first = self._train({}, _FIRST // 2)
        each = float(self._same(first["seconds"]))
        steps = math.ceil(self._seconds / max(each, 1e-6) / (_WINDOWS + 1))
        self._window = int(self._same(min(_MOST, max(_FEWEST, steps))))
        one_host = self._ranks.host.holds_all
        keys = axes(config, self._ranks.world.size, self._gradients, one_host=one_host)
        found = search(keys, self._measure, self._is_possible)
        self._file.close()
        return {"seconds": {}, **asdict(found)}

    def _is_possible(self, settings: Settings) -> bool:
        """Rank 0's verdict, since some rules look at files."""
        return self._same(not contradictions(apply(self._job.config, settings))) > 0

    def _measure(self, settings: Settings) -> Trial:
        config = apply(self._job.config, settings)
        more = config.train.accumulate / self._job.config.train.accumulate
        try:
            facts = self._train(settings, max(_FEWEST, math.ceil(self._window / more)))
        except GuardError as error:  # alike on all ranks: gradients that are not finite
            log.warning("trial failed: %s", error)
            parts, sizes = dict.fromkeys(STEP, 0.0), dict.fromkeys(("gradients", "exchange"), 0.0)
            facts = {"rate": 0.0, "seconds": 0.0, "parts": parts, "bytes": sizes}
        trial = Trial(settings, float(self._same(facts["rate"])), facts)
        if self._ranks.first:
            record = {"settings": dict(settings), "exact": is_exact(settings), **facts}
            self._file.add((json.dumps(plain(record)) + "\n").encode())
        return trial

    def _same(self, value: float) -> float:
        own = value if self._ranks.first else 0.0
        return float(self._control.sum(torch.tensor(own, dtype=torch.float64)))

    def _train(self, settings: Settings, window: int) -> dict[str, Any]:
        """Train for some windows of steps; what all but the first of them took."""
        steps = window * (_WINDOWS + 1)
        limits = {"train.max_steps": steps, "train.log_every": window}
        config = apply(self._base, {**settings, **limits})
        if "sampling.prefetch" not in settings:
            prefetch = self._job.config.sampling.prefetch
            config = apply(config, {"sampling.prefetch": prefetch})
        job = replace(self._job, config=config)
        rank = RankSetup(job, self._runtime, self._ranks.for_config(config))
        plane, maker = self._data(config)
        maker = maker.accumulating(config.train.accumulate)
        task = plane.task()
        task.total_steps = steps
        means, ranks = _Kept(), _Kept()
        records = rank.records([means, ranks])
        loader = rank.loader(maker)
        trainer = rank.trainer([rank.reduction, records, rank.guard, Closing()], None)
        log.info("trial: %s", dict(settings))
        try:
            rank.guard.check_model(task, rank.options())
            shard_optimizer(rank.ranks, task)
            trainer.fit(task, train_dataloaders=loader)
        finally:
            loader.close()
            del trainer
            gc.collect()  # models and buckets, before the next ones
        self._gradients = rank.reduction.whole
        return _facts(means.records, ranks.records, window)

    def _data(self, config: Config) -> tuple[Plane, Maker[Share]]:
        """The data plane for this cache: made anew only where another one is tried."""
        cache = config.sampling.cache
        if self._plane is None or self._plane[0] != cache:
            self._plane = None  # room for the next one
            base = apply(self._base, {"sampling.cache": cache})
            plane = open_plane(replace(self._job, config=base), self._ranks.for_config(base))
            self._plane = (cache, plane, plane.batches(plane.task()))
        return self._plane[1:]


class _Kept:
    """Takes records as a `MetricsWriter` does, and keeps them."""

    waiting: OSError | None = None

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self, seconds: float = 0.0) -> None:
        pass


def _facts(
    means: list[Mapping[str, Any]], ranks: list[Mapping[str, Any]], window: int
) -> dict[str, Any]:
    """Seeds a second, seconds of a batch and of its parts (mean over ranks), bytes of a batch."""
    pairs = [(m, r["batches"]) for m, r in zip(means, ranks) if m["step"] > window]
    batches = sum(count for _, count in pairs)

    def mean(key: str) -> float:
        return float(sum(record[key] * count for record, count in pairs) / batches)

    parts = {name: mean(f"seconds/{name}") for name in STEP}
    seconds = sum(parts.values())
    times = [sum(m[f"seconds/{name}"] for name in STEP) * count for m, count in pairs]
    seeds = sum(m["seeds_per_second"] * t for (m, _), t in zip(pairs, times))
    return {
        "rate": seeds / max(sum(times), 1e-9),
        "seconds": seconds,
        "parts": parts,
        "bytes": {name: mean(f"bytes/{name}") for name in ("gradients", "exchange")},
    }
