"""The data plane of one partitioned graph: shard → inputs → model → store, sampler → batches."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.layout import read_meta
from raygnn.graph.mapped import large_pages
from raygnn.graph.shard import Shard, describe_shard, load_shard
from raygnn.graph.staging import Stage
from raygnn.graph.validate import check_weights
from raygnn.models.network import Network, Schema
from raygnn.models.registry import build_model, needs_degree
from raygnn.preflight.machine import memory
from raygnn.sampling.cache import Scores, choose, degrees, inclusion
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.fanout import Fanout, resolve_fanouts
from raygnn.sampling.features import FeatureStore
from raygnn.sampling.inputs import SCALE, Inputs, build_store, choose_inputs, row_width
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import NodeSeeds, gather_seeds, owned_nodes
from raygnn.tasks.embeddings import Embeddings
from raygnn.tasks.inference import Inference
from raygnn.tasks.losses import make_loss
from raygnn.tasks.metrics import measure
from raygnn.tasks.node import NodeTask
from raygnn.tasks.task import Task
from raygnn.training import blackbox
from raygnn.training.job import SPLITS, Job
from raygnn.training.learned import make_embeddings, with_learned
from raygnn.training.plane import Traffic, build, seed_plan
from raygnn.training.precision import PRECISIONS
from raygnn.training.ranks import Ranks
from raygnn.training.relations import edge_arrays, relation_array, relations
from raygnn.training.rows import Predictions, chunk_rows

log = logging.getLogger("raygnn")


@dataclass
class NodePlane:
    """A shard of one graph, whose nodes are the seeds.

    Attributes:
        ntype: the type of the seeds.
        inputs: node type → the arrays that the model reads.
    """

    job: Job
    ranks: Ranks
    shard: Shard
    ntype: str
    inputs: dict[str, Inputs]
    _store: FeatureStore | None = field(default=None, init=False)

    @classmethod
    def open(cls, job: Job, ranks: Ranks) -> NodePlane:
        """Map this rank's share of the partition.

        Raises:
            DataError: the partition, or this node's copy of it, can not be read or written.
        """
        start = time.perf_counter()
        config, world = job.config, ranks.world
        assert job.partition is not None
        assert job.ntype is not None
        blackbox.note("staging")
        shard = load_shard(
            read_meta(job.partition),
            world.rank,
            world.size,
            replicated=job.replicated,
            stage=Stage.of(config.staging),
            edge_arrays=edge_arrays(config),
        )
        blackbox.note("setup")
        model = config.model
        inputs = {
            t: choose_inputs(arrays, model.feature_names, model.categories)
            for t, arrays in shard.node_data.items()
        }
        inputs = with_learned(inputs, config)
        _check_scales(shard, inputs)
        _check_weights(shard, config)
        log.info("%s; mapped in %.1f s", describe_shard(shard), time.perf_counter() - start)
        return cls(job, ranks, shard, job.ntype, inputs)

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def control(self) -> Exchange:
        return self.ranks.control

    def task(self) -> NodeTask:
        """See `Plane`."""
        config = self.config
        schema = self.schema()
        model = build(config, lambda: build_model(config.model, schema))
        loss, world = make_loss(config.task), self.ranks.world.size
        planned = self.job.planned
        task = NodeTask(model, loss, config.train, world, schema.out_features, planned)
        task.embeddings = self._embeddings
        return task

    @property
    def traffic(self) -> Traffic:
        """See `Plane`."""
        store = self._store
        return Traffic() if store is None else Traffic(store.remote, store.hits)

    def evaluate(self, task: Task, split: str) -> dict[str, float]:
        """See `Plane`."""
        owned = owned_nodes(self.shard, self.ntype, split, self.labels)
        first = self.shard.first(self.ntype)
        outputs = self._inference.outputs(task.model, self.ntype, owned + first)
        wanted = self.labels[torch.from_numpy(owned)]
        return measure(outputs, wanted, self.config.task, self.control)

    def predict(self, task: Task, split: str) -> Iterator[Predictions]:
        """See `Plane`."""
        shard, ntype = self.shard, self.ntype
        splits = self._splits()
        chosen = np.arange(len(splits))
        if split != "all":
            chosen = chosen[splits == SPLITS.index(split)]
        if not self.control.max(len(chosen)):
            return
        original = shard.original[ntype]
        chosen = chosen[np.argsort(original[chosen])]
        outputs = self._inference.outputs(task.model, ntype, chosen + shard.first(ntype))
        size = chunk_rows(outputs.shape[1])
        for start in range(0, len(chosen), size):
            some = chosen[start : start + size]
            yield Predictions(
                ids=original[some].astype(np.int64),
                outputs=outputs[start : start + size],
                targets=self.labels[torch.from_numpy(some)],
                splits=splits[some],
            )

    def _splits(self) -> np.ndarray:
        """See `Predictions.splits`, of the owned nodes."""
        codes = np.full(self.shard.owned(self.ntype), -1, np.int8)
        for number, split in enumerate(SPLITS):
            mask = self.shard.node_data[self.ntype].get(f"{split}_mask")
            if mask is not None:
                codes[mask.bool().numpy()] = number
        return codes

    @cached_property
    def _embeddings(self) -> Embeddings | None:
        return make_embeddings(self.config, self.shard, self.inputs, self.ranks)

    @cached_property
    def _inference(self) -> Inference:
        rows = self._embeddings
        return Inference(
            self.shard,
            self.control,
            self.store(self.control, learned=rows.tables if rows else None),
            self.inputs,
            num_layers=self.config.model.depth,
            batch_size=self.config.sampling.eval_batch_size,
            device=self.ranks.device,
            relation=relation_array(self.config.model),
        )

    @cached_property
    def labels(self) -> Tensor:
        """Classes of the owned nodes, int64 ``[owned]``."""
        return self.shard.node_data[self.ntype][self.config.task.target].long().flatten()

    def schema(self) -> Schema:
        """What the model must know. Collective."""
        arrays, model = self.shard.node_data, self.config.model
        highest = int(self.labels.max()) if len(self.labels) else 0
        return Schema(
            in_features={t: i.width(arrays[t]) for t, i in self.inputs.items()},
            etypes=self.shard.etypes,
            target=self.ntype,
            out_features=max(2, self.control.max(highest + 1)),
            categories={
                t: {n: (self._count(t, n), model.categories[n]) for n in i.categories}
                for t, i in self.inputs.items()
                if i.categories
            },
            relations=relations(self.config, self.shard, self.control),
        )

    def store(
        self,
        exchange: Exchange,
        *,
        weighted: bool = False,
        resident: bool = False,
        ring: int = 0,
        learned: Mapping[str, Tensor] | None = None,
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
            learned=learned,
        )

    def batches(self, task: Task) -> BatchMaker:
        """See `Plane`."""
        config, world, model = self.config, self.ranks.world, task.model
        seeds = gather_seeds(self.shard, self.control, self.ntype, self.labels)
        if not seeds.num:
            raise DataError(
                f"no node of {self.ntype} is in train_mask and has a label",
                where=str(self.job.partition),
                remedy="check task.target and the masks",
            )
        how = None
        if all(i.one_table for i in self.inputs.values()) and isinstance(model, Network):
            how = model.first_combine
        ring = config.sampling.prefetch + 3  # queued, being made, being trained on
        store = self._store = self.store(
            self.ranks.data, weighted=how == "gcn", resident=self._resident(), ring=ring
        )
        fanouts = resolve_fanouts(config.sampling.fanout, self.shard.etypes)[: config.model.depth]
        if config.sampling.cache and world.size > 1:
            start = time.perf_counter()
            bounds, rank = self.shard.bounds, world.rank
            scores = self._scores(seeds, fanouts)
            store.fill_cache(choose(scores, bounds, rank, config.sampling.cache))
            log.info("cached remote rows in %.1f s", time.perf_counter() - start)
        return BatchMaker(
            plan=seed_plan(self.job, seeds.num),
            seeds=seeds,
            world=world,
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
            note=blackbox.note,
            identity=self.identity,
        )

    @property
    def identity(self) -> str:
        """What the partition was made from, however many parts it has; of one that others made,
        how much there is of it."""
        assert self.job.partition is not None
        meta = read_meta(self.job.partition)
        made_from = ((meta.manifest or {}).get("source") or {}).get("made_from") or {}
        if "graph" in made_from:
            return str(made_from["graph"])
        counts = {t: meta.num_nodes(t) for t in meta.ntypes}
        return json.dumps([counts, [meta.num_edges(e) for e in meta.etypes]])

    def count(self, split: str) -> int:
        """See `Plane`."""
        owned = len(owned_nodes(self.shard, self.ntype, split, self.labels))
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
                row_width(arrays[name]) * (1 if name in self.inputs[t].scaled else width)
                for name in (*self.inputs[t].plain, *self.inputs[t].scaled)
            )
            for t, arrays in self.shard.node_data.items()
        )
        # how many of the ranks are on this node is not known here: at most so many
        neighbours = min(self.ranks.world.size, os.cpu_count() or 1)
        _, free = memory()
        return large_pages() and free is not None and 4 * rows * neighbours <= free

    def _scores(self, seeds: NodeSeeds, fanouts: list[Fanout]) -> Scores:
        """How much each node's row is worth keeping."""
        sampling, ntype = self.config.sampling, self.ntype
        if sampling.cache_policy == "degree":
            return degrees(self.shard)
        first = self.shard.first(ntype)
        ids = seeds.ids(np.arange(seeds.num))
        share = -(-self.job.global_batch // self.ranks.world.size)
        own = ids[(ids >= first) & (ids < first + self.shard.owned(ntype))]
        return inclusion(self.shard, {ntype: own}, share, fanouts, replace=sampling.replace)

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


def _check_scales(shard: Shard, inputs: dict[str, Inputs]) -> None:
    for ntype, chosen in inputs.items():
        for name in chosen.scaled:
            scale = shard.node_data[ntype][name + SCALE]
            if row_width(scale) > 1:
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
