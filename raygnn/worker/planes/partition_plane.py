"""Base of the data planes of a partitioned graph: shard → inputs → store, sampler → batches."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.errors import DataError
from raygnn.graph.data import NEVER, EdgeType, etype_str
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import FEATURES, TIME, Shard, describe_shard, load_shard
from raygnn.models.network import Network, Schema
from raygnn.models.norm import BatchNorm
from raygnn.models.registry import needs_degree_sampled
from raygnn.sampling.cache import Scores, choose_for_host, choose_near, inclusion
from raygnn.sampling.features import Inputs, choose_edge_inputs
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import Fanout, resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import SeedAssigner, Seeds, TaskSeeds, as_labels
from raygnn.tasks.embeddings import Embeddings
from raygnn.tasks.inference import Inference
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker import blackbox
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Request, Sizes
from raygnn.worker.planes.model_inputs import MemoryBudget, make_embeddings, make_store, read_inputs
from raygnn.worker.planes.plane import Plane, category_sizes, seed_plan
from raygnn.worker.planes.prediction_rows import Embedded, embedded_nodes, pick_ntype
from raygnn.worker.planes.seed_times import Clock, split_by_time, times_of
from raygnn.worker.planes.vocabulary import count_numbers, edge_reads, relations

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T", bound=TaskModule)

log = logging.getLogger("raygnn")

_REACHED = 0.05  # a smaller share of seeds that messages reach causes a warning


def map_shard(job: Job, ranks: Ranks, **options: Any) -> Shard:
    """Map this rank's part of the partition; for the options see `load_shard`."""
    meta, world = job.meta, ranks.world
    stage = Stage.from_config(job.config.staging)
    return job.read(lambda: load_shard(meta, world.rank, world.size, stage=stage, **options))


