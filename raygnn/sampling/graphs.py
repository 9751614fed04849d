"""Batches of whole graphs: which graphs when, whose they are, and which are left out."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from raygnn.errors import RaygnnError, TrainingError
from raygnn.graph.sample import Sample, Samples
from raygnn.sampling.batch import GraphBatch
from raygnn.sampling.collate import Collate, get
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.plan import SeedPlan, rank_share
from raygnn.sampling.prefetch import Note, silent

log = logging.getLogger("raygnn")


@dataclass
class GraphBatchMaker:
    """Makes batch ``(epoch, step)`` of one rank: plan, get, join.

    Attributes:
        numbers: of the graphs to train on, int64 ``[plan.num_seeds]``.
        data: stands for the contents of the graphs, if that is known.
        skip: leave out a graph that can not be had, on all ranks; else its error is raised.
        most_skipped: how many different ones may be left out before that is an error.
        note: told ``"dataset"`` and ``"features"``.
        skipped: the numbers of those that were, over all ranks.
    """

    plan: SeedPlan
    samples: Samples
    numbers: np.ndarray
    exchange: Exchange
    collate: Collate
    data: str = ""
    skip: bool = False
    most_skipped: int = 100
    note: Note = silent
    skipped: set[int] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __call__(self, epoch: int, step: int) -> GraphBatch:
        """Collective where samples may be left out.

        Raises:
            DataError: a graph that is unlike the others.
            TrainingError: the dataset raised, or too many were left out.
        """
        begin, waited = time.perf_counter(), self.exchange.seconds
        self.note("dataset", epoch=epoch, step=step)
        world = self.exchange.world
        chosen = self.numbers[self.plan.batch(epoch, step)]
        # as they were permuted, not by number: a rank shall not have neighbours of one class
        mine = chosen[rank_share(np.arange(len(chosen)), world.rank, world.size)]
        numbers, found, bad = self._get(mine)
        left_out = self._agree(bad) if self.skip else 0
        loaded, waited = time.perf_counter(), self.exchange.seconds - waited
        self.note("features")
        return self._joined(
            numbers,
            found,
            total=len(chosen) - left_out,
            window=self.plan.seeds_in_window(step),
            epoch=epoch,
            step=step,
            seconds={
                "sample": loaded - begin - waited,
                "features": -loaded,
                "exchange": waited,
            },
        )

    def accumulating(self, batches: int) -> GraphBatchMaker:
        """See `Maker`."""
        return replace(self, plan=replace(self.plan, accumulate=batches))

    @cached_property
    def identity(self) -> str:
        """See `Maker`."""
        digest = hashlib.blake2b(
            f"{self.data} {self.samples.num} {self.collate.classes}".encode(), digest_size=8
        )
        for split, numbers in sorted(self.samples.splits.items()):
            digest.update(split.encode() + numbers.astype(np.int64).tobytes())
        return digest.hexdigest()

    def join(self, numbers: np.ndarray) -> GraphBatch:
        """A batch of the graphs of these numbers, for evaluation. Not collective."""
        kept, found, _ = self._get(numbers)
        total = len(kept)
        return self._joined(kept, found, total=total, window=max(1, total), epoch=0, step=0)

    def _get(self, numbers: np.ndarray) -> tuple[list[int], list[Sample], list[int]]:
        """The graphs that could be had, and the numbers of those that could not."""
        kept, found, bad = [], [], []
        for number in numbers.tolist():
            try:
                with self._lock:  # evaluation and preparation are two threads
                    sample = get(self.samples, number)
                self.collate.check(number, sample)
            except RaygnnError as error:
                if not self.skip:
                    raise
                log.warning("graph %d is left out: %s", number, error.what)
                bad.append(number)
                continue
            kept.append(number)
            found.append(sample)
        return kept, found, bad

    def _joined(self, numbers: list[int], found: list[Sample], **facts: Any) -> GraphBatch:
        weight = torch.ones(max(1, len(found)))
        if not found:  # keep the step, without influence
            numbers, found, weight = [0], [self.collate.padding()], torch.zeros(1)
        parts = self.collate(found)
        if facts.get("seconds"):
            facts["seconds"]["features"] += time.perf_counter()
        return GraphBatch(seeds=torch.tensor(numbers), weight=weight, **parts, **facts)

    def _agree(self, bad: list[int]) -> int:
        """How many graphs of this batch all ranks together leave out. Collective."""
        total = int(self.exchange.sum(torch.tensor(len(bad))))
        if total:
            self.skipped.update(self.exchange.gather_rows(torch.tensor(bad).long()).tolist())
        if len(self.skipped) > self.most_skipped:
            raise TrainingError(
                f"{len(self.skipped)} graphs were left out, more than guard.bad_samples "
                f"({self.most_skipped})",
                remedy="see the ranks' logs for what was wrong with them; mend the dataset, or "
                "raise guard.bad_samples",
            )
        return total
