"""The data plane of a graph whose edges are the seeds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import InputError
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.edge_target import EdgeTarget
from raygnn.graph.layout import read_meta
from raygnn.graph.shard import NUMBER, SPLIT, load_shard
from raygnn.graph.staging import Stage
from raygnn.models.decoders import Decoder
from raygnn.models.edges import EdgeModel
from raygnn.models.registry import build_edge_model
from raygnn.sampling.edges import Edges, EdgeSeeds, in_order
from raygnn.sampling.features import FEATURES, FeatureStore, with_room
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.negatives import ENDS, End, make_negatives
from raygnn.sampling.seeds import known
from raygnn.tasks.edge import EdgeTask, LinkTask
from raygnn.tasks.link_losses import make_link_loss
from raygnn.tasks.losses import make_loss
from raygnn.tasks.metrics import measure
from raygnn.tasks.ranking import Ranking
from raygnn.tasks.task import Task
from raygnn.training.job import SPLITS, Request
from raygnn.training.partition_plane import PartitionPlane
from raygnn.training.plane import build
from raygnn.training.relations import count_relations
from raygnn.training.rows import EdgePredictions, Embedded, chunk_rows

_ORIGINAL = "original"


class EdgePlane(PartitionPlane):
    """A shard of one graph, whose edges are the seeds.

    Messages pass along the edges that are not for validation or test (``shard``); what is to be
    predicted are the edges of one type, all of them (``edges``).
    """

    @property
    def target(self) -> EdgeTarget:
        assert self.job.edges is not None
        return self.job.edges

    @property
    def etype(self) -> EdgeType:
        return self.target.etype

    @property
    def of(self) -> str:
        """See `PartitionPlane`."""
        return etype_str(self.etype)

    @property
    def _ntypes(self) -> dict[End, str]:
        return {"source": self.etype[0], "target": self.etype[2]}

    @cached_property
    def edges(self) -> Edges:
        """All edges of the type. Collective."""
        job, target, world = self.job, self.target, self.ranks.world
        assert job.partition is not None
        wanted = [target.relation, None if self.config.task.of_links else self.config.task.target]
        shard = load_shard(
            read_meta(job.partition),
            world.rank,
            world.size,
            replicated=False,
            stage=Stage.of(self.config.staging),
            edge_arrays=[name for name in wanted if name is not None],
            split=target.split,
        )
        return Edges(shard, self.control, self.etype)

    @cached_property
    def labels(self) -> Tensor:
        """Of the own edges: classes, int64 ``[own]``, or numbers, float32 ``[own, …]``."""
        task = self.config.task
        stored = torch.from_numpy(np.array(self.edges.column(task.target)))
        return stored.long().flatten() if task.classifies else stored.float()

    @cached_property
    def relations(self) -> int:
        """How many there are, at least 1. Collective."""
        name = self.target.relation
        if name is None:
            return 1
        return count_relations(self.etype, name, self.edges.column(name), self.control)

    def task(self) -> EdgeTask:
        """See `Plane`."""
        config, links = self.config, self.config.task.of_links
        out, source, target = 1, self.etype[0], self.etype[2]
        if config.task.classifies:
            out = self.classes(self.labels)
        elif not links:
            out = self.labels[:1].numel() if len(self.labels) else 1
            out = self.control.max(out)
        others = (target,) if target != source else ()
        schema = self.schema(source, config.model.hidden, others)
        relational = "distmult" if self.target.relation is not None else "dot"
        kind = config.model.decoder or (relational if links else "mlp")
        relations = self.relations
        model = build(
            config,
            lambda: build_edge_model(
                config.model, schema, self.etype, kind, relations, None if links else out
            ),
        )
        assert isinstance(model, EdgeModel)
        more = (config.train, self.ranks.world.size, out, self.job.planned)
        if links:
            loss = make_link_loss(config.task, distance=model.decoder.distance)
            return self._finish(LinkTask(model, loss, *more))
        return self._finish(EdgeTask(model, make_loss(config.task), *more))

    def batches(self, task: Task) -> BatchMaker:
        """See `Plane`."""
        model, config, edges = task.model, self.config.task, self.edges
        assert isinstance(model, EdgeModel)
        own = self._chosen("train")
        ends: dict[End, np.ndarray] = {"source": edges.src[own], "target": edges.dst[own]}
        negatives = None
        if config.of_links:
            seed = self.config.train.seed
            negatives = make_negatives(
                config.negatives, self.shard, self.control, self._ntypes, seed, ends
            )
        seeds = EdgeSeeds(
            edges.over(self.ranks.data),
            in_order(edges, own),
            exclude=None if config.exclude == "none" else config.exclude,
            reverse=self.target.split.reverse,
            target=None if config.of_links else config.target,
            relation=self.target.relation,
            negatives=negatives,
        )
        nodes: dict[str, np.ndarray] = {}
        for end, ntype in self._ntypes.items():
            nodes[ntype] = np.union1d(nodes.get(ntype, ends[end][:0]), ends[end])
        return self.make_batches(model.encoder, seeds, nodes, 2)

    def evaluate(self, task: Task, split: str) -> dict[str, float]:
        """See `Plane`."""
        model, own = task.model, self._chosen(split)
        assert isinstance(model, EdgeModel)
        rows = self._rows(model)
        if self.config.task.of_links:
            decoder = copy.deepcopy(model.decoder).float()
            sources = self._sources({FEATURES: rows["source"]})
            return self._ranking.metrics(
                decoder,
                own,
                lambda some: sources(some)[FEATURES],
                rows,
                self.ranks.device,
            )
        outputs, _ = self._outputs(model, rows, own)
        return measure(outputs, self.labels[torch.from_numpy(own)], self.config.task, self.control)

    def embed(self, task: Task, request: Request) -> Iterator[Embedded]:
        """See `Plane`: the rows of nodes that the decoder is given."""
        model, there = task.model, list(dict.fromkeys(self._ntypes.values()))
        assert isinstance(model, EdgeModel)
        if request.ntype is None and len(there) > 1:
            raise InputError(
                f"the edges join nodes of two types: {' and '.join(there)}",
                where="--ntype",
                remedy="say which with --ntype",
            )
        ntype = request.ntype or there[0]
        self.check_ntype(ntype, there)
        rows = self._inference.represent(model.encoder, [ntype])[ntype]
        yield from self.embedded(rows, ntype, request)

    def predict(self, task: Task, request: Request) -> Iterator[EdgePredictions]:
        """See `Plane`."""
        model, edges, target = task.model, self.edges, self.target
        split = request.split
        assert isinstance(model, EdgeModel)
        own = np.arange(len(edges.src)) if split == "all" else self._in_split(split)
        if not self.control.max(len(own)):
            return
        own = own[np.argsort(edges.column(NUMBER)[own])]
        outputs, sources = self._outputs(model, self._rows(model), own)
        size = chunk_rows(outputs.shape[1])
        first = self.shard.first(self.etype[2])
        for start in range(0, len(own), size):
            some = own[start : start + size]
            targets = None
            if not self.config.task.of_links:
                targets = self.labels[torch.from_numpy(some)]
            yield EdgePredictions(
                ids=edges.column(NUMBER)[some],
                outputs=outputs[start : start + size],
                targets=targets,
                splits=edges.column(SPLIT)[some],
                sources=sources[start : start + size].numpy(),
                ends=self.shard.original[self.etype[2]][edges.dst[some] - first].astype(np.int64),
                relations=None
                if target.relation is None
                else edges.column(target.relation)[some].astype(np.int64),
            )

    def count(self, split: str) -> int:
        """See `Plane`."""
        return int(self.control.sum(torch.tensor(len(self._chosen(split)))))

    def _in_split(self, split: str) -> np.ndarray:
        """Which of the own edges are in a split."""
        return self.edges.chosen(SPLITS.index(split))

    def _chosen(self, split: str) -> np.ndarray:
        """Those of them that have a target."""
        own = self._in_split(split)
        if self.config.task.of_links:
            return own
        return own[known(self.labels[torch.from_numpy(own)]).numpy()]

    def _rows(self, model: EdgeModel) -> dict[str, Tensor]:
        """End → outputs for the owned nodes of its type, float32 ``[owned, D]``. Collective."""
        ntypes = self._ntypes
        found = self._inference.represent(model.encoder, list(dict.fromkeys(ntypes.values())))
        return {end: found[ntype] for end, ntype in ntypes.items()}

    def _sources(self, columns: Mapping[str, Tensor]) -> Any:
        """What gives rows of the sources of own edges, by their places. Collective.

        Args:
            columns: name → of the owned nodes of the source type, ``[owned, …]``.
        """
        ntype, shard = self.etype[0], self.shard
        table = {n: with_room(c, shard.num_nodes(ntype)) for n, c in columns.items()}
        bounds = {ntype: shard.bounds[ntype]}
        store = FeatureStore(bounds, self.control, {ntype: table})
        return lambda some: store.gather({ntype: self.edges.src[some]})[ntype]

    def _outputs(
        self, model: EdgeModel, rows: Mapping[str, Tensor], own: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Outputs of own edges, float32 ``[n, out_features]``, and the user's numbers of their
        sources, int64 ``[n]``. Collective."""
        edges, device, target = self.edges, self.ranks.device, self.target
        decoder: Decoder = copy.deepcopy(model.decoder).float().eval()
        numbers = torch.from_numpy(self.shard.original[self.etype[0]].astype(np.int64))
        sources = self._sources({FEATURES: rows["source"], _ORIGINAL: numbers})
        first = self.shard.first(self.etype[2])
        size = chunk_rows(rows["target"].shape[1])
        outputs, originals = [], []
        for number in range(-(-self.control.max(len(own)) // size)):
            some = own[number * size : (number + 1) * size]
            found = sources(some)
            relation = None
            if target.relation is not None:
                given = edges.column(target.relation)[some].astype(np.int64)
                relation = torch.from_numpy(given).to(device)
            ends = rows["target"][torch.from_numpy(edges.dst[some] - first)]
            with torch.no_grad():
                out = decoder(found[FEATURES].to(device), ends.to(device), relation)
            outputs.append(out.float().cpu())
            originals.append(found[_ORIGINAL])
        return torch.cat(outputs), torch.cat(originals)

    @cached_property
    def _ranking(self) -> Ranking:
        ntypes = self._ntypes
        bounds: dict[str, np.ndarray] = {end: self.shard.bounds[ntypes[end]] for end in ENDS}
        return Ranking(self.edges, bounds, self.target.relation, self.relations)
