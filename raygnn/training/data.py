"""A rank's data plane: shard → inputs → model's schema → store, cache, sampler → batches."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.layout import read_meta
from raygnn.graph.mapped import large_pages
from raygnn.graph.shard import Shard, describe_shard, load_shard
from raygnn.graph.staging import Stage
from raygnn.graph.validate import check_weights
from raygnn.models.network import Network, Schema
from raygnn.models.registry import needs_degree
from raygnn.preflight.machine import memory
from raygnn.sampling.cache import Scores, choose, degrees, inclusion
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.fanout import Fanout, resolve_fanouts
from raygnn.sampling.features import FeatureStore
from raygnn.sampling.inputs import SCALE, Inputs, build_store, choose_inputs
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import SeedPlan
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import NodeSeeds, gather_seeds, owned_nodes
from raygnn.training.job import Job
from raygnn.training.precision import PRECISIONS

log = logging.getLogger("raygnn")


@dataclass(frozen=True)
class DataPlane:
    """What one rank trains on.

    Attributes:
        exchange: the collectives of batches; control: those of everything else.
        inputs: node type → the arrays that the model reads.
    """

    job: Job
    shard: Shard
    exchange: Exchange
    control: Exchange
    inputs: dict[str, Inputs]

    @property
    def config(self) -> Config:
        return self.job.config

    @cached_property
    def labels(self) -> Tensor:
        """Classes of the owned nodes, int64 ``[owned]``."""
        return self.shard.node_data[self.job.ntype][self.config.task.target].long().flatten()

    def schema(self) -> Schema:
        """What the model must know. Collective."""
        arrays, model = self.shard.node_data, self.config.model
        highest = int(self.labels.max()) if len(self.labels) else 0
        return Schema(
            in_features={
                t: sum(_width(arrays[t][n]) for n in (*i.plain, *i.scaled))
                for t, i in self.inputs.items()
            },
            etypes=self.shard.etypes,
            target=self.job.ntype,
            out_features=max(2, self.control.max(highest + 1)),
            categories={
                t: {n: (self._count(t, n), model.categories[n]) for n in i.categories}
                for t, i in self.inputs.items()
                if i.categories
            },
        )

    def store(
        self,
        exchange: Exchange,
        *,
        weighted: bool = False,
        resident: bool = False,
        ring: int = 0,
    ) -> FeatureStore:
        """A store of the model's inputs that fetches over ``exchange``: see `build_store`."""
        return build_store(
            self.shard,
            exchange,
            self.inputs,
            dtype=PRECISIONS[self.config.precision].dtype,
            degree_etypes=self.shard.etypes if needs_degree(self.config.model) else (),
            weighted=weighted,
            resident=resident,
            ring=ring,
        )

    def batches(self, model: nn.Module) -> BatchMaker:
        """What makes the training batches for ``model``. Collective."""
        config, world = self.config, self.exchange.world
        seeds = gather_seeds(self.shard, self.control, self.job.ntype, self.labels)
        if not seeds.num:
            raise DataError(
                f"no node of {self.job.ntype} is in train_mask and has a label",
                where=str(self.job.partition),
                remedy="check task.target and the masks",
            )
        how = None
        if all(i.one_table for i in self.inputs.values()) and isinstance(model, Network):
            how = model.first_combine
        ring = config.sampling.prefetch + 3  # queued, being made, being trained on
        store = self.store(
            self.exchange, weighted=how == "gcn", resident=self._resident(), ring=ring
        )
        fanouts = resolve_fanouts(config.sampling.fanout, self.shard.etypes)
        if config.sampling.cache and world.size > 1:
            start = time.perf_counter()
            bounds, rank = self.shard.bounds, world.rank
            scores = self._scores(seeds, fanouts)
            store.fill_cache(choose(scores, bounds, rank, config.sampling.cache))
            log.info("cached remote rows in %.1f s", time.perf_counter() - start)
        return BatchMaker(
            plan=SeedPlan(
                num_seeds=seeds.num,
                global_batch=config.sampling.batch_size * world.size,
                seed=config.train.seed,
                accumulate=config.train.accumulate,
            ),
            seeds=seeds,
            world=world,
            sampler=NeighborSampler(
                self.shard,
                self.exchange,
                seed=config.train.seed,
                replace=config.sampling.replace,
                weight=config.sampling.edge_weight,
            ),
            store=store,
            fanouts=fanouts,
            inputs=self.inputs,
            degree_etypes=self.shard.etypes if needs_degree(config.model) else (),
            combine="weighted" if how == "gcn" else how,
        )

    def count(self, split: str) -> int:
        """Nodes of all ranks in a split. Collective."""
        owned = len(owned_nodes(self.shard, self.job.ntype, split, self.labels))
        return int(self.control.sum(torch.tensor(owned)))

    def _resident(self) -> bool:
        """Whether this rank copies its rows into its own memory."""
        wanted = self.config.staging.resident
        if wanted != "auto":
            return wanted == "always"
        width = PRECISIONS[self.config.precision].dtype.itemsize
        rows = sum(
            self.shard.owned(t)
            * sum(
                _width(arrays[name]) * (1 if name in self.inputs[t].scaled else width)
                for name in (*self.inputs[t].plain, *self.inputs[t].scaled)
            )
            for t, arrays in self.shard.node_data.items()
        )
        # how many of the ranks are on this node is not known here: at most so many
        neighbours = min(self.exchange.world.size, os.cpu_count() or 1)
        _, free = memory()
        return large_pages() and free is not None and 4 * rows * neighbours <= free

    def _scores(self, seeds: NodeSeeds, fanouts: list[Fanout]) -> Scores:
        """How much each node's row is worth keeping."""
        sampling, ntype = self.config.sampling, self.job.ntype
        if sampling.cache_policy == "degree":
            return degrees(self.shard)
        first = self.shard.first(ntype)
        ids = seeds.ids(np.arange(seeds.num))
        own = ids[(ids >= first) & (ids < first + self.shard.owned(ntype))]
        return inclusion(
            self.shard, {ntype: own}, sampling.batch_size, fanouts, replace=sampling.replace
        )

    def _count(self, ntype: str, name: str) -> int:
        """Categories of an array, over all ranks."""
        values = self.shard.node_data[ntype][name]
        lowest = int(values.min()) if len(values) else 0
        if self.control.max(-lowest) > 0:
            raise DataError(
                f"array {name!r} of node type {ntype!r} has categories below 0",
                where=str(self.job.partition),
                remedy="number the categories from 0, or leave it out of model.categories",
            )
        return self.control.max(int(values.max()) + 1 if len(values) else 0)


