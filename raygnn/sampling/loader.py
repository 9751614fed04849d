"""From a step number to a batch, and from batches to the iterable that Lightning trains on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from raygnn.errors import InputError
from raygnn.graph.data import EdgeType
from raygnn.sampling.batch import Batch
from raygnn.sampling.exchange import World
from raygnn.sampling.plan import SeedPlan, rank_share
from raygnn.sampling.prefetch import Prefetcher
from raygnn.sampling.rows import FEATURES, RowStore, degree_column
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import Seeds


@dataclass(frozen=True)
class BatchMaker:
    """Makes batch ``(epoch, step)`` of one rank: plan, sample, gather. Collective.

    Attributes:
        stores: node type → store with the column ``FEATURES`` and, for models that need them,
            ``degree_column(etype)``.
    """

    plan: SeedPlan
    seeds: Seeds
    ntype: str
    world: World
    sampler: NeighborSampler
    stores: dict[str, RowStore]
    fanouts: Sequence[int]
    degree_etypes: Sequence[EdgeType]

    def __call__(self, epoch: int, step: int) -> Batch:
        chosen = self.plan.batch(epoch, step)
        mine = chosen[rank_share(self.seeds.ids[chosen], self.world.rank, self.world.size)]
        weight = torch.ones(max(1, len(mine)))
        if not len(mine):  # a short last batch: keep the step, without influence
            mine, weight = chosen[:1], torch.zeros(1)
        ids = self.seeds.ids[mine]

        start = time.perf_counter()
        blocks, inputs = self.sampler.sample(self.ntype, ids, self.fanouts, epoch=epoch, step=step)
        sampled = time.perf_counter()
        rows = {t: store.gather(inputs[t]) for t, store in self.stores.items()}
        gathered = time.perf_counter()
        return Batch(
            blocks=blocks,
            x={t: columns[FEATURES] for t, columns in rows.items()},
            degree={e: rows[e[2]][degree_column(e)] for e in self.degree_etypes},
            seeds=torch.from_numpy(ids),
            y=self.seeds.targets[torch.from_numpy(mine)],
            weight=weight,
            total=len(chosen),
            window=self.plan.seeds_in_window(step),
            epoch=epoch,
            step=step,
            seconds={"sample": sampled - start, "features": gathered - sampled},
        )


class BatchLoader:
    """The training batches of one rank, resumable at any step.

    The position is where the *next* batch to train on stands; batches that were prepared ahead
    do not count. A position at the end of an epoch means the start of the next one, since a
    checkpoint may be taken on an epoch's last batch.

    Args:
        make: makes one batch.
        prefetch: batches prepared ahead of training.
        limit: batches in all, over the whole run; None = no limit but the epochs.
    """

    def __init__(self, make: BatchMaker, *, prefetch: int, limit: int | None = None):
        self._make = make
        self._prefetch = prefetch
        self._limit = limit
        self.epoch = 0
        self.step = 0

    def __len__(self) -> int:
        return self._make.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        # a generator: nothing happens before the first batch is asked for, since Lightning makes
        # one iterator too many before it restores the position
        length = len(self)
        if self.step >= length:
            self.epoch, self.step = self.epoch + 1, 0
        epoch, last = self.epoch, length
        if self._limit is not None:
            last = min(length, self._limit - epoch * length)
        for batch in Prefetcher(
            lambda step: self._make(epoch, step), range(self.step, last), self._prefetch
        ):
            self.step = batch.step + 1
            yield batch

    @property
    def epochs_done(self) -> int:
        """Whole epochs that have been trained on."""
        return self.epoch + (self.step >= len(self))

    def state_dict(self) -> dict[str, int]:
        plan = self._make.plan
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_seeds": plan.num_seeds,
            "global_batch": plan.global_batch,
            "seed": plan.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position.

        Raises:
            InputError: it was counted in batches of another size, or over other seeds.
        """
        own = self.state_dict()
        for name in ("num_seeds", "global_batch", "seed"):
            if state[name] != own[name]:
                raise InputError(
                    f"the checkpoint has {name} {state[name]}, this run has {own[name]}",
                    remedy="resume with the graph, train.seed and sampling.batch_size × workers "
                    "that the run had",
                )
        self.epoch, self.step = state["epoch"], state["step"]