def union(parts: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return node type → unique global ids of all parts, ascending."""
    nodes: dict[str, np.ndarray] = {}
    for part in parts:
        for ntype, ids in part.items():
            nodes[ntype] = np.union1d(nodes.get(ntype, ids[:0]), ids)
    return nodes


@dataclass
class PartitionPlane(Plane):
    """A shard of one graph.

    Attributes:
        shard: carries the messages.
        inputs: node type → the arrays that the model reads.
        within: plane of a multi-task job, whose data this task's plane uses.
    """

    shard: Shard
    inputs: dict[str, Inputs]
    within: PartitionPlane | None = None
    _store: Any = field(default=None, init=False)

    if TYPE_CHECKING:

        @property
        def ntypes(self) -> list[str]: ...
        @property
        def labels(self) -> Tensor: ...
        @property
        def seed_type(self) -> str: ...
        def _chosen(self, split: str) -> np.ndarray: ...

    @classmethod
    def open(cls, job: Job, ranks: Ranks) -> Self:
        """Map this rank's part of the partition. Raises DataError if the partition, or this node's
        copy of it, cannot be read or written."""
        start = time.perf_counter()
        blackbox.note("staging")
        reads = edge_reads(job.config)
        shard = map_shard(job, ranks, reads=reads, replicated=job.replicated, hide=job.hidden)
        blackbox.note("setup")
        split_by_time(job, shard, ranks.control)
        inputs = read_inputs(job.config, shard)
        log.info("%s; mapped in %.1f s", describe_shard(shard), time.perf_counter() - start)
        return cls(job, ranks, shard, inputs)

    def _finish(self, task: T) -> T:
        """Connect a task to this plane's embedding tables and ranks."""
        task.embeddings = self._embeddings
        self.ranks.synchronise(task)
        return task

    @property
    def traffic(self) -> tuple[int, int]:
        store = self._store
        return (0, 0) if store is None else (store.remote, store.hits)

    @cached_property
    def _embeddings(self) -> Embeddings | None:
        if self.within is not None:
            return self.within._embeddings
        return make_embeddings(self.config, self.shard, self.inputs, self.ranks)

    @property
    def inference(self) -> Inference:
        """Inference over the graph, with the current embedding rows."""
        if self.within is not None:
            return self.within.inference
        if self._embeddings is not None:
            self._embeddings.publish()
        return self._inference

    @cached_property
    def _inference(self) -> Inference:
        return self.inference_over(self.shard)

    def inference_over(self, shard: Shard) -> Inference:
        """Return the inference over a shard of the same types and arrays."""
        rows, request = self._embeddings, self.job.request
        return Inference(
            shard,
            self.control,
            make_store(
                self.config,
                shard,
                self.inputs,
                self.control,
                self.ranks.device,
                fanout=(request and request.fanout) or (),
                weighted=self.config.model.kind == "gcn",
                learned=rows.tables if rows else None,
                host=self.ranks.host,
            ),
            self.inputs,
            num_layers=self.config.model.depth,
            batch_size=self.config.sampling.eval_batch_size,
            device=self.ranks.device,
            timing=self.clock.timing,
            at=self.clock.at,
            # the latest edges are not sampled at random, and the model was trained on them
            hops=self.fanouts if self.clock.latest else None,
            spare=MemoryBudget(shard, self.inputs, self.ranks).evaluations,
            once=self.config.model.draws_once,
        )

    @cached_property
    def clock(self) -> Clock:
        """``sampling.time`` and the request's times in the data's units."""
        return Clock(self.job, self.shard, self.control)

    @property
    def fanouts(self) -> list[Fanout]:
        """``sampling.fanout`` by edge type, from the seeds outward."""
        sampling, depth = self.config.sampling, self.config.model.depth
        return resolve_fanouts(sampling.fanout, self.shard.etypes)[:depth]

    @property
    def time(self) -> str | None:
        """Array of the seeds' times; None = they have none, or one for all."""
        return None if self.clock.at is not None else self.config.seed_time

    def node_times(self, ntype: str) -> np.ndarray | None:
        """Return the times of the owned nodes, int64 ``[owned]``; None if they have none.
        Collective. Raises DataError if the array of times is missing or unusable."""
        if self.time is None:
            return None
        stored = self.shard.node_data[ntype].get(self.time)
        times = times_of(stored, f"node type {ntype!r}", self.time)
        self.clock.check(times, ntype, self.time)
        return times

    def unreached(self, ntype: str, ids: np.ndarray, times: np.ndarray | None) -> list[str]:
        """Return warnings about times, and if nearly no message reaches the training seeds.
        Collective. ``ids``: global ids of owned nodes of the type, int64 ``[n]``; ``times``: their
        times, int64 ``[n]``; None = they have none."""
        if not self.config.model.depth:
            return self.clock.warnings  # it passes no messages
        reached, anywhere = {}, np.zeros(len(ids), bool)
        for etype, rows in self.shard.topology.items():
            if etype[2] != ntype:
                continue
            start, end = rows.indptr[ids - rows.first], rows.indptr[ids - rows.first + 1]
            sees = end > start
            if times is not None and rows.times is not None:
                sees[sees] = rows.times[start[sees]] < times[sees]  # ascending within each list
            reached[etype_str(etype)] = int(sees.sum())
            anywhere |= sees
        found = self.control.sum(torch.tensor([len(ids), int(anywhere.sum()), *reached.values()]))
        total, some, *each = found.tolist()
        warnings = self.clock.warnings
        earlier = "" if times is None else " that is earlier than the seed"
        unseen = earlier and not all(each)
        if total and (some < _REACHED * total or unseen):
            by_type = [f"{name}: {count:,}" for name, count in zip(reached, each)]
            counts = "; ".join(by_type) or f"no edge type ends at node type {ntype!r}"
            time = self.config.sampling.time
            strict = self.config.table is None or (time is not None and time.strict)
            late = earlier and each and strict
            remedy = "edges of the seed's own time count as later" if late else "see reverse"
            so = ", so the other seeds see only themselves" if some < total else ""
            warnings.append(
                f"{some:,} of {total:,} seeds for training have an in-edge{earlier}{so} "
                f"({counts}; {remedy})"
            )
        return list(dict.fromkeys(warnings))

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield the node rows that decoders or heads read: see `Plane`."""
        ntype = pick_ntype(request.ntype, self.ntypes)
        yield from embedded_nodes(
            self.job, request, self.shard, ntype, self._rows_of(task.model.encoder, ntype)
        )

    def _rows_of(self, encoder: Any, ntype: str) -> Callable[[np.ndarray], Tensor]:
        """Return global ids ``[n]`` of owned nodes → their rows ``[n, D]`` by the encoder."""
        return lambda ids: self.inference.represent(encoder, {ntype: ids})[ntype].select(ids)

    def count(self, split: str) -> int:
        return int(self.control.sum(torch.tensor(len(self._chosen(split)))))

    def _trained(self) -> Tensor:
        return self.labels[self._chosen("train")]

    def validates(self, split: str) -> bool:
        """Return whether a split is evaluated repeatedly."""
        return split == "val" and self.job.request is None

    def schema(self, target: str, out_features: int, others: tuple[str, ...] = ()) -> Schema:
        """Return the schema of the model. Collective. ``target``, ``others``: node types with
        outputs."""
        arrays, model, topology = self.shard.node_data, self.config.model, self.shard.topology
        named = {e: rows.data for e, rows in topology.items()}
        widths, embedded = model.edge_category_widths, {**model.categories, **model.ages}
        edges = choose_edge_inputs(named, model.edge_feature_names, widths)
        return Schema(
            in_features={t: i.width(arrays[t]) for t, i in self.inputs.items()},
            etypes=self.shard.etypes,
            target=target,
            out_features=out_features,
            categories=category_sizes(self.inputs, embedded, self._count),
            relations={
                e: self.sizes.resolve(f"relations of {etype_str(e)}", count)
                for e, count in relations(self.config, self.shard, self.control).items()
            },
            edge_times={
                e: model.time_width for e, rows in topology.items() if TIME in rows.carried
            },
            others=others,
            buckets=tuple(
                (t, n)
                for t, i in self.inputs.items()
                for n in i.categories
                if self._words(t, n)[:1] == [None]
            ),
            edge_features={
                e: rows.carried[FEATURES].shape[1]
                for e, rows in topology.items()
                if FEATURES in rows.carried
            },
            edge_categories=category_sizes(edges, widths, self._edge_count),
            edge_shapes={
                e: {n: named[e][n].shape[1:] for n in i.plain if named[e][n].dtype.kind == "f"}
                for e, i in edges.items()
            },
        )

    def _words(self, ntype: str, name: str) -> list[Any]:
        return self.job.meta.names.get(f"{ntype}/{name}", [])

    def classes(self, labels: Tensor) -> int:
        """Return the number of classes over all ranks, at least 2. Collective. ``labels``: this
        rank's, int64 ``[n]``."""
        highest = int(labels.max()) if len(labels) else 0
        return self.resolve("classes", max(2, self.control.max(highest + 1)))

    def resolve(self, what: str, counted: int) -> int:
        """Return a size of this task: see `Sizes.resolve`."""
        return self.sizes.resolve(self.size_name(what), counted)

    def size_name(self, what: str) -> str:
        return f"{what} of {self.job.task}" if self.job.task else what

    @cached_property
    def sizes(self) -> Sizes:
        if self.within is not None:
            return self.within.sizes
        request = self.job.request
        # also for the data of the training, since rows to predict may lack some classes
        return Sizes(None if request is None else request.weights.sizes)

    def assigned(self, seeds: Seeds) -> TaskSeeds:
        """Assign the seeds of this task to ranks. Raises DataError if there are none."""
        if not seeds.num:
            task, key = self.config.task, f"tasks.{self.job.task}" if self.job.task else "task"
            split = "the masks"
            if self.config.split_time is not None:
                split = f"from when on {key}.split is"
            raise DataError(
                f"none of the {task.seeds} of {self.seed_type} is for training and has a target",
                where=str(self.job.partition),
                remedy=f"check {key}.target and {split}",
            )
        return TaskSeeds(seed_plan(self.job, seeds.num), seeds, self.ranks.world)

    def make_batches(
        self, model: nn.Module, seeds: SeedAssigner, own: Mapping[str, np.ndarray], share: int
    ) -> BatchMaker:
        """Return the builder of training batches. Collective.

        Args:
            model: reads the blocks.
            own: node type → this rank's nodes of the seeds.
            share: approximate number of them in a batch.
        """
        config, world, bounds = self.config, self.ranks.world, self.shard.bounds
        budget = MemoryBudget(self.shard, self.inputs, self.ranks)
        path = budget.device_path()
        how, plain = None, all(i.one_table for i in self.inputs.values())
        if plain and isinstance(model, Network) and not path.used:
            how = model.first_combine
        host = self.ranks.host
        start, kept, cached = time.perf_counter(), 0.0, {}
        if config.sampling.cache != 0 and not host.holds_all:
            kept = budget.cached_share
            cached = choose_for_host(self._scores(own, share), bounds, host, kept)
        ring = config.sampling.prefetch + 3  # queued, being built, being trained on
        store = make_store(
            config,
            self.shard,
            self.inputs,
            self.ranks.data,
            self.ranks.device,
            weighted=how == "gcn",
            # locked pages of a mapped file would be private copies
            resident=budget.holds_rows or path.features == "pinned",
            ring=ring,
            host=host,
            cached=cached,
        )
        if self.ranks.device.type == "cuda":
            store.to_pinned()
        log.info(
            "this host holds the rows of ranks %s, and %.0f %% of the other rows, %.3g GB in all; "
            "ready in %.1f s",
            list(host.ranks),
            100 * kept,
            sum(len(ids) * store.row_bytes(t) for t, ids in cached.items()) / 1e9,
            time.perf_counter() - start,
        )
        reads_degree = needs_degree_sampled(config.model, config.sampling)
        sampler = NeighborSampler(
            self.shard,
            self.ranks.data,
            seed=config.train.seed,
            replace=config.sampling.replace,
            weighted=config.sampling.edge_weight is not None,
            timing=self.clock.timing,
            once=config.model.draws_once,
            count_banned=reads_degree,
        )
        self._store = path.store(
            store,
            lambda part: choose_near(self._scores(own, share), bounds, host.ranks, cached, part),
        )
        return BatchMaker(
            seeds=seeds,
            sampler=path.sampler(
                sampler, self.fanouts, seed=config.train.seed, once=config.model.draws_once
            ),
            store=self._store,
            fanouts=self.fanouts,
            inputs=self.inputs,
            degree_etypes=self.shard.etypes if reads_degree else (),
            combine="weighted" if how == "gcn" else how,
            counted=world.size > 1 and any(isinstance(m, BatchNorm) for m in model.modules()),
            identity=self.identity + self.job.digests,
        )

    def _scores(self, own: Mapping[str, np.ndarray], share: int) -> Scores:
        replace = self.config.sampling.replace
        return inclusion(self.shard, own, share, self.fanouts, replace=replace)

    @cached_property
    def identity(self) -> str:
        """Identity of the graph, whatever the number of parts: of the manifest, else the counts of
        nodes and edges."""
        meta = self.job.meta
        made_from = meta.manifest.source.made_from if meta.manifest else {}
        if "graph" in made_from:
            return str(made_from["graph"])
        counts = {t: meta.num_nodes(t) for t in meta.ntypes}
        return json.dumps([counts, [meta.num_edges(e) for e in meta.etypes]])

    def labels_of(self, stored: Tensor | None, own: int) -> Tensor:
        """Return classes, int64 ``[own]``, labels, int64 ``[own, …]``, or numbers, float32
        ``[own, …]``; -1 and NaN if the request's data have none."""
        task, request = self.config.task, self.job.request
        if stored is not None and task.several_labels:
            return as_labels(stored, f"{self.job.partition}: array {task.target!r}")
        if stored is not None:
            return stored.long().flatten() if task.classifies else stored.float()
        assert not self.config.trains
        if task.classifies:
            return torch.full((own,), -1)
        sizes = None if request is None else request.weights.sizes
        width = (sizes or {}).get(self.size_name("numbers"), 1)
        return torch.full((own, width), -1 if task.several_labels else torch.nan)

    @property
    def batch_share(self) -> int:
        """Number of seeds of a rank in a batch."""
        return -(-self.job.global_batch // self.ranks.world.size)

    def _edge_count(self, etype: EdgeType, name: str) -> int:
        own = self.shard.topology[etype].data[name][slice(*self.shard.own_edges(etype))]
        count = count_numbers(
            etype, name, own.reshape(len(own)), self.control, "model.edge_categories"
        )
        return self.sizes.resolve(f"categories of {etype_str(etype)}/{name}", count)

    def _count(self, ntype: str, name: str) -> int:
        """Return the number of categories; 0 for times. Collective."""
        values = self.shard.node_data[ntype][name]
        if name in self.config.model.ages:
            manifest = self.job.meta.manifest
            dates = manifest is not None and f"{ntype}/{name}" in manifest.transforms
            times = values[values < NEVER].numpy()
            self.clock.check(times, ntype, name, explicit=dates or None, note="")
            return 0
        lowest = int(values.min()) if len(values) else 0
        if self.control.max(-lowest) > 0:
            message = f"array {name!r} of node type {ntype!r} has categories below 0"
            remedy = "number the categories from 0, or remove it from model.categories"
            raise DataError(message, where=str(self.job.partition), remedy=remedy)
        count = self.control.max(int(values.max()) + 1 if len(values) else 0)
        count = max(count, len(self._words(ntype, name)))
        return self.sizes.resolve(f"categories of {ntype}/{name}", count)
