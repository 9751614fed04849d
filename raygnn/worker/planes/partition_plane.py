"""What data planes of one partitioned graph share: shard → inputs → store, sampler → batches."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor, nn

from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.data import etype_str
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.staging.shard import Shard, describe_shard
from raygnn.models.network import Network, Schema
from raygnn.models.norm import BatchNorm
from raygnn.models.registry import needs_degree
from raygnn.sampling.cache import choose, degrees, inclusion
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import FeatureStore, Inputs
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import SeedAssigner, Seeds, TaskSeeds
from raygnn.tasks.embeddings import Embeddings
from raygnn.tasks.inference import Inference
from raygnn.tasks.lightning_modules import Task
from raygnn.worker import blackbox
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Sizes
from raygnn.worker.planes.model_inputs import (
    MemoryBudget,
    make_embeddings,
    make_store,
    read_inputs,
)
from raygnn.worker.planes.plane import Traffic, map_shard, seed_plan
from raygnn.worker.planes.vocabulary import edge_arrays, relation_array, relations

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=Task)

log = logging.getLogger("raygnn")


@dataclass
class PartitionPlane:
    """A shard of one graph.

    Attributes:
        shard: what messages pass along.
        inputs: node type → the arrays that the model reads.
        within: that of several tasks, of which this one is; its data are used.
    """

    job: Job
    ranks: Ranks
    shard: Shard
    inputs: dict[str, Inputs]
    within: PartitionPlane | None = None
    _store: FeatureStore | None = field(default=None, init=False)

    @classmethod
    def open(cls, job: Job, ranks: Ranks) -> Self:
        """Map this rank's share of the partition.

        Raises:
            DataError: the partition, or this node's copy of it, can not be read or written.
        """
        start = time.perf_counter()
        config = job.config
        blackbox.note("staging")
        shard = map_shard(
            job, ranks, edge_arrays(config), replicated=job.replicated, hide=job.hidden
        )
        blackbox.note("setup")
        inputs = read_inputs(config, shard)
        log.info("%s; mapped in %.1f s", describe_shard(shard), time.perf_counter() - start)
        return cls(job, ranks, shard, inputs)

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def control(self) -> Exchange:
        return self.ranks.control

    @property
    def of(self) -> str:
        """The type of the seeds, as errors name it."""
        raise NotImplementedError

    def _finish(self, task: T) -> T:
        """Give a task what it shares with this plane."""
        task.embeddings = self._embeddings
        self.ranks.synchronise(task)
        return task

    @property
    def traffic(self) -> Traffic:
        """See `Plane`."""
        store = self._store
        return Traffic() if store is None else Traffic(store.remote, store.hits)

    @cached_property
    def _embeddings(self) -> Embeddings | None:
        if self.within is not None:
            return self.within._embeddings
        return make_embeddings(self.config, self.shard, self.inputs, self.ranks)

    @cached_property
    def inference(self) -> Inference:
        """What runs the model over the whole graph."""
        if self.within is not None:
            return self.within.inference
        rows = self._embeddings
        return Inference(
            self.shard,
            self.control,
            make_store(
                self.config,
                self.shard,
                self.inputs,
                self.control,
                self.ranks.device,
                learned=rows.tables if rows else None,
            ),
            self.inputs,
            num_layers=self.config.model.depth,
            batch_size=self.config.sampling.eval_batch_size,
            device=self.ranks.device,
            relation=relation_array(self.config.model),
        )

    def schema(self, target: str, out_features: int, others: tuple[str, ...] = ()) -> Schema:
        """What the model must know. Collective.

        Args:
            target, others: the node types whose outputs are wanted.
        """
        arrays, model = self.shard.node_data, self.config.model
        return Schema(
            in_features={t: i.width(arrays[t]) for t, i in self.inputs.items()},
            etypes=self.shard.etypes,
            target=target,
            out_features=out_features,
            categories={
                t: {n: (self._count(t, n), model.categories[n]) for n in i.categories}
                for t, i in self.inputs.items()
                if i.categories
            },
            relations={
                e: self.sizes.settle(f"relations of {etype_str(e)}", count)
                for e, count in relations(self.config, self.shard, self.control).items()
            },
            others=others,
            buckets=tuple(
                (t, n)
                for t, i in self.inputs.items()
                for n in i.categories
                if self._words(t, n)[:1] == [None]
            ),
        )

    def _words(self, ntype: str, name: str) -> list[Any]:
        """What the numbers of an array stand for, as far as the partition says."""
        assert self.job.partition is not None
        return read_meta(self.job.partition).names.get(f"{ntype}/{name}", [])

    def classes(self, labels: Tensor) -> int:
        """How many there are over all ranks, from this rank's labels int64 ``[n]``. Collective."""
        highest = int(labels.max()) if len(labels) else 0
        return self.settle("classes", max(2, self.control.max(highest + 1)))

    def settle(self, what: str, counted: int) -> int:
        """See `Sizes.settle`, of what belongs to this task."""
        return self.sizes.settle(self.counted(what), counted)

    def counted(self, what: str) -> str:
        """What belongs to this task, as `Sizes` calls it."""
        return f"{what} of {self.job.task}" if self.job.task else what

    @cached_property
    def sizes(self) -> Sizes:
        """See `Plane`."""
        if self.within is not None:
            return self.within.sizes
        request = self.job.request
        return Sizes(None if request is None else request.sizes)

    def assigned(self, seeds: Seeds) -> TaskSeeds:
        """The seeds of this task, as ranks are assigned them.

        Raises:
            DataError: there are none.
        """
        if not seeds.num:
            task, name = self.config.task, self.job.task
            raise DataError(
                f"none of the {task.seeds} of {self.of} is in train_mask and has a target",
                where=str(self.job.partition),
                remedy=f"check {f'tasks.{name}' if name else 'task'}.target and the masks",
            )
        return TaskSeeds(seed_plan(self.job, seeds.num), seeds, self.ranks.world)

    def make_batches(
        self, model: nn.Module, seeds: SeedAssigner, own: Mapping[str, np.ndarray], share: int
    ) -> BatchMaker:
        """What makes the training batches. Collective.

        Args:
            model: whatever the blocks go into.
            own: node type → this rank's nodes that seeds stand for.
            share: about how many of them are in a batch.
        """
        config, world = self.config, self.ranks.world
        how = None
        if all(i.one_table for i in self.inputs.values()) and isinstance(model, Network):
            how = model.first_combine
        budget = MemoryBudget(config, self.shard, self.inputs, world.size)
        ring = config.sampling.prefetch + 3  # queued, being made, being trained on
        store = self._store = make_store(
            config,
            self.shard,
            self.inputs,
            self.ranks.data,
            self.ranks.device,
            weighted=how == "gcn",
            resident=budget.holds_rows,
            ring=ring,
        )
        fanouts = resolve_fanouts(config.sampling.fanout, self.shard.etypes)[: config.model.depth]
        if config.sampling.cache != 0 and world.size > 1:
            start = time.perf_counter()
            bounds, rank = self.shard.bounds, world.rank
            if config.sampling.cache_policy == "degree":
                scores = degrees(self.shard)
            else:
                replace = config.sampling.replace
                scores = inclusion(self.shard, own, share, fanouts, replace=replace)
            kept = budget.cached_share
            store.fill_cache(choose(scores, bounds, rank, kept))
            log.info("cached %.0f %% in %.1f s", 100 * kept, time.perf_counter() - start)
        return BatchMaker(
            seeds=seeds,
            sampler=NeighborSampler(
                self.shard,
                self.ranks.data,
                seed=config.train.seed,
                replace=config.sampling.replace,
                weight=config.sampling.edge_weight,
                relation=relation_array(config.model),
            ),
            store=store,
            fanouts=fanouts,
            inputs=self.inputs,
            degree_etypes=self.shard.etypes if needs_degree(config.model) else (),
            combine="weighted" if how == "gcn" else how,
            counted=world.size > 1 and any(isinstance(m, BatchNorm) for m in model.modules()),
            note=blackbox.note,
            identity=self.identity,
        )

    @property
    def identity(self) -> str:
        """What the partition was made from, however many parts it has; of one that others made,
        how much there is of it."""
        assert self.job.partition is not None
        meta = read_meta(self.job.partition)
        made_from = meta.manifest.source.made_from if meta.manifest else {}
        if "graph" in made_from:
            return str(made_from["graph"])
        counts = {t: meta.num_nodes(t) for t in meta.ntypes}
        return json.dumps([counts, [meta.num_edges(e) for e in meta.etypes]])

    @property
    def batch_share(self) -> int:
        """Seeds of a rank in a batch."""
        return -(-self.job.global_batch // self.ranks.world.size)

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
        count = self.control.max(int(values.max()) + 1 if len(values) else 0)
        count = max(count, len(self._words(ntype, name)))
        return self.sizes.settle(f"categories of {ntype}/{name}", count)