def load_data(job: Job, exchange: Exchange, control: Exchange) -> DataPlane:
    """Map this rank's share of the partition.

    Raises:
        DataError: the partition, or this node's copy of it, can not be read or written.
    """
    start = time.perf_counter()
    config, world = job.config, exchange.world
    shard = load_shard(
        read_meta(job.partition),
        world.rank,
        world.size,
        replicated=job.replicated,
        stage=Stage.of(config.staging),
        edge_arrays=[config.sampling.edge_weight] if config.sampling.edge_weight else (),
    )
    model = config.model
    inputs = {
        t: choose_inputs(arrays, model.feature_names, list(model.categories))
        for t, arrays in shard.node_data.items()
    }
    _check_scales(shard, inputs)
    _check_weights(shard, config)
    log.info("%s; mapped in %.1f s", describe_shard(shard), time.perf_counter() - start)
    return DataPlane(job, shard, exchange, control, inputs)


def _check_scales(shard: Shard, inputs: dict[str, Inputs]) -> None:
    for ntype, chosen in inputs.items():
        for name in chosen.scaled:
            scale = shard.node_data[ntype][name + SCALE]
            if _width(scale) > 1:
                raise DataError(
                    f"array {name + SCALE!r} of node type {ntype!r} has rows of "
                    f"{list(scale.shape[1:])}, expected one number for each node",
                    remedy=f"give each node one scale, or rename it so that {name!r} has none",
                )


def _check_weights(shard: Shard, config: Config) -> None:
    name = config.sampling.edge_weight
    for etype, rows in shard.topology.items():
        if name is not None and name in rows.data:
            check_weights(name, etype, rows.data[name])


def _width(rows: Tensor) -> int:
    return int(np.prod(rows.shape[1:], dtype=np.int64))
